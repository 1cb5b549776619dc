"""vLLM's completions protocol: requests as calls, answers as replies. Token ids only, never text.

Input log-probs are asked for with ``echo``, the one way that a streamed completion gives them. vLLM then reads
nothing from its prefix cache, so such a request's count of cached tokens says nothing and is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace as changed

from pytest_kvcheck.engines.base import Call
from pytest_kvcheck.engines.samples import joined
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import FINISHED, Finish, Reply

# No vocabulary has this token: every release refuses a bias on it, after parsing and before scheduling. An
# unknown *prompt* id would do too, but without a tokenizer (as our models run) it kills vLLM's engine core.
REFUSED_BIAS = {"2147483647": 1.0}
# Leaves the likeliest token only: its own probability is never as small.
LIKELIEST = 1e-9
# log_softmax may round a certainty to a hair above zero.
POSITIVE_SLACK = 1e-5
# vLLM writes minus infinity as this number, because JSON has none.
LEAST_LOGPROB = -9999.0
FINISHES: dict[str, Finish] = {"length": "length", "stop": "stop", "repetition": "stop", "abort": "abort"}


def request_call(op: Operation, rid: str, history: Sequence[int], named: bool = False) -> Call:
    """A turn sends the whole history again, then its new tokens: the prefix cache may hit what it knows.

    ``named``: have vLLM name the request in its KV events, which it does by its session only.
    """
    body: dict[str, Any] = {
        "prompt": [*history, *op.input_ids] if op.kind == "turn" else list(op.input_ids),
        "max_tokens": op.max_new_tokens or 1,
        "temperature": 0,
        "ignore_eos": True,
        "request_id": rid,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": op.stream,
    }
    if named:
        body["session_id"] = rid
    if op.stop_ids:
        body["stop_token_ids"] = list(op.stop_ids)
    if op.samples > 1:
        # vLLM refuses several answers of temperature 0; to sample from the likeliest token only is as greedy.
        # Not by top_k: on a CPU that ends a server which speculates (docs/findings/vllm-speculated-top-k.md).
        body |= {"n": op.samples, "temperature": 1, "top_p": LIKELIEST}
    if op.stream:
        body["stream_options"] = {"include_usage": True}
    if op.kind == "score" or op.logprobs != "none":
        body["logprobs"] = 1 if op.kind == "score" else 0
    if wants_input_logprobs(op):
        body["echo"] = True
    if op.invalid is not None:
        body["logit_bias"] = REFUSED_BIAS
    return Call("POST", "/v1/completions", body)


def session_call(op: Operation, rid: str, session_id: str) -> Call:
    """A turn of a session that the server keeps (``vllm_cpu/inject/kvcheck_sessions.py``): new tokens only."""
    body: dict[str, Any] = {
        "session_id": session_id,
        "request_id": rid,
        "prompt": list(op.input_ids),
        "max_tokens": op.max_new_tokens,
        "logprobs": None if op.logprobs == "none" else 0,
    }
    if op.stop_ids:
        body["stop_token_ids"] = list(op.stop_ids)
    if op.invalid is not None:
        body["invalid"] = op.invalid
    return Call("POST", "/kvcheck/turn", body)


def engine_request_id(rid: str) -> str:
    """The id under which the engine knows the one prompt of a completion."""
    return f"cmpl-{rid}-0"


def wants_input_logprobs(op: Operation) -> bool:
    return op.kind == "score" or op.logprobs == "input"


class CompletionParser:
    """One completion's answer, streamed or whole; ``echo`` False where the prompt's log-probs do not come.

    Never raises: what cannot be understood becomes a fault of the reply, one sentence each, the first of its
    sort with the number of its like.
    """

    def __init__(self, op: Operation, history: int, echo: bool = True) -> None:
        self._op, self._history = op, history
        self._samples: list[CompletionParser] = []
        self._echo = echo and wants_input_logprobs(op)
        self._sent = (history if op.kind == "turn" else 0) + len(op.input_ids)
        self._reply = Reply()
        self._ids: list[int] = []
        self._prompt: list[int] | None = None
        self._logprobs: list[Any] = []
        self._tops: list[Any] = []
        self._reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._refused: tuple[Finish, str] | None = None
        self._done = False
        self._faults: dict[str, list[str]] = {}

    @property
    def shown(self) -> int:
        return len(self._ids)

    def feed(self, data: bytes) -> None:
        data = data.strip()
        if not data:
            return
        if self._done:
            self._fault("late", "the stream went on after its end mark [DONE]")
        elif data == b"[DONE]":
            self._done = True
        else:
            self._reply.events += 1
            event = _decode(data)
            if not isinstance(event, dict):
                self._fault("json", f"expected a JSON object, found {data[:120]!r}")
            elif "error" in event or event.get("object") == "error":
                self._take_error(event)
            elif self._op.samples > 1 and isinstance(event.get("choices"), list):
                self._take_samples(event)
            else:
                self._take(event)

    def finish(self, http_status: int | None, error: str = "", complete: bool = True) -> Reply:
        if self._samples:
            replies = [sample.finish(http_status, error, complete) for sample in self._samples]
            self._check_sum(replies)
            return joined(self._op, replies)
        reply = self._reply
        reply.http_status = http_status
        answered = http_status is not None and 200 <= http_status < 300
        if self._refused:
            reply.finish, reply.message = self._refused
        elif self._reason in FINISHES:
            reply.finish = FINISHES[self._reason]
        elif (self._done or complete) and not self._ids and self._usage.get("completion_tokens") == 0:
            # All that vLLM 0.32 says of a request that was aborted before its first token: its counts.
            reply.finish, reply.message = "abort", "ended before its first token"
        elif self._reason is not None:
            reply.message = f"expected a known finish reason, found {self._reason[:40]!r}"
        else:
            reply.message = error or f"HTTP {http_status}: no finish reason"
            if http_status is not None and 400 <= http_status < 500:
                reply.finish = "rejected"
            elif answered and not error:
                self._fault("cut", f"the answer ended after {self.shown} tokens without a finish reason")
        if self._op.stream and answered and not error and not self._done and not complete:
            self._fault("end", f"the stream ended after {self.shown} tokens without its end mark [DONE]")
        reply.output_ids = self._ids
        self._take_counts(reply)
        if reply.finish in ("length", "stop", "abort"):
            self._take_logprobs(reply)
        reply.faults += [
            texts[0] + (f" ({len(texts)} such)" if len(texts) > 1 else "") for texts in self._faults.values()
        ]
        return reply

    # --- events ----------------------------------------------------------------------------------
    def _take_error(self, event: dict[str, Any]) -> None:
        found = event.get("error", event)
        error = found if isinstance(found, dict) else {"message": found}
        code, message = error.get("code"), error.get("message")
        text = message if isinstance(message, str) else json.dumps(message, default=str)
        refused = isinstance(code, int) and 400 <= code < 500
        self._refused = ("rejected" if refused else "error", text[:2000])

    def _take(self, event: dict[str, Any]) -> None:
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        if isinstance(event.get("metrics"), dict):
            self._take_metrics(event["metrics"])
        choices = event.get("choices")
        if not choices and self._usage:
            return  # the last event of a stream carries the counts only
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            self._fault("choices", f"expected one choice in every event, found {str(choices)[:80]}")
            return
        choice = choices[0]
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not _all_ids(ids):
            self._fault("ids", f"expected token_ids as a list of integers, found {str(ids)[:80]}")
            return
        self._ids += ids
        if _all_ids(choice.get("prompt_token_ids")):
            self._prompt = choice["prompt_token_ids"]
        if isinstance(choice.get("finish_reason"), str):
            self._reason = choice["finish_reason"]
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            self._logprobs += _list(logprobs.get("token_logprobs"))
            self._tops += _list(logprobs.get("top_logprobs"))

    def _take_samples(self, event: dict[str, Any]) -> None:
        """Each choice as a completion of its own; the count of output tokens is that of all together."""
        self._usage = event["usage"] if isinstance(event.get("usage"), dict) else {}
        usage = {name: value for name, value in self._usage.items() if name != "completion_tokens"}
        for choice in event["choices"]:
            self._samples.append(CompletionParser(changed(self._op, samples=1), self._history, self._echo))
            self._samples[-1]._take({"choices": [choice], "usage": usage})

    def _check_sum(self, replies: list[Reply]) -> None:
        told, shown = self._usage.get("completion_tokens"), sum(len(reply.output_ids) for reply in replies)
        if told != shown:
            replies[0].faults.append(f"completion_tokens is {told}, the token_ids of all choices {shown}")
        for reply in replies:
            reply.completion_tokens = len(reply.output_ids)

    def _take_metrics(self, metrics: dict[str, Any]) -> None:
        spec = metrics.get("speculative_decoding")
        steps = spec.get("num_spec_steps") if isinstance(spec, dict) else None
        if type(steps) is int:
            self._reply.spec_verify_steps = steps

    # --- the reply -------------------------------------------------------------------------------
    def _take_counts(self, reply: Reply) -> None:
        reply.prompt_tokens = self._count(self._usage, "prompt_tokens")
        reply.completion_tokens = self._count(self._usage, "completion_tokens")
        details = self._usage.get("prompt_tokens_details")
        if isinstance(details, dict) and not self._echo:
            reply.cached_tokens = self._count(details, "cached_tokens")
        if reply.completion_tokens is not None and reply.completion_tokens != len(self._ids):
            self._fault(
                "completion", f"completion_tokens is {reply.completion_tokens}, token_ids {len(self._ids)}"
            )
        if reply.finish in FINISHED and not self._ids:
            self._fault("empty", f"finished ({reply.finish}) without a token, {self._op.max_new_tokens} asked")

    def _count(self, source: dict[str, Any], name: str) -> int | None:
        value = source.get(name)
        if value is None:
            return None
        if type(value) is not int or value < 0:
            self._fault(name, f"expected {name} as a whole number, found {str(value)[:40]}")
            return None
        return value

    def _take_logprobs(self, reply: Reply) -> None:
        op = self._op
        if op.kind != "score" and op.logprobs == "none":
            return
        if reply.finish == "abort" and not self._ids:
            return  # stopped before it computed anything
        prompt = len(self._logprobs) - len(self._ids)
        expected = self._sent if self._echo else 0
        if prompt != expected:
            self._fault(
                "length",
                f"expected {expected + len(self._ids)} log-probs ({expected} of the prompt, {len(self._ids)} "
                f"of the output), found {len(self._logprobs)}",
            )
            return
        reply.output_logprobs = self._values("output", self._logprobs[prompt:])
        if not self._echo:
            return
        reply.input_logprobs = self._values("input", self._logprobs[:prompt], first_is_none=True)
        reply.input_ids = self._prompt
        sent = list(op.input_ids)
        if self._prompt is not None and self._prompt[-len(sent) :] != sent:
            self._fault("echo", "prompt_token_ids names other tokens than were sent")
        if op.kind == "score":
            best = [max(top.values()) if isinstance(top, dict) and top else None for top in self._tops[:prompt]]
            reply.top_logprobs = self._values("top", best, first_is_none=True)

    def _values(self, what: str, found: list[Any], first_is_none: bool = False) -> list[float | None]:
        """Log-probs as numbers. None is legal at the first position of a prompt only: nothing stands before."""
        values: list[float | None] = []
        for place, value in enumerate(found):
            good = type(value) in (int, float) and math.isfinite(value)
            values.append(float(value) if good else None)
            if not good:
                if value is not None or place > 0 or not first_is_none:
                    self._fault(f"{what} none", f"the {what} log-prob at position {place} is missing or NaN")
            elif value > POSITIVE_SLACK:
                self._fault(f"{what} sign", f"the {what} log-prob at position {place} is positive: {value}")
            elif value <= LEAST_LOGPROB:
                self._fault(f"{what} infinite", f"the {what} log-prob at position {place} is minus infinity")
        return values

    def _fault(self, sort: str, text: str) -> None:
        self._faults.setdefault(sort, []).append(text)


def _all_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(data)  # slower, but takes the NaN that some servers write
    except (ValueError, RecursionError):
        return None
