"""Fuzz: random plans over all operations, biased to where an engine's state changes.

The grammar draws from the plan's own seeded ``random.Random``, not from hypothesis: a seed in a report must
give the same plan on every machine and with every release of every library, which hypothesis does not promise;
and what the core needs to run must stay small. Our tests do use it, to show that any seed gives a legal plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import OVERLAP, LogprobMode, Plan
from pytest_kvcheck.workloads.base import (
    Numbers,
    Workload,
    WorkloadContext,
    longest,
    room,
    server_sessions,
    share,
)
from pytest_kvcheck.workloads.plan import PlanBuilder

# The least that a request is worth: a few tokens in and out.
LEAST = 24
MOST_OUTPUT = 48
TIMEOUT = 1.0
# How often each is drawn, among those that are possible at the time.
WEIGHTS = {
    "turn": 14,
    "turn aborted": 7,
    "turn left": 2,
    "turn closed": 2,
    "turn refused": 1,
    "turn overlapped": 1,
    "plain": 3,
    "plain aborted": 3,
    "plain left": 1,
    "prefix": 3,
    "long": 2,
    "long aborted": 2,
    "close": 2,
    "close again": 1,
    "fence": 5,
    "pause": 1,
}
MODES: tuple[LogprobMode, ...] = ("output", "output", "none", "input")


@dataclass(slots=True)
class _Session:
    """``held`` is the most that it may hold, ``sure`` the least. ``busy``: nothing more before a fence."""

    name: str
    held: int = 0
    sure: int = 0
    busy: bool = False


class _Fuzz:
    """One plan in the making."""

    def __init__(self, context: WorkloadContext, plan: PlanBuilder) -> None:
        self.context, self.plan = context, plan
        features = context.cell.features
        self.most = _sessions(context.cell, context.number("sessions"))
        self.plains = max(1, min(4, features.max_running - self.most))
        self.share = share(context.cell, self.most + self.plains)
        self.page, self.chunk = features.page_size, features.chunked_prefill
        self.interval = features.retract.interval if features.retract else None
        self.sessions: list[_Session] = []
        self.closed: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self.opened = self.plain = 0
        self.stop_ids = plan.stop_ids()
        # Speculating vLLM on a CPU gives wrong tokens beside sampled requests (docs/findings/vllm-55005.md),
        # and several samples in no other way: fuzz would find that and nothing else.
        self.groups = context.cell.engine != "vllm" or features.speculative is None
        # SGLang takes a second turn beside one that runs (docs/findings/sglang-overlapping-turn.md): likewise.
        self.overlaps = context.cell.engine != "sglang"
        # And a retracted first turn of one token ends it (docs/findings/sglang-one-token-retracted.md).
        self.first = 2 if context.cell.engine == "sglang" and features.retract else 1
        self.refuses = False

    # --- drawing ---------------------------------------------------------------------------------
    def pick(self, choices: Iterable[int]) -> int:
        some = sorted(set(choices))
        return some[self.plan.between(0, len(some) - 1)]

    def chance(self, percent: int) -> bool:
        return self.plan.between(1, 100) <= percent

    def prompt(self, held: int, output: int) -> int:
        """New tokens for a request that holds ``held``: often so that prompt or whole end at an edge."""
        most = self.share - held - output
        edge = self.page * (1 + (held + 8) // self.page)
        sizes = [self.plan.between(1, 3), self.plan.between(8, 40), edge - held - output]
        sizes += [edge - held + step for step in (-1, 0, 1)]
        if self.chunk is not None and self.chunk < most:
            sizes.append(self.chunk + self.plan.between(-1, 1))
        return self.pick(max(1, min(size, most)) for size in sizes)

    def output(self, held: int) -> int:
        """Output tokens: few, or about a retraction, or about the end of a page."""
        most = min(MOST_OUTPUT, self.share - held - 1)
        sizes = [1, 2, self.plan.between(3, 8), self.plan.between(9, MOST_OUTPUT), self.page - held % self.page]
        if self.interval is not None:
            sizes.append(self.interval * self.plan.between(1, 4) + self.plan.between(-1, 1))
        return self.pick(max(1, min(size, most)) for size in sizes)

    def when(self, prompt: int, output: int) -> int:
        """After how many tokens to stop a request: within two of where its state changes."""
        edges = [0, 1, output, self.page - prompt % self.page]
        if self.interval is not None:
            edges += [self.interval * times for times in (1, 2, 3)]
        return min(output, max(0, self.pick(edges) + self.plan.between(-2, 2)))

    def stops(self) -> tuple[int, ...]:
        """Stop ids for some requests: they end after a few tokens, wherever that is."""
        return self.stop_ids if self.chance(15) else ()

    # --- the plan --------------------------------------------------------------------------------
    def round(self, operations: int) -> None:
        done = 0
        while done < operations:
            if len(self.sessions) < self.most and (not self.sessions or self.chance(20)):
                self.open()
            possible = [kind for kind in WEIGHTS if self.possible(kind)]
            drawn = self.plan.between(1, sum(WEIGHTS[kind] for kind in possible))
            for kind in possible:
                drawn -= WEIGHTS[kind]
                if drawn <= 0:
                    break
            self.do(kind)
            done += kind != "fence"
        self.fence()
        for session in list(self.sessions):
            # Some live on, so that what a round did to them shows in the next one.
            if self.chance(40) or session.held + 2 * LEAST > self.share:
                self.close(session)
        self.fence()

    def possible(self, kind: str) -> bool:
        if kind.startswith("turn"):
            fits = [session for session in self.free() if kind != "turn refused" or session.sure >= 8]
            if kind == "turn overlapped":
                return bool(fits) and self.server_keeps and self.overlaps
            return bool(fits) and (kind != "turn closed" or self.server_keeps)
        if kind.startswith(("plain", "prefix", "long")):
            long_enough = not kind.startswith("long") or self.long_size() > LEAST
            return self.plain < self.plains and long_enough and (kind != "prefix" or bool(self.prompts))
        if kind == "close":
            return bool(self.free())
        return kind != "close again" or (bool(self.closed) and self.server_keeps)

    @property
    def server_keeps(self) -> bool:
        return server_sessions(self.context.cell) is None

    def free(self) -> list[_Session]:
        return [one for one in self.sessions if not one.busy and one.held + LEAST <= self.share]

    def long_size(self) -> int:
        """A prompt of two chunks and a little, or as much as there is room for."""
        chunk = self.chunk or 4 * LEAST
        return min(2 * chunk + 9, self.share - MOST_OUTPUT, longest(self.context.cell) - MOST_OUTPUT)

    def do(self, kind: str) -> None:
        match kind:
            case "fence":
                self.fence()
            case "pause":
                self.plan.wait(self.plan.between(1, 4) / 20)
            case "close":
                self.close(self.pick_session())
            case "close again":
                self.plan.close(self.closed[self.plan.between(0, len(self.closed) - 1)])
            case "turn refused":
                self.refused(self.pick_session(sure=8))
            case "turn overlapped":
                self.overlapped(self.pick_session())
            case _ if kind.startswith("turn"):
                self.turn(self.pick_session(), kind.removeprefix("turn").strip())
            case _:
                how, _, end = kind.partition(" ")
                self.request(how, end)

    def pick_session(self, sure: int = 0) -> _Session:
        some = [session for session in self.free() if session.sure >= sure]
        return some[self.plan.between(0, len(some) - 1)]

    def open(self) -> None:
        name = f"s{self.opened}"
        self.opened += 1
        self.plan.open(name)
        self.sessions.append(_Session(name))

    def fence(self) -> None:
        self.plan.fence()
        self.plain = 0
        for session in self.sessions:
            session.busy = False

    def close(self, session: _Session) -> None:
        self.plan.close(session.name)
        self.sessions.remove(session)
        self.closed.append(session.name)

    def refused(self, session: _Session) -> None:
        """A turn that the engine must refuse: for its length with the history, or for a parameter."""
        limit = self.context.cell.features.context_length
        if self.context.sessions == "streaming" and self.chance(50):
            self.plan.turn(
                session.name, LEAST, 8, expect="reject", invalid="offset", label="turn with an offset"
            )
        else:
            self.plan.turn(session.name, limit - 4, 8, expect="reject", label="over-length turn")
        session.busy = True
        self.refuses = True

    def overlapped(self, session: _Session) -> None:
        """A turn, and two more that are sent while it runs, which the engine must refuse."""
        new = 4
        output = min(MOST_OUTPUT, self.share - session.held - new)
        label = f"{session.name} turn overlapped"
        running = self.plan.turn(session.name, new, output, label=label)
        session.held += new + output
        session.sure += new + output
        for at in (1, output // 2):
            # Late, it meets the turn ended, and is a turn like any other.
            self.plan.turn(
                session.name,
                1,
                1,
                expect="reject",
                invalid=OVERLAP,
                label=f"{session.name} overlapping",
                target=running,
                when_tokens=at,
            )
            session.held += 2
        session.busy = True

    def turn(self, session: _Session, end: str) -> None:
        output = self.output(session.held)
        new = self.prompt(session.held, output)
        if session.held == 0:
            new = max(new, self.first)
        if session.held == 0 and not end:
            new = max(new, min(self.context.opening(new), self.share - output))
        mode = MODES[self.plan.between(0, len(MODES) - 1)]
        label = f"{session.name} turn" + (f" {end}" if end else "")
        stops = self.stops()
        if not end:
            self.plan.turn(session.name, new, output, logprobs=mode, stop_ids=stops, label=label)
            session.sure += new + (1 if stops else output)
        else:
            target = self.plan.turn(session.name, new, output, expect="either", stop_ids=stops, label=label)
            self.stop(target, end, self.when(session.held + new, output), session)
        session.held += new + output

    def request(self, how: str, end: str) -> None:
        output = self.output(0)
        match how:
            case "prefix":
                base = self.prompts[self.plan.between(0, len(self.prompts) - 1)]
                cut = min(
                    len(base), self.pick((len(base), self.page, self.page + 1, len(base) - 1, len(base) // 2))
                )
                ids = (base[: max(1, cut)] + self.plan.ids(self.plan.between(0, 4)))[: self.share - output]
            case "long":
                ids = self.plan.ids(self.long_size() - self.plan.between(0, 2))
            case _:
                ids = self.plan.ids(self.prompt(0, output))
        self.prompts = [*self.prompts[-7:], ids]
        fits = self.groups and not end and self.plain + 2 <= self.plains
        samples = 2 if fits and self.chance(15) else 1
        self.plain += samples
        label = f"{how} request" + (f" {end}" if end else "")
        stops = self.stops()
        if not end:
            self.plan.generate(
                ids,
                output,
                logprobs="output",
                stream=samples == 1,
                samples=samples,
                stop_ids=stops,
                label=label,
            )
            return
        stream = end == "aborted" or self.chance(60)
        target = self.plan.generate(ids, output, expect="either", stream=stream, stop_ids=stops, label=label)
        # A prompt of several chunks is worth stopping before it shows anything.
        when = 0 if not stream or how == "long" else self.when(len(ids), output)
        self.stop(target, end, when, None)

    def stop(self, target: int, end: str, when: int, session: _Session | None) -> None:
        if end == "closed" and session is not None:
            self.plan.close(session.name, target=target, when_tokens=when)
            self.sessions.remove(session)
            self.closed.append(session.name)
        elif end == "left":
            self.plan.disconnect(target, when_tokens=when)
            if session is not None:
                # An engine notices a client that left when it likes; until then the turn may be running.
                session.held = self.share
        else:
            self.plan.abort(target, when_tokens=when)
        if session is not None:
            session.busy = True

    def timed_out(self) -> None:
        """A session that the server itself must close."""
        self.plan.open("timed", timeout=TIMEOUT)
        self.plan.turn("timed", LEAST, 4, label="timed turn")
        self.fence()
        self.plan.wait(TIMEOUT + 2.5, label="longer than the timeout")
        self.fence()


def _fuzz(context: WorkloadContext) -> Plan:
    plan = context.builder("fuzz")
    fuzz = _Fuzz(context, plan)
    for _ in range(context.rounds):
        fuzz.round(context.number("operations"))
    for session in list(fuzz.sessions):
        fuzz.close(session)
    fuzz.fence()
    if fuzz.server_keeps and fuzz.chance(50):
        fuzz.timed_out()
    return context.plan(plan, *(["reject"] if fuzz.refuses else []))


def _sessions(cell: Cell, wanted: int) -> int:
    """As many as leave rows for plain requests."""
    return max(1, min(wanted, (cell.features.max_running - 1) // 2))


def _applies(cell: Cell, params: Numbers) -> str | None:
    count = _sessions(cell, int(params["sessions"]))
    return room(cell, count + max(1, min(4, cell.features.max_running - count)), 6 * LEAST)


FUZZ = (
    Workload(
        "fuzz",
        "Random operations, legal ones, biased to where an engine's state changes.",
        _fuzz,
        {"rounds": 6, "sessions": 4, "operations": 14},
        _applies,
        grows=True,
    ),
)
