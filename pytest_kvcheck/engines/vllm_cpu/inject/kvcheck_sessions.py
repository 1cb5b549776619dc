"""HTTP routes for vLLM's streaming input sessions, which stock servers offer over their audio socket only.

Use: put this folder on PYTHONPATH and give ``--middleware kvcheck_sessions.sessions``. Nothing of vLLM
changes: a session is one ``engine_client.generate(...)`` that is fed turn by turn, so its KV blocks stay with
it between turns. A turn answers as a streamed completion does.

POST /kvcheck/open {session_id} · POST /kvcheck/close {session_id} · GET /kvcheck/sessions
POST /kvcheck/turn {session_id, request_id, prompt, max_tokens, logprobs, stop_token_ids}: prompt is what is new
POST /kvcheck/abort {request_ids}: of turns by their request_id, else of completions; none given: everything

vLLM drops a turn's last sampled token, which it never computed; it is sent again in front of the next turn's
tokens, so that the engine's history is what the client saw. An abort ends vLLM's request and with it what it
holds; the session goes on from its last finished turn, whose tokens are sent again.
"""

import asyncio
import json
import uuid

from fastapi.responses import JSONResponse, StreamingResponse
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

OPEN = {}
CLOSE_BOUND = 10.0


class Session:
    """One session: ``history`` is what the client has seen; ``queue`` feeds the engine while ``task`` runs."""

    def __init__(self, engine, session_id):
        self.engine, self.id, self.history = engine, session_id, []
        self.turn = None  # the request id of the turn in flight
        self.task = self.inputs = self.outputs = self.engine_id = None

    def feed(self, prompt, params):
        """Hand a turn's tokens to the engine; True where they begin a request, since none runs (any more)."""
        if self.task is None or self.task.done():
            self.inputs, self.outputs = asyncio.Queue(), asyncio.Queue()
            self.engine_id = f"kvcheck-{self.id}-{uuid.uuid4().hex[:8]}"
            self.task = asyncio.create_task(self._run())
            ids, fresh = [*self.history, *prompt], True
        else:
            ids, fresh = [*self.history[-1:], *prompt], False
        self.inputs.put_nowait(StreamingInput(TokensPrompt(prompt_token_ids=ids), params))
        return fresh

    async def _run(self):
        async def chunks():
            while (chunk := await self.inputs.get()) is not None:
                yield chunk

        try:
            async for output in self.engine.generate(chunks(), sampling(1), self.engine_id, session_id=self.id):
                self.outputs.put_nowait(output)
            self.outputs.put_nowait(None)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the engine's word, passed on to whoever waits for the turn
            self.outputs.put_nowait(error)

    async def stop(self):
        """End the engine's request, in flight or idle. What the client has seen stays."""
        if self.task is None:
            return
        if self.turn is None:
            self.inputs.put_nowait(None)
        else:
            await self.engine.abort(self.engine_id)
        await asyncio.wait([self.task], timeout=CLOSE_BOUND)
        self.task.cancel()
        self.task = None

    async def answer(self, body):
        """The turn as events of a streamed completion."""
        prompt, sent = body["prompt"], []
        finished, usage = None, {}
        try:
            fresh = self.feed(prompt, sampling(body["max_tokens"], body.get("stop_token_ids")))
            outputs = self.outputs
            while finished is None:
                output = await outputs.get()
                if isinstance(output, Exception):
                    yield event({"error": {"message": repr(output), "code": 500}})
                    return
                if output is None or not output.outputs:
                    finished = "abort"
                    yield event({"choices": [choice([], None, "abort")]})
                    break
                part = output.outputs[0]
                if fresh:
                    usage = counts(output)
                sent += part.token_ids
                finished = part.finish_reason
                logprobs = part.logprobs if body.get("logprobs") is not None else None
                yield event({"choices": [choice(part.token_ids, logprobs, finished)]})
            if finished != "abort":
                self.history += [*prompt, *sent]
            yield event({"choices": [], "usage": {**usage, "completion_tokens": len(sent)}})
            yield "data: [DONE]\n\n"
        finally:
            gone = finished is None  # the client went away in mid-turn
            if gone or finished == "abort":
                task, self.task = self.task, None
                if gone and task is not None:
                    task.cancel()  # which aborts the engine's request
            self.turn = None


def sampling(tokens, stop_token_ids=None):
    # Log-probs in every turn: vLLM keeps one collector for the whole session, made as its first turn wanted.
    return SamplingParams(
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        stop_token_ids=stop_token_ids,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )


def counts(output):
    """What vLLM counts of the first turn of a request. Of later ones it has nothing: its API adds up the new
    tokens without the outputs between them, and its scheduler reports the prefill once a request.
    """
    cached = {"cached_tokens": output.num_cached_tokens}
    return {"prompt_tokens": len(output.prompt_token_ids), "prompt_tokens_details": cached}


def choice(ids, logprobs, finish_reason):
    shown = None
    if logprobs:
        values = [entry[token].logprob for entry, token in zip(logprobs, ids, strict=True)]
        shown = {"token_logprobs": values}
    return {"index": 0, "text": "", "token_ids": list(ids), "logprobs": shown, "finish_reason": finish_reason}


def event(body):
    return f"data: {json.dumps(body)}\n\n"


def refuse(message):
    return JSONResponse({"error": {"message": message, "code": 400}}, 400)


async def sessions(request, call_next):
    """The middleware: its own routes are answered here, all others by vLLM."""
    path = request.url.path
    if not path.startswith("/kvcheck/"):
        return await call_next(request)
    engine = request.app.state.engine_client
    if path == "/kvcheck/sessions":
        return JSONResponse({"open": sorted(OPEN), "held": sum(one.task is not None for one in OPEN.values())})
    body = await request.json()
    if path == "/kvcheck/abort":
        return await abort(engine, body.get("request_ids") or [])
    session = OPEN.get(body.get("session_id"))
    if path == "/kvcheck/open":
        if session is not None:
            return refuse("the session is open already")
        OPEN[body["session_id"]] = Session(engine, body["session_id"])
        return JSONResponse({"session_id": body["session_id"]})
    if path == "/kvcheck/close":
        if session is not None:
            del OPEN[session.id]
            await session.stop()
        return JSONResponse({"closed": session is not None})
    if session is None:
        return refuse("the session does not exist")
    if path == "/kvcheck/turn":
        limit = request.app.state.vllm_config.model_config.max_model_len
        whole = len(session.history) + len(body["prompt"]) + body["max_tokens"]
        if session.turn is not None:
            return refuse("the session already has an active request")
        if body.get("invalid"):
            return refuse("streaming sessions take no such parameter")
        if whole > limit:
            return refuse(f"the context length is {limit} tokens, history, prompt and output have {whole}")
        session.turn = body["request_id"]
        return StreamingResponse(session.answer(body), media_type="text/event-stream")
    return refuse(f"no route {path}")


async def abort(engine, request_ids):
    turns = {session.turn: session for session in OPEN.values() if session.turn is not None}
    for request_id in request_ids or list(turns):
        if request_id in turns:
            await engine.abort(turns[request_id].engine_id)
        else:
            await engine.abort(f"cmpl-{request_id}-0")
    return JSONResponse({"aborted": len(request_ids) or len(turns)})
