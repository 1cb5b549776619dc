"""Puts an engine together from its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .cache import KVCache
from .executor import Executor
from .faults import Faults
from .model import Model, ModelConfig
from .pools import Memory, kv_tensors
from .radix import RadixCache
from .scheduler import Limits, Scheduler, Update
from .sessions import Sessions

# Positions past the context that an overlapped step may touch.
SLACK = 8


class OptionError(Exception):
    """Options that do not fit together or the model; the message names the flag and what to do."""


@dataclass(frozen=True)
class Options:
    """Everything that is set at launch. Sizes are in tokens; ``chunk`` None: prompts are prefilled whole."""

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
    width = (context + SLACK + page) // page * page + page
    model = Model(options.model, dtype, device, positions=width)
    memory = Memory(options.pool, page, options.max_running, width, faults)
    config = model.config
    sliding = sum(config.sliding)
    slots = (memory.full.pages + 1) * page
    kv = kv_tensors(
        (config.layers - sliding, sliding),
        (slots, slots if sliding else 1),
        config.kv_heads,
        config.head_dim,
        dtype,
        device,
    )
    tree = RadixCache(memory.full, options.prefix_cache)
    cache = KVCache(memory, tree, Sessions(faults), faults)
    limits = Limits(
        context=context,
        max_running=options.max_running,
        chunk=options.chunk,
        mixed=options.mixed_chunk,
        overlap=options.overlap,
        retract_interval=options.retract_interval,
    )
    executor = Executor(model, kv, memory.rows.slots, faults)
    scheduler = Scheduler(cache, executor, limits, faults, tell, options.silent)
    return Engine(options, config, scheduler, context)
