"""Puts an engine together from its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .cache import KVCache
from .decoding import Decoding
from .executor import Executor
from .faults import Faults
from .model import Model, ModelConfig
from .plan import Limits
from .pools import Memory, kv_tensors, pages_for
from .radix import RadixCache
from .scheduler import Scheduler, Update
from .sessions import Sessions
from .speculative import Draft, Fan, SpecExecutor, SpecV1, SpecV2


class OptionError(Exception):
    """Options that do not fit together or the model; the message names the flag and what to do."""


@dataclass(frozen=True)
class Speculation:
    """EAGLE with ``topk`` chains of at most ``steps`` guesses. ``draft_tokens`` (0: as many as there can be)
    are verified in a round, the last sampled token included. ``v2``: results may be resolved one iteration
    late.
    """

    draft: Path
    steps: int = 3
    v2: bool = True
    topk: int = 1
    draft_tokens: int = 0

    def fan(self) -> Fan:
        """Raises :class:`OptionError` where the tokens do not fit the chains."""
        most = self.steps * self.topk + 1
        tokens = self.draft_tokens or most
        if not self.topk < tokens <= most:
            raise OptionError(
                f"--speculative-num-draft-tokens: expected {self.topk + 1} to {most} (--speculative-eagle-topk "
                f"{self.topk} chains of at most --speculative-num-steps {self.steps}), found {tokens}"
            )
        return Fan(self.steps, self.topk, tokens)


@dataclass(frozen=True)
class Options:
    """Everything that is set at launch. Sizes are in tokens; ``chunk`` None: prompts are prefilled whole.

    ``swa_ratio`` is the size of the sliding layers' pool against the full one.
    """

    model: Path
    page_size: int = 1
    chunk: int | None = 8192
    mixed_chunk: bool = False
    context: int | None = None
    pool: int = 65536
    max_running: int = 16
    streaming_sessions: bool = False
    prefix_cache: bool = True
    overlap: bool = True
    retract_interval: int = 0
    speculation: Speculation | None = None
    swa_ratio: float = 0.8
    dtype: str = "float32"
    device: str = "cpu"
    silent: bool = False
    plant: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """A scheduler with its options and model."""

    options: Options
    config: ModelConfig
    scheduler: Scheduler
    context: int


def build(options: Options, tell: Callable[[list[Update]], None]) -> Engine:
    """Load the model, make the pools. Raises :class:`OptionError`, ``ModelError`` or ``ValueError`` (a
    fault name).
    """
    faults = Faults(options.plant)
    page = options.page_size
    if options.chunk is not None and options.chunk % page:
        raise OptionError(
            f"--chunked-prefill-size: expected a multiple of --page-size {page}, found {options.chunk}; "
            f"give {max(page, options.chunk // page * page)}"
        )
    if options.pool < page:
        raise OptionError(
            f"--max-total-tokens: expected at least one page of {page} tokens, found {options.pool}"
        )
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device: expected a usable CUDA device, found none; give --device cpu")
    dtype = getattr(torch, options.dtype)
    context = options.context or ModelConfig.load(options.model).max_positions
    spec = options.speculation
    fan = spec.fan() if spec else Fan(1, 1, 2)
    # Positions past the context that an overlapped step may touch, then whole pages.
    slack = 4 * (fan.slots + 2)
    width = pages_for(context + slack, page) * page + page
    model = Model(options.model, dtype, device, positions=width)
    config = model.config
    swa_pool = int(options.pool * options.swa_ratio) // page * page if config.window else 0
    memory = Memory(options.pool, page, options.max_running, width, faults, config.window, swa_pool)
    sliding = sum(config.sliding)
    slots = memory.full.total + page
    shape = (config.kv_heads, config.head_dim, dtype, device)
    kv = kv_tensors((config.layers - sliding, sliding), (slots, swa_pool + page), *shape)
    cache = KVCache(memory, RadixCache(memory, options.prefix_cache), Sessions(faults), faults)
    limits = Limits(
        context=context,
        max_running=options.max_running,
        chunk=options.chunk,
        mixed=options.mixed_chunk,
        overlap=options.overlap and (spec is None or spec.v2),
        retract_interval=options.retract_interval,
    )
    executor, decoding = Executor(model, kv, memory, faults), Decoding(cache)
    if spec is not None:
        draft_kv = kv_tensors((1, 0), (slots, 1), *shape)[0][0]
        draft = Draft(spec.draft, model, draft_kv, width)
        executor = SpecExecutor(model, draft, fan, kv, memory, faults)
        decoding = (SpecV2 if spec.v2 else SpecV1)(cache, fan)
    scheduler = Scheduler(cache, executor, decoding, limits, faults, tell, options.silent)
    return Engine(options, config, scheduler, context)
