"""How sessions and requests end when nobody waits for them: closes, timeouts, clients that leave."""

from __future__ import annotations

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.workloads.base import Numbers, Workload, WorkloadContext, room, server_sessions, share

APPEND = 24


def _close_in_flight(context: WorkloadContext) -> Plan:
    """Sessions are closed while a turn of theirs runs: the second turn, or their very first. Others are closed
    behind an abort, and nobody asks them again: with the abort still on its way, or answered.

    Each aborted turn is alone beside a request that has decoded for longer: where a cell retracts, it is this
    turn that waits, half of the time.
    """
    plan = context.builder("close-in-flight")
    count, new = context.number("sessions"), context.number("max_new_tokens")
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
        for name in names[1:]:
            plan.turn(name, APPEND, 8, label=f"{name} turn 1")
        plan.fence()
        for at, name in enumerate(names):
            turn = plan.turn(name, APPEND, new, expect="either", label=f"{name} closed turn")
            plan.close(name, target=turn, when_tokens=(round_ + at) % 4)
        plan.fence()
        names = [f"r{round_}-a{at}" for at in range(count)]
        for name in names:
            plan.open(name)
        for name in names[1:]:
            plan.turn(name, APPEND, 8, label=f"{name} turn 1")
        plan.fence()
        plan.hold([plan.running(plan.generate(APPEND, count * new, label="beside the aborts"))])
        for at, name in enumerate(names):
            turn = plan.turn(name, APPEND, new, expect="either", label=f"{name} aborted turn")
            when = 2 + (round_ + at) % 4
            plan.abort(turn, when_tokens=when)
            if (round_ + at) % 2:
                plan.close(name)
            else:
                plan.close(name, target=turn, when_tokens=when)
            plan.hold([turn])
        plan.fence()
        plan.generate(APPEND, 8, label="after the closes")
        plan.fence()
    return context.plan(plan, "close_in_flight")


def _double_close(context: WorkloadContext) -> Plan:
    """Sessions are closed twice, at rest and in flight, and one is closed that was never opened."""
    plan = context.builder("double-close")
    new = context.number("max_new_tokens")
    for round_ in range(context.rounds):
        rest, busy = f"r{round_}-rest", f"r{round_}-busy"
        for name in (rest, busy):
            plan.open(name)
            plan.turn(name, APPEND, 8, label=f"{name} turn 1")
        plan.close(rest)
        plan.close(rest)
        plan.close(f"r{round_}-never-opened")
        plan.fence()
        turn = plan.turn(busy, APPEND, new, expect="either", label=f"{busy} closed turn")
        plan.close(busy, target=turn, when_tokens=1)
        plan.close(busy, target=turn, when_tokens=2)
        plan.fence()
        plan.generate(APPEND, 8, label="after the closes")
        plan.fence()
    return context.plan(plan, "close_in_flight")


def _session_timeout(context: WorkloadContext) -> Plan:
    """Sessions with a short timeout are left alone; nobody closes them. One is asked again too late."""
    plan = context.builder("session-timeout")
    timeout = float(context.params["timeout"])
    names = [f"s{at}" for at in range(context.number("sessions"))]
    for name in names:
        plan.open(name, timeout=timeout)
    for name in names[:-1]:
        plan.turn(name, APPEND, 8, label=f"{name} turn 1")
    # A turn that outlasts the timeout, where the engine is slow enough: reaping must wait for it.
    plan.turn(
        names[-1], APPEND, context.number("max_new_tokens"), expect="either", label=f"{names[-1]} long turn"
    )
    plan.fence()
    plan.wait(timeout + 3.0, label="the timeout and three seconds")
    plan.fence()
    plan.generate(APPEND, 8, label="after the timeout")
    plan.turn(names[0], APPEND, 8, expect="either", label=f"{names[0]} too late")
    plan.fence()
    return context.plan(plan, "session_timeout")


def _disconnect(context: WorkloadContext) -> Plan:
    """Clients leave in the middle of long turns and requests, streamed and not; their sessions go on."""
    plan = context.builder("disconnect-mid-turn")
    count = context.number("sessions")
    # Long, so that an engine which notices seconds later still stops in the middle.
    new = min(context.number("max_new_tokens"), share(context.cell, count + 2) - 4 * (APPEND + 8))
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
            plan.turn(name, APPEND, 8, label=f"{name} turn 1")
        plan.fence()
        for at, name in enumerate(names):
            turn = plan.turn(name, APPEND, new, expect="either", label=f"{name} left turn")
            plan.disconnect(turn, when_tokens=2 * at)
        for stream in (True, False):
            plain = plan.generate(APPEND, new, stream=stream, expect="either", label="left plain request")
            plan.disconnect(plain, when_tokens=3 if stream else 0)
        plan.fence()
        plan.wait(float(context.params["settle_seconds"]), label="until the server has noticed")
        plan.fence()
        for turn in range(2):
            for name in names:
                label = f"{name} turn {turn + 1} after leaving"
                plan.turn(name, APPEND, 8, logprobs="output", label=label)
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    return context.plan(plan, "disconnect", "cached_turn")


def _retry_after_leaving(context: WorkloadContext) -> Plan:
    """Clients leave in the middle of a turn and ask for the next one at once, again and again, while the server
    may not have noticed. Each such turn is refused, or goes on from the last finished one.
    """
    plan = context.builder("retry-after-leaving")
    count, retries = context.number("sessions"), context.number("retries")
    new = min(context.number("max_new_tokens"), share(context.cell, count) - (4 + retries) * (APPEND + 8))
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
            plan.turn(name, APPEND, 8, label=f"{name} turn 1")
        plan.fence()
        for at, name in enumerate(names):
            # What is not streamed is missed later: a server looks for its client every few seconds only.
            stream = at % 2 == 0
            turn = plan.turn(name, APPEND, new, stream=stream, expect="either", label=f"{name} left turn")
            plan.disconnect(turn, when_tokens=1 if stream else 0)
            for retry in range(retries):
                plan.turn(name, APPEND, 8, expect="either", label=f"{name} retry {retry + 1}")
        plan.fence()
        plan.wait(float(context.params["settle_seconds"]), label="until the server has noticed")
        plan.fence()
        for turn in range(2):
            for name in names:
                label = f"{name} turn {turn + 1} after the retries"
                plan.turn(name, APPEND, 8, logprobs="output", label=label)
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    return context.plan(plan, "disconnect", "cached_turn")


def _closable(cell: Cell, params: Numbers) -> str | None:
    sessions = int(params.get("sessions", 2))
    needed = 2 * APPEND + 8 + int(params["max_new_tokens"])
    return server_sessions(cell) or room(cell, sessions, needed)


def _abortable(cell: Cell, params: Numbers) -> str | None:
    """As :func:`_closable`, with the request beside that decodes as much as all the sessions do."""
    sessions = int(params["sessions"])
    decoded = APPEND + sessions * int(params["max_new_tokens"])
    return _closable(cell, params) or room(cell, sessions + 1, decoded)


LIFECYCLE = (
    Workload(
        "close-in-flight",
        "Sessions are closed while a turn of theirs runs, and behind a turn that is aborted.",
        _close_in_flight,
        {"sessions": 3, "rounds": 3, "max_new_tokens": 64},
        _abortable,
    ),
    Workload(
        "double-close",
        "Sessions are closed twice, at rest and in flight, and one that was never opened.",
        _double_close,
        {"rounds": 2, "max_new_tokens": 64},
        _closable,
    ),
    Workload(
        "session-timeout",
        "Sessions with a short timeout are left to the server to reap.",
        _session_timeout,
        {"sessions": 3, "timeout": 1.0, "max_new_tokens": 256},
        _closable,
    ),
    Workload(
        "disconnect-mid-turn",
        "Clients leave in the middle of turns and requests, streamed and not; their sessions go on.",
        _disconnect,
        {"sessions": 3, "rounds": 1, "max_new_tokens": 1500, "settle_seconds": 5.0},
        lambda cell, params: room(cell, int(params["sessions"]) + 2, 4 * (APPEND + 8) + 128),
    ),
    Workload(
        "retry-after-leaving",
        "Clients leave in the middle of a turn and ask for the next one at once, again and again.",
        _retry_after_leaving,
        {"sessions": 4, "rounds": 2, "retries": 4, "max_new_tokens": 600, "settle_seconds": 5.0},
        lambda cell, params: (
            server_sessions(cell)
            or room(cell, int(params["sessions"]), (4 + int(params["retries"])) * (APPEND + 8) + 128)
        ),
    ),
)
