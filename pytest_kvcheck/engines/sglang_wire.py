"""SGLang's HTTP protocol: requests as calls, answers as replies. Token ids only, never text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace as changed

from pytest_kvcheck.engines.base import Call
from pytest_kvcheck.engines.samples import joined
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import FINISHED, Finish, Reply

# A server that was attached to may still count capacity in characters; ours must never be what limits.
CAPACITY = 1 << 24
# Session parameters that a streaming session must refuse, with a value that would mean something elsewhere.
REFUSED_PARAMS: dict[str, Any] = {"offset": 1, "replace": True, "drop_previous_output": True}
# Releases before the status code of an abort say only by its message that a request was refused, not stopped.
REFUSAL = re.compile(
    r"exceed|longer than|too long|not support|does not exist|invalid|must contain|already has an active", re.I
)
# log_softmax may round a certainty to a hair above zero.
POSITIVE_SLACK = 1e-5


def open_call(session_id: str, timeout: float | None) -> Call:
    body: dict[str, Any] = {"capacity_of_str_len": CAPACITY, "session_id": session_id, "streaming": True}
    if timeout is not None:
        body["timeout"] = timeout
    return Call("POST", "/open_session", body)


def request_call(op: Operation, rid: str, session_id: str | None, history: Sequence[int]) -> Call:
    """A turn sends its new tokens to its session; without a server-side session, the whole history again."""
    ids = list(op.input_ids)
    if op.kind == "turn" and session_id is None:
        ids = [*history, *ids]
    # SGLang passes over stop ids where it is to ignore the end-of-sequence token.
    params: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": op.max_new_tokens,
        "ignore_eos": not op.stop_ids,
    }
    if op.stop_ids:
        params["stop_token_ids"] = list(op.stop_ids)
    if op.samples > 1:
        params["n"] = op.samples
    body: dict[str, Any] = {"input_ids": ids, "rid": rid, "stream": op.stream, "sampling_params": params}
    if wants_logprobs(op):
        body["return_logprob"] = True
        if wants_input_logprobs(op):
            body["logprob_start_len"] = 0
        if op.kind == "score":
            body["top_logprobs_num"] = 1
    if session_id is not None:
        body["session_params"] = {"id": session_id}
        if op.invalid in REFUSED_PARAMS:
            body["session_params"][op.invalid] = REFUSED_PARAMS[op.invalid]
    return Call("POST", "/generate", body)


def wants_logprobs(op: Operation) -> bool:
    return op.kind == "score" or op.logprobs != "none"


def wants_input_logprobs(op: Operation) -> bool:
    return op.kind == "score" or op.logprobs == "input"


class SglangParser:
    """One request's answer. ``server_sessions``: a turn's prompt is longer than what was sent for it.
    ``incremental``: events carry only what is new (a server option), not all so far.

    Never raises: what cannot be understood becomes a fault of the reply, one sentence each, the first of its
    sort with the number of its like.
    """

    def __init__(self, op: Operation, server_sessions: bool = True, incremental: bool = False) -> None:
        self._op = op
        self._sessions = server_sessions
        self._samples: list[SglangParser] = []
        self._whole_prompt = op.kind != "turn" or not server_sessions
        self._incremental = incremental
        self._reply = Reply()
        self._meta: dict[str, Any] = {}
        self._ids: list[int] = []
        self._output: list[Any] = []
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
            return
        if data == b"[DONE]":
            self._done = True
            return
        self._reply.events += 1
        event = _decode(data)
        if self._op.samples > 1 and isinstance(event, list):
            self._take_samples(event)
        elif not isinstance(event, dict):
            self._fault("json", f"expected a JSON object, found {data[:120]!r}")
        elif "error" in event or "detail" in event:
            self._take_error(event)
        elif self._op.samples > 1:
            self._take_samples([event])
        else:
            self._take_tokens(event)

    def finish(self, http_status: int | None, error: str = "", complete: bool = True) -> Reply:
        if self._samples:
            return joined(self._op, [sample.finish(http_status, error, complete) for sample in self._samples])
        reply = self._reply
        reply.http_status = http_status
        reason = self._meta.get("finish_reason")
        answered = http_status is not None and 200 <= http_status < 300
        if self._refused:
            reply.finish, reply.message = self._refused
            if http_status is not None and http_status >= 500:
                reply.finish = "error"
        elif isinstance(reason, dict):
            reply.finish, reply.message = _finish_of(reason)
        else:
            reply.finish = "error"
            reply.message = error or f"HTTP {http_status}: no finish reason"
            if http_status is not None and 400 <= http_status < 500:
                reply.finish = "rejected"
            elif answered and not error and not complete:
                self._fault("cut", f"the answer ended after {self.shown} tokens without a finish reason")
        if self._op.stream and answered and not error and not self._done and not complete:
            self._fault("end", f"the stream ended after {self.shown} tokens without its end mark [DONE]")
        if answered and complete and not self._refused and reason is None and not error:
            self._fault("finish", "expected a finish reason at the end of the answer, found none")

        if reply.finish == "rejected":
            # The engine runs a refused request as a one-token stub: what it shows is no part of the history.
            self._ids, self._output = [], []
        reply.output_ids = self._ids
        self._take_counts(reply)
        if reply.finish in ("length", "stop", "abort"):
            self._take_logprobs(reply)
        reply.faults += [f"{texts[0]}{_times(len(texts))}" for texts in self._faults.values()]
        return reply

    # --- events ----------------------------------------------------------------------------------
    def _take_samples(self, answers: list[Any]) -> None:
        for answer in answers:
            self._samples.append(SglangParser(changed(self._op, samples=1), self._sessions))
            self._samples[-1].feed(msgspec.json.encode(answer))

    def _take_error(self, event: dict[str, Any]) -> None:
        error = event.get("error", event.get("detail"))
        message, code = error, event.get("code")
        if isinstance(error, dict):
            message, code = error.get("message"), error.get("code", code)
        text = message if isinstance(message, str) else json.dumps(message, default=str)
        self._refused = ("error" if isinstance(code, int) and code >= 500 else "rejected", text[:2000])

    def _take_tokens(self, event: dict[str, Any]) -> None:
        meta = event.get("meta_info")
        if isinstance(meta, dict):
            if self._incremental:
                for name in ("input_token_logprobs", "input_top_logprobs"):
                    meta[name] = meta.get(name) or self._meta.get(name)
            self._meta = meta
        else:
            self._fault("meta", "expected meta_info in every event, found none")
            meta = {}
        ids = event.get("output_ids")
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            self._fault("ids", f"expected output_ids as a list of integers, found {str(ids)[:80]}")
            return
        output = meta.get("output_token_logprobs")
        output = output if isinstance(output, list) else []
        # An abort that finds the request queued (retracted, say) repeats its last token only; the count tells.
        if self._ids and ids == self._ids[-1:] and meta.get("completion_tokens") == len(self._ids):
            return
        if self._incremental:
            if meta.get("completion_tokens") != len(self._ids):
                self._ids, self._output = self._ids + ids, self._output + output
            return
        if ids[: len(self._ids)] != self._ids:
            self._fault("rewrite", f"the stream changed tokens that it had shown (of {len(self._ids)} shown)")
        self._ids, self._output = ids, output

    # --- the reply -------------------------------------------------------------------------------
    def _take_counts(self, reply: Reply) -> None:
        retractions = "num_retractions" if "num_retractions" in self._meta else "total_retractions"
        reply.prompt_tokens = self._count("prompt_tokens")
        reply.completion_tokens = self._count("completion_tokens")
        reply.cached_tokens = self._count("cached_tokens")
        reply.retractions = self._count(retractions)
        reply.spec_verify_steps = self._count("spec_verify_ct")
        if reply.finish == "rejected":
            # Counts of the stub, not of the request.
            reply.prompt_tokens = reply.completion_tokens = reply.cached_tokens = None
        elif reply.completion_tokens is not None and reply.completion_tokens != len(self._ids):
            self._fault(
                "completion", f"completion_tokens is {reply.completion_tokens}, output_ids {len(self._ids)}"
            )
        if reply.finish in FINISHED and not self._ids and self._op.max_new_tokens:
            self._fault("empty", f"finished ({reply.finish}) without a token, {self._op.max_new_tokens} asked")

    def _count(self, name: str) -> int | None:
        value = self._meta.get(name)
        if value is None:
            return None
        if type(value) is not int or value < 0:
            self._fault(name, f"expected {name} as a whole number, found {str(value)[:40]}")
            return None
        return value

    def _take_logprobs(self, reply: Reply) -> None:
        if not wants_logprobs(self._op):
            return
        if reply.finish == "abort" and not self._ids and not self._output:
            return  # stopped before it computed anything
        if not self._op.max_new_tokens and not self._ids:
            self._output = []  # under speculation SGLang has an entry for a token that was not asked for
        values, ids = self._pairs("output_token_logprobs", self._output)
        if len(values) != len(self._ids):
            self._fault(
                "length", f"output_token_logprobs has {len(values)} entries, output_ids {len(self._ids)}"
            )
        elif ids != self._ids:
            self._fault("order", "output_token_logprobs names other tokens than output_ids")
        self._check("output", values, none_at=-1)
        reply.output_logprobs = values
        if wants_input_logprobs(self._op):
            self._take_input(reply)

    def _take_input(self, reply: Reply) -> None:
        values, ids = self._pairs("input_token_logprobs", self._meta.get("input_token_logprobs") or [])
        prompt = reply.prompt_tokens if reply.prompt_tokens is not None else len(values)
        wrong = len(values) != prompt if self._whole_prompt else len(values) > prompt
        if wrong and (reply.finish != "abort" or values):
            self._fault("input", f"input_token_logprobs has {len(values)} entries, prompt_tokens is {prompt}")
        reply.input_start = max(0, prompt - len(values))
        self._check("input", values, none_at=0)
        reply.input_logprobs, reply.input_ids = values, ids
        # SGLang echoes 0 for ids that it takes for placeholders of media, the vocabulary's last id among them.
        sent = self._op.input_ids[-len(ids) :] if ids else ()
        told = ids[len(ids) - len(sent) :]
        if any(own not in (0, theirs) for own, theirs in zip(told, sent, strict=True)):
            self._fault("echo", "input_token_logprobs names other tokens than were sent")
        if self._op.kind == "score":
            # One candidate a position: the list of a position holds one [log-prob, id, text].
            top = self._meta.get("input_top_logprobs") or []
            first = [one[0] if isinstance(one, list) and one else None for one in top]
            best, _ = self._pairs("input_top_logprobs", first)
            if len(best) != len(values):
                self._fault("top", f"input_top_logprobs has {len(best)} entries, the prompt {len(values)}")
            self._check("top", best, none_at=0)
            reply.top_logprobs = best

    def _pairs(self, name: str, entries: Any) -> tuple[list[float | None], list[int]]:
        """``[log-prob, id, text]`` entries as two lists; what is no entry becomes (None, -1) and a fault."""
        values: list[float | None] = []
        ids: list[int] = []
        for entry in entries if isinstance(entries, list) else []:
            value, token = entry[:2] if isinstance(entry, list) and len(entry) >= 2 else (None, -1)
            if entry is not None and (type(value) not in (int, float, type(None)) or type(token) is not int):
                self._fault(name, f"expected [log-prob, id, text] in {name}, found {str(entry)[:60]}")
                value, token = None, -1
            try:
                values.append(None if value is None else float(value))
            except OverflowError:
                values.append(-math.inf)
            ids.append(token)
        return values, ids

    def _check(self, what: str, values: list[float | None], none_at: int) -> None:
        """None is legal at one place at most: the first position has nothing before it."""
        for place, value in enumerate(values):
            if value is None:
                if place != none_at:
                    self._fault(f"{what} none", f"the {what} log-prob at position {place} is missing or NaN")
            elif not math.isfinite(value):
                self._fault(f"{what} nan", f"the {what} log-prob at position {place} is {value}")
                values[place] = None
            elif value > POSITIVE_SLACK:
                self._fault(f"{what} sign", f"the {what} log-prob at position {place} is positive: {value}")

    def _fault(self, sort: str, text: str) -> None:
        self._faults.setdefault(sort, []).append(text)


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(data)  # slower, but takes the NaN that some servers write
    except (ValueError, RecursionError):
        return None


def _finish_of(reason: dict[str, Any]) -> tuple[Finish, str]:
    kind, message, status = reason.get("type"), reason.get("message"), reason.get("status_code")
    text = message[:2000] if isinstance(message, str) else ""
    if kind == "length":
        return "length", text
    if kind == "stop":
        return "stop", text
    if kind != "abort":
        return "error", f"expected finish type length, stop or abort, found {str(kind)[:40]}"
    if type(status) is int:
        if 400 <= status < 500:
            return "rejected", text
        # 503: stopped for lack of room or time, which is an abort by the server.
        return ("abort" if status < 500 or status == 503 else "error"), text
    return ("rejected" if REFUSAL.search(text) else "abort"), text


def _times(count: int) -> str:
    return f" ({count} such)" if count > 1 else ""
