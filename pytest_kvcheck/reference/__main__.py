"""``python -m pytest_kvcheck.reference``: the reference engine as a server, with SGLang's flags."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .faults import TABLE, Faults

if TYPE_CHECKING:
    from .engine import Speculation
    from .server import Server

try:
    VERSION = "reference-" + metadata.version("pytest-kvcheck")
except metadata.PackageNotFoundError:
    VERSION = "reference-uninstalled"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m pytest_kvcheck.reference",
        description="A small inference engine with SGLang's HTTP protocol and faults that can be planted.",
        allow_abbrev=False,
    )
    add = flags.add_argument
    add("--model-path", "--model", type=Path, help="folder with config.json and *.safetensors")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0: any free port, printed when ready")
    add("--page-size", type=_positive, default=1)
    add("--chunked-prefill-size", type=int, default=8192, help="tokens prefilled in one batch; -1: no chunking")
    add("--enable-mixed-chunk", action="store_true", help="decode and prefill in one batch")
    add("--context-length", type=_positive, default=None)
    add("--max-total-tokens", type=_positive, default=65536, help="size of the KV pool")
    add("--max-running-requests", type=_positive, default=16)
    add("--enable-streaming-session", action="store_true")
    add("--disable-radix-cache", action="store_true")
    add("--disable-overlap-schedule", action="store_true")
    add("--speculative-algorithm", choices=("EAGLE",), default=None)
    add("--speculative-draft-model-path", type=Path, default=None)
    add("--speculative-num-steps", type=_positive, default=3)
    add("--speculative-eagle-topk", type=_positive, default=1)
    add("--speculative-num-draft-tokens", type=_positive, default=0)
    add(
        "--swa-full-tokens-ratio", type=float, default=0.8, help="the sliding layers' pool against the full one"
    )
    add("--enable-metrics", action="store_true")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add("--random-seed", type=int, default=0)
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--device", default="cpu")
    add("--served-model-name", default=None)
    add("--skip-tokenizer-init", action="store_true", help="always the case; accepted for likeness")
    own = flags.add_argument_group("of this engine only")
    own.add_argument(
        "--plant", action="append", default=[], metavar="FAULT", help="plant a known fault; repeatable"
    )
    own.add_argument("--silent", action="store_true", help="no memory check: only an observer can notice")
    own.add_argument("--retract-interval", type=int, default=None, help="retract a request every N batches")
    own.add_argument("--list-faults", action="store_true", help="print the faults as JSON and end")
    return flags


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {value}")
    return value


def retract_interval(given: int | None) -> int:
    """The flag, else SGLang's environment variables; 0: no forced retraction."""
    if given is not None:
        return given
    if os.environ.get("SGLANG_TEST_RETRACT", "").lower() in ("1", "true", "yes", "on"):
        return int(os.environ.get("SGLANG_TEST_RETRACT_INTERVAL", "3"))
    return 0


def speculation(args: argparse.Namespace, make: type[Speculation]) -> Speculation | None:
    """From SGLang's flags; its environment variable says which version (V2 unless it is 0)."""
    if args.speculative_algorithm is None:
        return None
    if args.speculative_draft_model_path is None:
        _refuse("--speculative-draft-model-path: expected a draft's folder beside --speculative-algorithm")
    v2 = os.environ.get("SGLANG_ENABLE_SPEC_V2", "1").lower() not in ("0", "false", "no", "off")
    topk, tokens = args.speculative_eagle_topk, args.speculative_num_draft_tokens
    return make(args.speculative_draft_model_path, args.speculative_num_steps, v2, topk, tokens)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.list_faults:
        print(json.dumps([asdict(fault) for fault in TABLE], indent=1))
        return 0
    if args.model_path is None:
        _refuse(
            "--model-path: expected a folder with a model, found nothing; `kvcheck models make DIR` makes one"
        )
    try:
        Faults(args.plant)  # before torch is imported, which takes seconds
    except ValueError as error:
        _refuse(str(error))
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr)
    logging.getLogger("kvcheck.reference").setLevel(args.log_level.upper())
    try:
        import torch

        from .engine import OptionError, Options, Speculation
        from .model import ModelError
        from .server import Server
    except ImportError as error:
        _refuse(f"the reference engine needs {error.name}: pip install 'pytest-kvcheck[reference]'")
    torch.set_num_threads(1)
    # Two threads share the interpreter; at the default of 5 ms a hand-over costs more than a decode step.
    sys.setswitchinterval(0.001)
    arguments = {name: value for name, value in vars(args).items() if name not in ("list_faults",)}
    for name in ("model_path", "speculative_draft_model_path"):
        arguments[name] = arguments[name] and str(arguments[name])
    try:
        options = Options(
            model=args.model_path,
            page_size=args.page_size,
            chunk=args.chunked_prefill_size if args.chunked_prefill_size > 0 else None,
            mixed_chunk=args.enable_mixed_chunk,
            context=args.context_length,
            pool=args.max_total_tokens,
            max_running=args.max_running_requests,
            streaming_sessions=args.enable_streaming_session,
            prefix_cache=not args.disable_radix_cache,
            overlap=not args.disable_overlap_schedule,
            retract_interval=retract_interval(args.retract_interval),
            speculation=speculation(args, Speculation),
            swa_ratio=args.swa_full_tokens_ratio,
            dtype=args.dtype,
            device=args.device,
            silent=args.silent,
            plant=tuple(args.plant),
        )
        server = Server(options, arguments, VERSION)
    except (OptionError, ModelError, ValueError, RuntimeError) as error:
        # torch raises RuntimeError for a device that it does not know and for memory that is not there
        _refuse(str(error))
    try:
        asyncio.run(_serve(server, args.host, args.port))
    except OSError as error:
        _refuse(f"--port: expected {args.host}:{args.port} to be free, found: {error.strerror or error}")
    return 0


async def _serve(server: Server, host: str, port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(name, stop.set)
    await server.serve(host, port, stop)


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main())
