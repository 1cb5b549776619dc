"""The ``kvcheck`` command. Each subcommand is one function and one line in ``main``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_kvcheck import __version__

REFERENCE = "pytest_kvcheck.reference"
SYNTHETIC = Path(__file__).parent / "reference" / "synthetic.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status (0 good, 1 something was found, 2 bad usage)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="kvcheck", description="Tools around pytest-kvcheck.")
    parser.add_argument("--version", action="version", version=f"kvcheck {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    doctor = command("doctor", _doctor, "Say what is here: GPUs, engines, versions, and the oracles of each")
    doctor.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="an engine's interpreter to look into"
    )
    serve = command("serve", _serve, "Run the reference engine alone (its own flags: kvcheck serve --help)")
    serve.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the reference engine")
    models = command("models", _models, "Make the synthetic models, or list them")
    actions = models.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = "Make the models in a folder, as safetensors in Hugging Face layout; one that is there stays"
    made = actions.add_parser("make", help=make, description=make)
    made.add_argument("dir", type=Path, metavar="DIR", help="where to make them, each in a folder of its name")
    made.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="make only this one; may be repeated"
    )
    listed = "Print the names of the models that can be made"
    actions.add_parser("list", help=listed, description=listed)
    faults = command(
        "faults", _faults, "List the faults of the reference engine, or measure how they are found"
    )
    faults.add_argument("--measure", action="store_true", help="look for each, beside a clean twin")
    faults.add_argument("--only", action="append", default=[], metavar="FAULT", help="measure only this one")
    faults.add_argument("--engine", choices=("sglang", "vllm"), help="measure mutants of this engine instead")
    faults.add_argument("--mutants", type=Path, help="their table, a Python file with SUBJECTS")
    faults.add_argument("--python", help="interpreter of that engine's environment")
    faults.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    faults.add_argument("--check", choices=("on", "off", "both"), default="both", help="the engine's own check")
    faults.add_argument("--shrink", action="store_true", help="minimise each that is found, and tell the size")
    faults.add_argument(
        "--scorer",
        metavar="transformers[=PYTHON]",
        help="judge with it too, and look for what nothing else shows",
    )
    faults.add_argument("--workload", help="look for all of them with this workload alone, such as fuzz")
    faults.add_argument(
        "--plans",
        type=int,
        choices=range(1, 1001),
        metavar="N",
        default=1,
        help="most plans of different seeds a fault, and as many as each clean twin gets (default: 1)",
    )
    faults.add_argument("--budget", type=float, default=6.0, help="seconds of load a case (default: 6)")
    faults.add_argument("--artifacts", type=Path, default=Path(".kvcheck"), help="where traces and logs go")
    faults.add_argument("--output", type=Path, help="write the table as Markdown (docs/detection.md)")
    replay = command("replay", _replay, "Run a trace's plan again: fixed (0), still failing (1), diverged (3)")
    replay.add_argument(
        "--scorer", metavar="transformers[=PYTHON]", help="judge with it too, as --kvcheck-scorer does"
    )
    replay.add_argument("--times", type=int, default=3, help="runs that must pass for fixed (default: 3)")
    shrink = command("shrink", _shrink, "Minimise a failing trace: repro.py and issue.md beside it")
    shrink.add_argument("--probes", type=int, default=150, help="most runs of smaller plans (default: 150)")
    shrink.add_argument("--seconds", type=float, default=900.0, help="most seconds (default: 900)")
    for each in (replay, shrink):
        each.add_argument("trace", type=Path, help="a trace.jsonl, or the folder that holds it")
        each.add_argument("--url", metavar="URL", help="attach to this running server instead of starting one")
        each.add_argument("--python", metavar="PATH", help="interpreter of the engine's own environment")
        each.add_argument("--device", choices=("cpu", "cuda"), help="instead of the trace's own")
        each.add_argument("--model", help="instead of the trace's own: a folder or a hub id")
        each.add_argument("--artifacts", type=Path, default=Path(".kvcheck"), help="where logs go")
    compare = command(
        "compare", _compare, "Score a trace's histories on two engines, and say where they differ"
    )
    if "compare" in arguments[:1]:
        from pytest_kvcheck.compare import add_arguments  # it brings the launcher in

        add_arguments(compare)
    command("schema", _schema, "Print the JSON Schema of a matrix, for editors")
    report = command("report", _report, "Write the HTML report of an artifacts folder")
    report.add_argument("dir", type=Path, metavar="DIR", help="an artifacts folder, or a --kvcheck-json file")
    report.add_argument("--output", type=Path, default=Path("kvcheck.html"), help="default: kvcheck.html")
    merge = command("merge", _merge, "Merge the results of several artifacts folders into one JSON")
    merge.add_argument(
        "dirs", nargs="+", type=Path, metavar="DIR", help="artifacts folders, or --kvcheck-json files"
    )
    merge.add_argument("--output", type=Path, default=Path("kvcheck.json"), help="default: kvcheck.json")

    if arguments[:1] == ["serve"]:  # argparse would take --help and unknown flags for itself
        return _serve(argparse.Namespace(flags=arguments[1:]))
    chosen = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = chosen.run
    try:
        return run(chosen)
    except KeyboardInterrupt:
        print(f"kvcheck {chosen.command}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"kvcheck {chosen.command}: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except (LookupError, ValueError) as error:
        print(f"kvcheck {chosen.command}: {error}", file=sys.stderr)
        return 2


def _serve(chosen: argparse.Namespace) -> int:
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"kvcheck serve: expected torch and safetensors in {sys.executable}, found no "
            f"{' and no '.join(missing)}. "
            "Next: pip install 'pytest-kvcheck[reference]'",
            file=sys.stderr,
        )
        return 2
    os.execv(sys.executable, [sys.executable, "-m", REFERENCE, *chosen.flags])


def _faults(chosen: argparse.Namespace) -> int:
    listed = subprocess.run(
        [sys.executable, "-m", REFERENCE, "--list-faults"], check=False, capture_output=True, text=True
    )
    if listed.returncode:
        raise LookupError(listed.stderr.strip() or "the reference engine could not list its faults")
    faults = json.loads(listed.stdout)
    if chosen.measure:
        from pytest_kvcheck.detection import measure_command

        return measure_command(faults, chosen)
    for fault in faults:
        print(f"{fault['name']:32} {fault['kind']}  {fault['what']}")
    return 0


def _replay(chosen: argparse.Namespace) -> int:
    from pytest_kvcheck.shrink.commands import replay_command

    return replay_command(chosen)


def _shrink(chosen: argparse.Namespace) -> int:
    from pytest_kvcheck.shrink.commands import shrink_command

    return shrink_command(chosen)


def _recipes() -> dict[str, Path]:
    # In a wheel the recipes lie inside the package; in a checkout they lie beside it.
    here = Path(__file__).parent
    homes = [here / "fixtures" / "models", here.parent / "fixtures" / "models"]
    return {found.parent.name: found.parent for home in homes for found in home.glob("*/recipe.json")}


def _models(chosen: argparse.Namespace) -> int:
    recipes = _recipes()
    if chosen.action == "list":
        print("\n".join(sorted(recipes)))
        return 0
    unknown = sorted(set(chosen.only) - set(recipes))
    if unknown:
        raise ValueError(f"make --only: expected one of {', '.join(sorted(recipes))}, found {unknown[0]!r}")
    if importlib.util.find_spec("torch") is None:
        raise LookupError(
            f"make: expected torch and safetensors in {sys.executable}, found no torch. Next: "
            "pip install 'pytest-kvcheck[reference]'"
        )
    for name in chosen.only or sorted(recipes):
        if (chosen.dir / name / "model.safetensors").exists():
            print(chosen.dir / name)  # made before: the same recipe gives the same bytes
            continue
        status = subprocess.run(
            [sys.executable, str(SYNTHETIC), str(recipes[name]), str(chosen.dir / name)], check=False
        ).returncode
        if status:
            return status
        print(chosen.dir / name)
    return 0


def _compare(chosen: argparse.Namespace) -> int:
    from pytest_kvcheck.compare import run

    return run(chosen)


def _schema(chosen: argparse.Namespace) -> int:
    from pytest_kvcheck.matrix.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _report(chosen: argparse.Namespace) -> int:
    from pytest_kvcheck.report.html import write_html
    from pytest_kvcheck.report.results import read_results

    write_html(chosen.output, read_results(chosen.dir), chosen.dir)
    print(chosen.output)
    return 0


def _merge(chosen: argparse.Namespace) -> int:
    from pytest_kvcheck.report.results import merge, write_json

    write_json(chosen.output, merge(chosen.dirs))
    print(chosen.output)
    return 0


def _doctor(chosen: argparse.Namespace) -> int:
    from pytest_kvcheck.doctor import describe

    text, found = describe([sys.executable, *chosen.python])
    print(text)
    return 0 if found else 2


if __name__ == "__main__":
    sys.exit(main())
