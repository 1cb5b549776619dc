"""Several answers to one prompt (``n`` > 1): the first stands for the request, and the others must fit it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import FINISHED, Reply

# Nats. No rounding of equal computations moves one log-prob by more.
NOISE = 0.5


def joined(op: Operation, replies: Sequence[Reply]) -> Reply:
    """The first of the answers, which holds the others and says what is wrong with them. ``replies`` is not
    empty.

    Greedy answers may part where two tokens are about equally likely, and go their own ways from there; so
    later tokens are not compared, and neither are lengths of answers that a token may end.
    """
    first, *others = replies
    first.samples = others
    ended = [reply for reply in replies if reply.finish in FINISHED]
    if len(replies) != op.samples:
        first.faults.append(f"expected {op.samples} answers, found {len(replies)}")
    for number, other in enumerate(others, start=2):
        first.faults += [f"answer {number}: {fault}" for fault in other.faults]
        if other.finish not in (first.finish, *(FINISHED if op.stop_ids else ())):
            first.faults.append(f"answer {number} ended as {other.finish}, the first as {first.finish}")
        if other.prompt_tokens != first.prompt_tokens:
            first.faults.append(
                f"answer {number} has {other.prompt_tokens} prompt_tokens, the first {first.prompt_tokens}"
            )
    lengths = [len(reply.output_ids) for reply in ended]
    if len(set(lengths)) > 1 and not op.stop_ids:
        first.faults.append(f"expected answers of one length, found {', '.join(map(str, lengths))} tokens")
    if any(_parted(reply, ended[0]) for reply in ended):
        tokens = [reply.output_ids[0] for reply in ended]
        first.faults.append(f"the answers begin with other tokens than one another: {tokens}, greedily chosen")
    return first


def _parted(one: Reply, other: Reply) -> bool:
    """Whether two greedy answers begin differently, and not because two tokens were about equally likely.

    Two equally likely tokens have about the same log-prob, which is that of one half at most.
    """
    mine, theirs = ((reply.output_logprobs or [None])[0] for reply in (one, other))
    if not one.output_ids or not other.output_ids or mine is None or theirs is None:
        return False
    differs = one.output_ids[0] != other.output_ids[0]
    return differs and (abs(mine - theirs) > NOISE or max(mine, theirs) > math.log(0.5) + NOISE)
