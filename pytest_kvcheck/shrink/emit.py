"""A minimised failure for whoever is to mend it: a program that shows it, and an issue ready to post."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from pytest_kvcheck import __version__
from pytest_kvcheck.cells import Cell
from pytest_kvcheck.engines.sglang_wire import REFUSED_PARAMS
from pytest_kvcheck.engines.vllm_wire import LIKELIEST
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.launch.models import cache_dir
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.shrink import passes
from pytest_kvcheck.shrink.minimise import Minimised
from pytest_kvcheck.trace import TraceHeader

REPRO, ISSUE = "repro.py", "issue.md"
PORT = "30000"
# The program's client is not ours: what needs an abort at the right moment may take it a few tries.
ROUNDS = 10
# Variables that only our own check of a launch needs.
_OURS = ("SGLANG_EXPOSE_OWN_ENV_VARS",)
_PACKAGE = Path(__file__).resolve().parent.parent
_ELSEWHERE = "./kvcheck/pytest_kvcheck"
EXPECTED = {
    "used": "with every session closed and no request left, the pool holds as much as before.",
    "rows": "as many requests run side by side afterwards as before.",
    "counts": "the counts of every answer are exact.",
    "logprobs": "log-probs do not depend on how a request was cached, chunked, retracted or aborted.",
    "progress": "every request ends, and the server takes more.",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """How the server was started: its command, its environment beyond ours, the engine and version."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    engine: str
    version: str

    @classmethod
    def of(cls, header: TraceHeader) -> Launch:
        return cls(tuple(header.argv), dict(header.env), header.engine, header.engine_version)

    def command(self) -> str:
        """As typed into a shell, one flag a line, on the port that the program expects."""
        if not self.argv:
            return "# the server was started by somebody else; use the same configuration"
        argv, made = ["python", *self.argv[1:]], []
        if "--port" in argv:
            argv[argv.index("--port") + 1] = PORT
        for at, word in enumerate(argv):
            path = Path(word)
            if path.parent == cache_dir():  # a synthetic model: nobody else has it, and anybody can make it
                name = path.name.rpartition("-")[0]
                argv[at] = f"./{name}"
                made.append(f"kvcheck models make . --only {name}")
        env = {name: value.replace(str(_PACKAGE), _ELSEWHERE) for name, value in self.env.items()}
        if env != self.env:  # what we put into an engine is ours to bring along
            made.append("pip install --no-deps --target kvcheck pytest-kvcheck")
        lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(env.items()) if name not in _OURS]
        lines.append("python")
        for word in argv[1:]:
            if word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return "\n".join([*dict.fromkeys(made), " \\\n  ".join(lines)])


def check_of(finding: Finding) -> str:
    """Which of the program's checks sees this finding."""
    if finding.oracle == "rows" or (finding.kind == "K11" and finding.status == "leak"):
        return "rows"
    if finding.status == "leak":
        return "used"
    if finding.oracle in ("session_arithmetic", "protocol"):
        return "counts"
    if finding.status == "mismatch":
        return "logprobs"
    return "progress"


def emit(
    folder: Path,
    made: Minimised,
    launch: Launch,
    *,
    tolerance: float = 0.2,
    cached: Callable[[int, int], tuple[int, int]] | None = None,
) -> Path:
    """Write ``repro.py`` and ``issue.md`` into ``folder``; returns the program's path.

    ``cached(history, sent)`` is the engine's legal range of cached tokens of a turn; ``tolerance`` in nats is
    what this launch's noise explains. Raises ``OSError`` where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / REPRO
    program.write_text(repro(made, launch, tolerance=tolerance, cached=cached), encoding="utf-8")
    (folder / ISSUE).write_text(issue(made, launch), encoding="utf-8")
    return program


def repro(
    made: Minimised,
    launch: Launch,
    *,
    tolerance: float = 0.2,
    cached: Callable[[int, int], tuple[int, int]] | None = None,
) -> str:
    """The program's text: the operations first, and only the helpers that they and the check need."""
    finding, check = made.finding, check_of(made.finding)
    vllm = launch.engine == "vllm"
    writer = _Writer(made.plan, vllm, cached if check == "counts" else None)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # a program, not a page
    )
    return environment.get_template("repro.py.j2").render(
        title=_wrapped(f"{finding.status.upper()} {finding.kind}: {finding.headline}"),
        about=_wrapped(_about(made, launch)),
        launch=textwrap.indent(launch.command().replace('"' * 3, "'" * 3), "    "),
        found="\n".join([_wrapped(f"Expected: {EXPECTED[check]}"), _wrapped(f"Found: {finding.headline}")]),
        lines=writer.lines(),
        uses_ids=writer.uses_ids,
        samples=any(op.samples > 1 for op in made.plan.operations),
        high=passes.highest_id(made.plan),
        check=check,
        pool=finding.pool,
        rows=made.cell.features.max_running,
        tolerance=f"{tolerance:.4g}",
        timed=not vllm and any(op.kind == "open" and op.timeout is not None for op in made.plan.operations),
        rounds=ROUNDS,
        vllm=vllm,
        likeliest=LIKELIEST,
    )


def _about(made: Minimised, launch: Launch) -> str:
    return (
        f"{launch.engine} {launch.version}, cell {made.cell.name}, seed {made.plan.seed}; found by kvcheck "
        f"{__version__} (oracle {made.finding.oracle}), minimised from {made.operations_before} operations to "
        f"{made.operations}; shown in {made.last}."
    )


def _wrapped(text: str) -> str:
    """Text in lines of a docstring, which it cannot end."""
    return textwrap.fill(text.replace("\\", "/").replace('"' * 3, "'" * 3), 100)


class _Writer:
    """The operations as lines of the program."""

    def __init__(self, plan: Plan, vllm: bool, cached: Callable[[int, int], tuple[int, int]] | None) -> None:
        self.plan, self.vllm, self.cached = plan, vllm, cached
        self.high = passes.highest_id(plan)
        self.uses_ids = False
        # Where a client leaves, its own request closes the socket; vLLM has no other way to abort.
        leaves = ("disconnect", "abort") if vllm else ("disconnect",)
        self.leaving = {op.target: op for op in plan.operations if op.kind in leaves and op.target is not None}
        self.names = {
            op.id: self._name(op.target if op in self.leaving.values() and op.target is not None else op.id)
            for op in plan.operations
        }

    @staticmethod
    def _name(number: int) -> str:
        return f"op{number}"

    def lines(self) -> list[str]:
        lines = []
        history: dict[str, tuple[int, int]] = {}
        used = {
            self.names[one] for op in self.plan.operations for one in (*op.after, op.target) if one is not None
        }
        for op in self.plan.operations:
            if op in self.leaving.values():
                continue
            call = self._call(op, history)
            name = self.names[op.id]
            lines.append(f"{name} = {call}" if name in used else call)
        return lines

    def _call(self, op: Operation, history: dict[str, tuple[int, int]]) -> str:
        after = [f"after=[{', '.join(dict.fromkeys(self.names[one] for one in op.after))}]"] if op.after else []
        on = [f"on={self.names[op.target]}", f"at={op.when_tokens}"] if op.target is not None else []
        match op.kind:
            case "open":
                timeout = [f"timeout={op.timeout:g}"] if op.timeout is not None else []
                return _called("open_session", [repr(op.session), *timeout, *after])
            case "close":
                return _called("close_session", [repr(op.session), *after, *on])
            case "abort" if op.target is not None:
                return _called("abort", [self.names[op.target], f"at={op.when_tokens}", *after])
            case "abort":
                return _called("Operation", ['lambda op: post("/abort_request", {"abort_all": True})', *after])
            case "wait":
                return _called("Operation", [f"lambda op: time.sleep({op.seconds:g})", *after])
            case "flush":
                path = "/reset_prefix_cache" if self.vllm else "/flush_cache"
                return _called("Operation", [f'lambda op: post("{path}")', *after])
            case "barrier":
                return _called("Operation", ["lambda op: None", *after, *on])
        return self._request(op, [*after, *on], history)

    def _request(self, op: Operation, order: list[str], history: dict[str, tuple[int, int]]) -> str:
        arguments = [self._prompt(op), str(op.max_new_tokens), *order]
        if not op.stream:
            arguments.append("stream=False")
        if op.stop_ids:
            arguments.append(f"stop={list(op.stop_ids)}")
        if op.samples > 1:
            arguments.append(f"samples={op.samples}")
        if op.id in self.leaving:
            arguments.append(f"leave_at={self.leaving[op.id].when_tokens}")
        if op.kind != "turn" or op.session is None:
            return _called("generate", arguments)
        before = history.get(op.session)
        if before and (legal := self._legal(before, len(op.input_ids))):
            arguments.append(f"cached={legal}")
        if op.invalid in REFUSED_PARAMS and not self.vllm:
            arguments.append(f"refuse={ {op.invalid: REFUSED_PARAMS[op.invalid]} }")
        if op.expect == "finish":
            least, most = before or (0, 0)
            output = 1 if op.stop_ids else op.max_new_tokens
            history[op.session] = (
                least + len(op.input_ids) + output,
                most + len(op.input_ids) + op.max_new_tokens,
            )
        return _called("turn", [repr(op.session), *arguments])

    def _legal(self, before: tuple[int, int], new: int) -> tuple[int, int] | None:
        """Where cached tokens may end, counted from the end of a history of at least and at most so many; None
        where that depends on how many there are.
        """
        if self.cached is None:
            return None
        ranges = [(held, *self.cached(held, held + new)) for held in range(before[0], before[1] + 1)]
        found = {(low - held, high - held) for held, low, high in ranges}
        return found.pop() if len(found) == 1 else None

    def _prompt(self, op: Operation) -> str:
        seeded = op.input_ids == passes.ids(len(op.input_ids), op.id, self.high)
        if seeded and len(op.input_ids) > 3:
            self.uses_ids = True
            return f"ids({len(op.input_ids)}, seed={op.id})"
        return str(list(op.input_ids))


def _called(name: str, arguments: Iterable[str]) -> str:
    return f"{name}({', '.join(arguments)})"


def issue(made: Minimised, launch: Launch) -> str:
    """The Markdown text of an issue, ready to post with ``repro.py``."""
    finding = made.finding
    evidence = "\n".join(f"- {line}" for line in finding.evidence)
    steps = "\n".join(f"- {line}" for line in made.steps)
    features = ", ".join(f"{name}: {value}" for name, value in _features(made.cell))
    return f"""# {finding.headline}

**Engine:** {launch.engine} {launch.version}
**Configuration:** {features or "defaults"}
**Shown in:** {made.last}; the whole workload before minimisation: {made.first}

## Steps

```
{launch.command()}
python {REPRO} http://127.0.0.1:{PORT}
```

`{REPRO}` does {made.operations} operations, up to {ROUNDS} times until the bug shows, and ends with 1 while it
is there, with 0 when it is not. Start the server anew before each run: what it has lost stays lost.

## Expected

{EXPECTED[check_of(finding)].capitalize()}

## Found

{finding.headline}.
{f"Owner: {finding.owner}." if finding.owner else "No single request could be made out as its owner."}

{evidence}

{f"Next step: {finding.next_step}." if finding.next_step else ""}

<details><summary>How it was minimised</summary>

From {made.operations_before} to {made.operations} operations in {made.probes} probes, seed {made.plan.seed},
kvcheck {__version__}, kind {finding.kind}{f" (or {', '.join(finding.also)})" if finding.also else ""}.

{steps}

</details>
"""


def _features(cell: Cell) -> list[tuple[str, object]]:
    """What the cell has beyond the plainest one, and its sizes."""
    left = [(name, getattr(cell.features, name)) for name, _ in passes.simpler_features(cell.features)]
    sizes = ("chunked_prefill", "context_length", "pool_tokens", "max_running")
    return [*left, *((name, getattr(cell.features, name)) for name in sizes)]
