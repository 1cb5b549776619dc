"""The operations of a plan: pure data, seeded, serialisable. What a client *will* do.

An operation starts when every operation named in ``after`` has ended; nothing else orders a plan. So all
turns of a round are in flight at once unless ``after`` says otherwise.
"""

from __future__ import annotations

from typing import Literal

import msgspec

OpKind = Literal[
    "open",  # open a streaming session
    "turn",  # one turn of a session: input_ids are the *new* tokens
    "generate",  # a plain request: input_ids are the whole prompt
    "score",  # teacher-forced scoring of input_ids, one new token at most
    "abort",  # ask the server to abort `target` (None: everything) once it has shown when_tokens
    "disconnect",  # close the client's socket of `target` once it has shown when_tokens
    "close",  # close a session
    "wait",  # let `seconds` pass
    "barrier",  # nothing but an ordering point
    "flush",  # flush the server's prefix cache
]
LogprobMode = Literal["none", "output", "input"]
# What the operation should lead to. "either": a race is allowed, both finish and abort are right.
Expect = Literal["finish", "abort", "reject", "either"]
# `invalid` of a turn that is sent while another turn of its session runs: the server must refuse it.
OVERLAP = "overlap"


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation. Fields that a kind does not use keep their defaults.

    ``label`` is what reports call it (``round 2 turn 3``). ``deadline`` is in seconds from its start.
    ``invalid`` names a defect to send on purpose (``"offset"``: a session parameter that streaming sessions
    must refuse; ``"overlap"``: a turn sent while its session's ``target`` runs; ``"over-length"`` needs no
    field, its input is simply too long). ``stop_ids``: tokens that end the request where they are sampled.
    ``samples``: so many answers to one prompt, of a plain request that is not streamed.
    """

    id: int
    kind: OpKind
    after: tuple[int, ...] = ()
    session: str | None = None
    input_ids: tuple[int, ...] = ()
    max_new_tokens: int = 0
    logprobs: LogprobMode = "none"
    stream: bool = True
    target: int | None = None
    when_tokens: int = 0
    expect: Expect = "finish"
    invalid: str | None = None
    stop_ids: tuple[int, ...] = ()
    samples: int = 1
    seconds: float = 0.0
    timeout: float | None = None
    deadline: float = 120.0
    label: str = ""

    @property
    def generates(self) -> bool:
        """Whether the operation is a request that produces tokens."""
        return self.kind in ("turn", "generate", "score")


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one workload will do. Equal seeds and parameters give equal plans on every machine."""

    workload: str
    seed: int
    operations: tuple[Operation, ...]
    params: dict[str, int | float | str | bool] = {}
    # What must be seen for the plan to have proved anything, e.g. "abort_mid_decode" (oracles/exercise.py).
    must_exercise: tuple[str, ...] = ()
