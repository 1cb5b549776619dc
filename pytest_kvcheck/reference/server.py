"""The HTTP server: SGLang's protocol over one scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from . import gauges
from .batch import Request, Sampling, Tops
from .engine import Engine, Options, build
from .scheduler import Rejected, Update
from .sessions import SessionError

T = TypeVar("T")
Handler = Callable[[web.Request], Any]
# How many tokens of a request are to be told, and how it ended (None: it goes on).
Updates = asyncio.Queue[tuple[int, dict[str, Any] | None]]
# Without progress for so many seconds, /health says 503.
HEALTH_TIMEOUT = 20.0
GENERATE_DEFAULT = 128


class Server:
    """Serves one engine. ``arguments`` are the launch flags that ``/server_info`` shows."""

    def __init__(self, options: Options, arguments: Mapping[str, Any], version: str) -> None:
        self.arguments, self.version = arguments, version
        self.streams: dict[Request, Updates] = {}
        self.engine: Engine = build(options, self._tell)
        self.scheduler = self.engine.scheduler
        self.loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, host: str, port: int, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set. Raises ``OSError`` where the port cannot be had."""
        self.loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/open_session", self.open_session),
                web.post("/close_session", self.close_session),
                web.post("/abort_request", self.abort_request),
                web.route("*", "/flush_cache", self.flush_cache),
                web.get("/health", self.health),
                web.get("/health_generate", self.health_generate),
                web.get("/server_info", self.server_info),
                web.get("/get_server_info", self.server_info),
                web.get("/v1/loads", self.loads),
                web.get("/metrics", self.metrics),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        thread = threading.Thread(target=self.scheduler.run_forever, name="scheduler", daemon=True)
        thread.start()
        address = runner.addresses[0]
        print(f"kvcheck reference engine ready on http://{address[0]}:{address[1]}", flush=True)
        await stop.wait()
        self.scheduler.stop()
        await runner.cleanup()
        await asyncio.to_thread(thread.join, 5.0)

    # --- between the scheduler's thread and ours -------------------------------------------------
    def _tell(self, updates: list[Update]) -> None:
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._dispatch, updates)

    def _dispatch(self, updates: list[Update]) -> None:
        for request, shown, finish in updates:
            stream = self.streams.get(request)
            if stream is not None:
                stream.put_nowait((shown, finish))

    async def _call(self, action: Callable[[], T]) -> T:
        # Shielded: where a client goes away meanwhile, the action is done all the same, and undone in its turn.
        return await asyncio.shield(asyncio.wrap_future(self.scheduler.call(action)))

    # --- generation ------------------------------------------------------------------------------
    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await _json(http)
        streamed = bool(body.get("stream", False))
        try:
            request, session_id = self._parse(body)
            samples = _samples(body)
        except (ValueError, TypeError, AttributeError) as error:  # also of fields that have the wrong type
            return await _error_reply(http, str(error), streamed)
        try:
            if samples > 1:
                return _respond(await self._parallel(body, request, samples))
            async with self._running(request, session_id) as updates:
                return await (self._stream(http, request, updates) if streamed else _whole(request, updates))
        except Rejected as error:
            return await self._refused(http, request, str(error), streamed)

    @contextlib.asynccontextmanager
    async def _running(self, request: Request, session_id: str | None = None) -> AsyncIterator[Updates]:
        """Queue a request; where its client goes away it is aborted. Raises :class:`Rejected`."""
        updates = self.streams.setdefault(request, asyncio.Queue())
        try:
            await self._call(lambda: self.scheduler.submit(request, session_id))
            yield updates
        finally:
            del self.streams[request]
            self.scheduler.call(lambda: self.scheduler.abort_one(request))

    async def _parallel(self, body: dict[str, Any], first: Request, samples: int) -> list[dict[str, Any]]:
        """As SGLang: the prompt is prefilled once, for the answers to find it in the cache."""
        async with self._running(Request(uuid.uuid4().hex, first.prompt, Sampling(0))) as updates:
            await _ended(updates)
        async with contextlib.AsyncExitStack() as stack:
            queues = []
            for number in range(samples):
                request, _ = self._parse({**body, "rid": f"{first.rid}_{number}"})
                queues.append((request, await stack.enter_async_context(self._running(request))))
            return [reply_body(request, *await _ended(updates)) for request, updates in queues]

    async def _stream(self, http: web.Request, request: Request, updates: Updates) -> web.StreamResponse:
        response = await _open_stream(http)
        finish = None
        while finish is None:
            shown, finish = await updates.get()
            await response.write(b"data: " + msgspec.json.encode(reply_body(request, shown, finish)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _refused(
        self, http: web.Request, request: Request, message: str, streamed: bool
    ) -> web.StreamResponse:
        """As SGLang: a streamed request gets its abort as an event, any other a 400."""
        if not streamed:
            return await _error_reply(http, message, False)
        finish = {"type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError"}
        response = await _open_stream(http)
        await response.write(
            b"data: " + msgspec.json.encode(reply_body(request, 0, finish)) + b"\n\ndata: [DONE]\n\n"
        )
        await response.write_eof()
        return response

    def _parse(self, body: dict[str, Any]) -> tuple[Request, str | None]:
        """Raises ``ValueError`` or :class:`Rejected` for what SGLang refuses."""
        ids, vocab = body.get("input_ids"), self.engine.config.vocab
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError("input_ids: expected a non-empty list of token ids (this engine has no tokenizer)")
        if not all(0 <= i < vocab for i in ids):
            raise ValueError(
                f"The input_ids contain values that are not in [0, {vocab}), the model's vocabulary"
            )
        if len(ids) >= self.engine.context:
            raise ValueError(
                f"The input ({len(ids)} tokens) is longer than the model's context length "
                f"({self.engine.context} tokens)."
            )
        params = body.get("sampling_params") or {}
        stop = frozenset(params.get("stop_token_ids") or ()) | self.engine.config.eos
        sampling = Sampling(
            max_new=int(params.get("max_new_tokens", GENERATE_DEFAULT)),
            temperature=float(params.get("temperature", 1.0)),
            seed=int(params.get("sampling_seed") or self.arguments.get("random_seed") or 0),
            stop=frozenset() if params.get("ignore_eos") else stop,
        )
        if sampling.max_new < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {sampling.max_new}.")
        wants = bool(body.get("return_logprob", False))
        start = int(body.get("logprob_start_len", -1)) if wants else -1
        if start > len(ids):
            raise ValueError(f"logprob_start_len {start} is higher than the number of input tokens {len(ids)}")
        rid = body.get("rid") or uuid.uuid4().hex
        tops = int(body.get("top_logprobs_num") or 0) if wants else 0
        request = Request(rid, ids, sampling, wants, start, tops)
        session = body.get("session_params") or {}
        for name in ("offset", "replace", "drop_previous_output"):
            if session.get(name):
                request.refused = f"Streaming sessions do not support {name}."
        session_id = session.get("id")
        if not isinstance(session_id, str | None):
            raise ValueError(f"session_params.id: expected a string, found {session_id!r}")
        return request, session_id

    # --- sessions and control --------------------------------------------------------------------
    async def open_session(self, http: web.Request) -> web.Response:
        body = await _json(http)
        if "capacity_of_str_len" not in body:
            return _respond({"error": {"message": "capacity_of_str_len: expected a number"}}, 422)
        if not self.engine.options.streaming_sessions or not body.get("streaming"):
            message = "Only streaming sessions: send streaming=true, and start with --enable-streaming-session"
            return _respond({"error": {"message": message}}, 400)
        try:
            opened = await self._call(
                lambda: self.scheduler.open_session(body.get("session_id"), body.get("timeout"))
            )
        except SessionError as error:
            return _respond({"error": {"message": str(error)}}, 400)
        return _respond(opened)

    async def close_session(self, http: web.Request) -> web.Response:
        body = await _json(http)
        await self._call(lambda: self.scheduler.close_session(str(body.get("session_id"))))
        return web.Response()

    async def abort_request(self, http: web.Request) -> web.Response:
        body = await _json(http)
        await self._call(lambda: self.scheduler.abort(body.get("rid") or "", bool(body.get("abort_all"))))
        return web.Response()

    async def flush_cache(self, http: web.Request) -> web.Response:
        """Waits up to ``timeout`` seconds for the engine to come to rest."""
        until = time.monotonic() + float(http.query.get("timeout", 0))
        while not (done := await self._call(self.scheduler.flush)) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        text = "Cache flushed.\n" if done else "Cache not flushed because there are pending requests.\n"
        return web.Response(status=200 if done else 400, text=text)

    async def health(self, http: web.Request) -> web.Response:
        still = self.scheduler.clock() - self.scheduler.progress
        lying = self.scheduler.faults.on("health-lies-when-stuck")
        return web.Response(status=200 if lying or self.scheduler.idle or still < HEALTH_TIMEOUT else 503)

    async def health_generate(self, http: web.Request) -> web.Response:
        """Generates one token; 503 where none comes."""
        request = Request("HEALTH_CHECK_" + uuid.uuid4().hex, [0], Sampling(1))
        try:
            async with self._running(request) as updates:
                await asyncio.wait_for(_ended(updates), HEALTH_TIMEOUT)
            return web.Response()
        except TimeoutError:
            return web.Response(status=503)

    # --- what the engine tells of itself ---------------------------------------------------------
    async def server_info(self, http: web.Request) -> web.Response:
        return _respond(gauges.server_info(self.version, self.engine, self.arguments))

    async def loads(self, http: web.Request) -> web.Response:
        reading = await self._call(lambda: gauges.read(self.engine))
        return _respond(gauges.loads(self.version, self.engine, reading))

    async def metrics(self, http: web.Request) -> web.Response:
        if not self.arguments.get("enable_metrics"):
            return web.Response(status=404)
        reading = await self._call(lambda: gauges.read(self.engine))
        return web.Response(text=gauges.metrics(self.engine, reading))


async def _ended(updates: Updates) -> tuple[int, dict[str, Any]]:
    """How many tokens a request shows in the end, and why it ended."""
    while True:
        shown, finish = await updates.get()
        if finish is not None:
            return shown, finish


async def _whole(request: Request, updates: Updates) -> web.Response:
    return _respond(reply_body(request, *await _ended(updates)))


def _samples(body: dict[str, Any]) -> int:
    """How many answers are wanted. Raises ``ValueError`` where they cannot be given."""
    samples = int((body.get("sampling_params") or {}).get("n", 1))
    if samples < 1 or (samples > 1 and (body.get("stream") or body.get("session_params"))):
        raise ValueError(
            f"sampling_params.n: expected 1, or more for a request without stream and session, found {samples}"
        )
    return samples


def reply_body(request: Request, shown: int, finish: dict[str, Any] | None) -> dict[str, Any]:
    """One reply or stream event: everything up to the ``shown``-th output token."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(request.prompt),
        "weight_version": "default",
        "num_retractions": request.retractions,
        "completion_tokens": shown,
        "cached_tokens": request.cached or 0,
        "cached_tokens_details": None,
        "dp_rank": None,
    }
    rounds = request.accepted
    if rounds:
        count, accepted = sum(rounds.values()), sum(n * times for n, times in rounds.items())
        meta["spec_verify_ct"] = count
        meta["spec_accepted_drafts"] = meta["spec_num_correct_drafts"] = accepted
        meta["spec_accept_length"] = shown / count
        histogram = [rounds.get(n, 0) for n in range(max(rounds) + 1)]
        meta["spec_accept_histogram"] = meta["spec_correct_drafts_histogram"] = histogram
    if request.logprobs:
        start = request.input_start
        inputs: list[tuple[float | None, int, None]] = []
        if 0 <= start < len(request.prompt):
            known = [None, *request.input_logprobs]
            inputs = [(lp, i, None) for lp, i in zip(known, request.prompt[start:], strict=False)]
        outputs = zip(request.output_logprobs[:shown], request.output[:shown], strict=True)
        meta["input_token_logprobs"] = inputs
        meta["output_token_logprobs"] = [(lp, i, None) for lp, i in outputs]
        meta["output_token_logprobs_length"] = shown
        if request.tops:
            meta["input_top_logprobs"] = [None, *map(_tops, request.input_tops)] if inputs else []
            meta["output_top_logprobs"] = [_tops(tops) for tops in request.output_tops[:shown]]
    return {"output_ids": request.output[:shown], "meta_info": meta}


def _tops(tops: Tops) -> list[tuple[float, int, None]]:
    return [(lp, i, None) for lp, i in tops]


def _respond(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def _open_stream(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    return response


async def _error_reply(http: web.Request, message: str, streamed: bool) -> web.StreamResponse:
    body = {"error": {"message": message}}
    if not streamed:
        return _respond(body, 400)
    response = await _open_stream(http)
    await response.write(b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


async def _json(http: web.Request) -> dict[str, Any]:
    """The body as a JSON object; a 400 where it is none."""
    try:
        body = msgspec.json.decode(await http.read() or b"{}")
    except msgspec.DecodeError as error:
        raise web.HTTPBadRequest(text=f"expected a JSON object, found: {error}") from error
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text=f"expected a JSON object, found {type(body).__name__}")
    return body
