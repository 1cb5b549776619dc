"""The load client: many requests at once over loopback, each with its own deadline and a way to cut it short.

Nothing that a server or the network does raises here; it ends up in the :class:`~pytest_kvcheck.trace.Reply`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pytest_kvcheck.client.calls import Call, ReplyParser
from pytest_kvcheck.client.control import LOOPBACK
from pytest_kvcheck.client.sse import SseDecoder
from pytest_kvcheck.trace import FINISHED, Finish, Reply

END_MARK = b"[DONE]"
READ_BUFFER = 4 << 20
# One event or one body; above it the server sends garbage, and the client must not die of it.
GREATEST_REPLY = 256 << 20
# A request that is not streamed is never acknowledged: this long after its last byte it counts as received.
ACKNOWLEDGE_GRACE = 0.1
# How long a server may take to close the stream behind the end mark.
CLOSE_GRACE = 1.0


class Flight:
    """One request under way: how many tokens it has shown, and a way to cut it.

    ``shown`` is -1 until the server is known to have the request: until its response headers are here, or
    (not streamed) ``ACKNOWLEDGE_GRACE`` after it was written. ``first_shown`` and ``last_shown`` are when
    tokens came, by the clock that ``now`` reads.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.shown = -1
        self.first_shown: float | None = None
        self.last_shown: float | None = None
        self.ended = False
        self.cut_as: Finish | None = None
        self.cut_message = ""
        self._now = now
        self._scope: asyncio.Timeout | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def begin(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        if self.cut_as is not None:
            self._expire()

    def show(self, tokens: int) -> None:
        """The client has seen ``tokens`` output tokens of this request so far."""
        if tokens > self.shown and not self.ended:
            self.shown = tokens
            if tokens > 0:
                self.last_shown = self._now()
                if self.first_shown is None:
                    self.first_shown = self.last_shown
            self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def cut(self, finish: Finish, message: str) -> None:
        """Close the request's socket now; its reply ends as ``finish``. Without effect once it has ended."""
        if self.cut_as is None and not self.ended:
            self.cut_as, self.cut_message = finish, message
            self._expire()

    async def reached(self, tokens: int) -> bool:
        """Wait until ``tokens`` are shown (0: until the server has the request). False: it ended before."""
        if self.shown < tokens and not self.ended:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((tokens, future))
            await future
        return self.shown >= tokens and not self.ended

    def _wake(self) -> None:
        still = []
        for tokens, future in self._waiting:
            if not (self.ended or self.shown >= tokens):
                still.append((tokens, future))
            elif not future.done():
                future.set_result(None)
        self._waiting = still

    def _expire(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())


class PlainReply:
    """The parser for calls that generate nothing: 2xx ends as "stop", 4xx as "rejected"."""

    def __init__(self) -> None:
        self.body = b""

    @property
    def shown(self) -> int:
        return 0

    def feed(self, data: bytes) -> None:
        self.body += data

    def finish(self, http_status: int | None, error: str = "", complete: bool = True) -> Reply:
        finish: Finish = "error"
        if http_status is not None and not error:
            finish = "stop" if http_status < 300 else "rejected" if 400 <= http_status < 500 else "error"
        text = "" if finish == "stop" else _excerpt(self.body)
        return Reply(http_status=http_status, finish=finish, message=error or text)


class LoadClient:
    """An HTTP client for load against one server on this machine. Use it as an async context manager.

    Raises ``ValueError`` for a host that is not loopback.
    """

    def __init__(self, base_url: str) -> None:
        host = urlsplit(base_url).hostname
        if host not in LOOPBACK:
            raise ValueError(f"expected a server on this machine ({', '.join(LOOPBACK)}), found host {host!r}")
        self._base = base_url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LoadClient:
        sent = aiohttp.TraceConfig()
        sent.on_request_chunk_sent.append(_on_sent)
        self._session = aiohttp.ClientSession(
            # A new connection for each request: an idle one that the server closes at the moment of reuse
            # would look like a failed request.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None),
            read_bufsize=READ_BUFFER,
            trust_env=False,
            trace_configs=[sent],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, call: Call, deadline: float, flight: Flight | None = None) -> tuple[Reply, bytes]:
        """A call that generates nothing (open, close, abort, flush), and the body of its answer."""
        parser = PlainReply()
        return await self.request(call, parser, stream=False, deadline=deadline, flight=flight), parser.body

    async def request(
        self, call: Call, parser: ReplyParser, *, stream: bool, deadline: float, flight: Flight | None = None
    ) -> Reply:
        """Send one request and read its reply to the end, streamed or not.

        ``deadline`` in seconds from now; past it the socket is closed and the reply ends as "timeout". A cut
        flight ends as what it was cut as. A transport error ends as "error" with the stage at which it came.
        """
        flight = flight or Flight()
        exchange = _Exchange(parser, stream, flight)
        error, expired = "", False
        try:
            async with asyncio.timeout(max(deadline, 0.0)) as scope:
                flight.begin(scope)
                await self._send(call, exchange, scope)
        except TimeoutError:
            expired = not exchange.ended
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            error = f"{exchange.stage}: {_describe(problem)}"
        finally:
            flight.end()
        if not expired:
            return exchange.reply("" if exchange.ended else error)
        if flight.cut_as is not None:
            return exchange.cut(flight.cut_as, flight.cut_message)
        return exchange.cut("timeout", f"{exchange.stage}, then nothing more within {deadline:g} s")

    async def _send(self, call: Call, exchange: _Exchange, scope: asyncio.Timeout) -> None:
        assert self._session is not None, "use LoadClient as an async context manager"
        loop = asyncio.get_running_loop()
        body = None if call.json is None else msgspec.json.encode(call.json)
        async with self._session.request(
            call.method,
            self._base + call.path,
            data=body,
            headers={"Content-Type": "application/json"} if body is not None else None,
            allow_redirects=False,
            trace_request_ctx=exchange.flight,
        ) as response:
            exchange.start(response.status, response.content_type)
            async for chunk in response.content.iter_any():
                if not exchange.ended:
                    exchange.take(chunk)
                    if exchange.ended:
                        scope.reschedule(loop.time() + CLOSE_GRACE)
            exchange.close()


class _Exchange:
    """What has come back for one request so far."""

    def __init__(self, parser: ReplyParser, stream: bool, flight: Flight) -> None:
        self.flight = flight
        self.ended = False
        self._parser = parser
        self._stream = stream
        self._status: int | None = None
        self._content_type = ""
        self._decoder: SseDecoder | None = None
        self._body = bytearray()
        self._events = 0

    @property
    def stage(self) -> str:
        """How far the exchange got, as the beginning of a sentence."""
        if self._status is None:
            return "no reply"
        if self._decoder is not None:
            return f"HTTP {self._status}, {self._events} events, {max(self.flight.shown, 0)} tokens"
        return f"HTTP {self._status}, {len(self._body)} bytes of body"

    def start(self, status: int, content_type: str) -> None:
        self._status, self._content_type = status, content_type
        if content_type == "text/event-stream":
            self._decoder = SseDecoder()
        self.flight.show(0)

    def take(self, chunk: bytes) -> None:
        if self._decoder is None:
            self._body += chunk
            size = len(self._body)
        else:
            for data in self._decoder.feed(chunk):
                if data == END_MARK:
                    self.ended = True
                    break
                self._parser.feed(data)
                self._events += 1
            self.flight.show(self._parser.shown)
            size = self._decoder.pending
        if size > GREATEST_REPLY:
            raise ValueError(f"expected at most {GREATEST_REPLY >> 20} MiB in one event or body, found more")

    def close(self) -> None:
        """The server has closed its side in good order."""
        if self._decoder is None:
            self._parser.feed(bytes(self._body))
            self.ended = True

    def reply(self, error: str = "") -> Reply:
        """The reply of an exchange that the server ended, well or badly."""
        cut = self._decoder is not None and not self.ended
        reply = self._parser.finish(self._status, error, complete=not cut and not error)
        if reply.finish in FINISHED and (error or (self._status or 500) >= 400):
            reply.finish = "error"
        if not reply.message and (error or reply.finish == "error"):
            reply.message = error or f"{self.stage}: {_excerpt(self._body)}"
        if cut and not reply.faults:
            pending = self._decoder.pending if self._decoder is not None else 0
            inside = f", {pending} bytes into another event" if pending else ""
            reply.faults.append(f"the stream ended without its end mark after {self._events} events{inside}")
        if self._status == 200 and self._stream != (self._decoder is not None):
            expected = "a stream of server-sent events" if self._stream else "one JSON body"
            reply.faults.append(f"expected {expected}, found content type {self._content_type!r}")
        reply.events = reply.events or self._events
        return reply

    def cut(self, finish: Finish, message: str) -> Reply:
        """The reply of an exchange that this client ended; parsers find no fault in what did not arrive."""
        reply = self._parser.finish(self._status, message, complete=False)
        reply.finish, reply.message = finish, message
        reply.events = reply.events or self._events
        return reply


async def _on_sent(
    session: aiohttp.ClientSession, context: SimpleNamespace, sent: aiohttp.TraceRequestChunkSentParams
) -> None:
    asyncio.get_running_loop().call_later(ACKNOWLEDGE_GRACE, context.trace_request_ctx.show, 0)


def _describe(problem: BaseException) -> str:
    if isinstance(problem, aiohttp.ClientConnectorError):
        reason = os.strerror(problem.errno) if problem.errno else str(problem.os_error)
        return f"no connection to {problem.host}:{problem.port}: {reason}"
    if isinstance(problem, aiohttp.ServerDisconnectedError):
        return "the server closed the connection"
    return f"{type(problem).__name__}: {problem}"[:300] if str(problem) else type(problem).__name__


def _excerpt(body: bytes | bytearray) -> str:
    return bytes(body[:200]).decode(errors="replace").strip() or "an empty body"
