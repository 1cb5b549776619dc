"""A server that speaks enough of SGLang's protocol to drive a client, and that misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiohttp import web

Json = dict[str, Any]


class FakeServer:
    """Runs in a thread of its own; use it as a context manager. Greedy: each token is the one before it plus 1.

    ``behave`` maps the body of a generate request to a behaviour: "ok", "slow" (20 ms a token), "hang", "500",
    "400", "truncate" (no end mark), "cut" (half an event), "reset", "garbage", "html", "nan", "linger" (the
    connection stays open behind the end mark), "late" (all is over a moment before the last event is sent).
    """

    def __init__(self, behave: Callable[[Json], str] = lambda body: "ok") -> None:
        self.behave = behave
        self.context = 1 << 30
        self.bodies: list[Json] = []
        self.calls: list[tuple[str, Json]] = []
        self.sessions: dict[str, list[int]] = {}
        self.in_flight: dict[str, int] = {}
        self.busy: set[str] = set()  # sessions whose turn runs
        self.peak = 0
        self.aborted: set[str] = set()
        self.left: list[str] = []
        self.open_reply: Callable[[Json], web.Response] | None = None
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def stop(self) -> None:
        """Stop listening and drop every connection."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/open_session", self._open)
        app.router.add_post("/close_session", self._close)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/flush_cache", self._flush)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _open(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("open", body))
        if self.open_reply is not None:
            return self.open_reply(body)
        self.sessions[body["session_id"]] = []
        return web.json_response(body["session_id"])

    async def _close(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("close", body))
        self.sessions.pop(body["session_id"], None)
        return web.Response()

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("abort", body))
        self.aborted |= set(self.in_flight) if body.get("abort_all") else {body["rid"]}
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        self.calls.append(("flush", {}))
        return web.Response(status=400 if self.in_flight else 200)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: Json = await request.json()
        self.bodies.append(body)
        rid, session = body["rid"], body.get("session_params", {}).get("id")
        if session in self.busy:
            message = "Streaming session already has an active request."
            return web.json_response({"error": {"message": message}}, status=400)
        self.busy |= {session} if session else set()
        self.in_flight[rid] = 0
        self.peak = max(self.peak, len(self.in_flight))
        try:
            return await self._answer(request, body, self.behave(body))
        except (asyncio.CancelledError, ConnectionError):
            self.left.append(rid)
            raise
        finally:
            del self.in_flight[rid]
            self.busy.discard(session)

    async def _answer(self, request: web.Request, body: Json, how: str) -> web.StreamResponse:
        session = body.get("session_params", {}).get("id")
        if how == "500":
            return web.Response(status=500, text="Internal Server Error: out of slots")
        if how == "400" or "offset" in body.get("session_params", {}):
            return web.json_response({"error": {"message": "not allowed"}}, status=400)
        if how == "hang":
            await asyncio.sleep(3600)
        if how == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if how == "html":
            return web.Response(text="<html>proxy</html>", content_type="text/html")
        history = self.sessions.get(session, []) if session else []
        prompt = history + body["input_ids"]
        if len(prompt) >= self.context:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        events = self._events(body, prompt, how)
        if not body["stream"]:
            last: Json = {}
            async for event in events:
                last = event
            self._commit(session, prompt, last)
            return web.json_response(last)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        async for event in events:
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            if how == "garbage":
                data = b"data: \xff\xfe{not json\n\n"
            if how == "cut" and self.in_flight[body["rid"]] == 2:
                await reply.write(data[:20])
                return reply
            if how == "late" and event["meta_info"]["finish_reason"]:
                self._commit(session, prompt, event)
                self.busy.discard(session)
                await asyncio.sleep(0.1)
            await reply.write(data)
            if how != "late" and event["meta_info"]["finish_reason"]:
                self._commit(session, prompt, event)
        if how == "truncate":
            return reply
        await reply.write(b"data: [DONE]\n\n")
        if how == "linger":
            await asyncio.sleep(3600)
        return reply

    async def _events(self, body: Json, prompt: list[int], how: str) -> Any:
        new, out, probs = body["sampling_params"]["max_new_tokens"], [], []
        for step in range(new):
            await asyncio.sleep(0.02 if how == "slow" else 0)
            out.append(10 + ((prompt + out)[-1] + 1) % 400)
            probs.append([float("nan") if how == "nan" else -0.25 * (step + 1), out[-1], None])
            self.in_flight[body["rid"]] = len(out)
            reason: Json | None = None
            if body["rid"] in self.aborted:
                reason = {"type": "abort", "message": "Aborted"}
            elif len(out) == new:
                reason = {"type": "length", "length": new}
            meta = {
                "id": body["rid"],
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(out),
                "cached_tokens": max(0, len(prompt) - len(body["input_ids"]) - 1),
                "output_token_logprobs": list(probs),
            }
            yield {"output_ids": list(out), "meta_info": meta}
            if reason is not None:
                return

    def _commit(self, session: str | None, prompt: list[int], last: Json) -> None:
        if session in self.sessions and last["meta_info"]["finish_reason"]["type"] == "length":
            self.sessions[session] = prompt + last["output_ids"]
