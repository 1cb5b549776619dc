"""The table of engines and cells in docs/engines.md. ``python tests/engines_table.py`` writes it anew."""

from __future__ import annotations

from pathlib import Path

from pytest_kvcheck.cells import DeviceName, EngineName
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.matrix.loader import load
from pytest_kvcheck.workloads import parameter_names

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- table: python tests/engines_table.py -->\n", "<!-- end of the table -->\n"
COLUMNS: tuple[tuple[str, EngineName, DeviceName, str], ...] = (
    ("reference", "reference", "cpu", ""),
    ("SGLang 0.5.23, CPU", "sglang", "cpu", "0.5.23"),
    ("SGLang 0.5.23, GPU", "sglang", "cuda", "0.5.23"),
    ("vLLM 0.32.0, CPU", "vllm", "cpu", "0.32.0"),
    ("vLLM 0.32.0, GPU", "vllm", "cuda", "0.32.0"),
)


def table() -> str:
    """Every cell of every shipped matrix with "yes", or the number of the reason why an engine cannot."""
    reasons: list[str] = []
    lines = ["| matrix | cell | " + " | ".join(name for name, *_ in COLUMNS) + " |"]
    lines.append("|---|---|" + "---|" * len(COLUMNS))
    for path in sorted((ROOT / "matrices").glob("*.yaml")):
        columns = [_answers(path, *column[1:]) for column in COLUMNS]
        for cell in columns[0]:
            found = []
            for column in columns:
                reason = column[cell]
                if reason is not None and reason not in reasons:
                    reasons.append(reason)
                found.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
            lines.append(f"| {path.stem} | {cell} | " + " | ".join(found) + " |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", *notes]) + "\n"


def _answers(path: Path, engine: EngineName, device: DeviceName, version: str) -> dict[str, str | None]:
    cells = load(path, engine=engine, device=device, workload_names=parameter_names())
    return {cell.name: make_engine(engine).unsupported(cell, device, version) for cell in cells}


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
