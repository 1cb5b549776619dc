"""Faults for a real vLLM 0.32.0: one accounting line each, broken while the engine starts.

``cell`` are the features under which the fault can show, ``workload`` provokes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest_kvcheck.engines.vllm_cpu as vllm_cpu

INJECT = Path(vllm_cpu.__file__).with_name("inject")


@dataclass(frozen=True)
class Mutant:
    """``kinds`` are those that a finding may name; ``outcomes`` those that the case may have.

    ``owner``: what the owner's name must hold where KV events are on, "" where the lost blocks were never full.
    """

    name: str
    module: str
    old: str
    new: str
    kinds: frozenset[str]
    outcomes: frozenset[str]
    workload: str
    cell: dict[str, Any] = field(default_factory=dict)
    model: str = "tiny-llama"
    draft: str | None = None
    owner: str = ""

    @property
    def env(self) -> dict[str, str]:
        """The environment that plants the fault."""
        change = {"module": self.module, "old": self.old, "new": self.new}
        return {"PYTHONPATH": str(INJECT), "KVCHECK_VLLM_PATCH": json.dumps([change])}


LEAK = frozenset({"leak"})
SCHEDULER = "vllm.v1.core.sched.scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager"

MUTANTS = (
    Mutant(
        name="aborted-blocks-not-freed",
        module=SCHEDULER,
        old="self._free_request(request, delay_free_blocks=delay_free_blocks)",
        new=(
            "self._free_request(request, delay_free_blocks=delay_free_blocks"
            " or finished_status == RequestStatus.FINISHED_ABORTED)"
        ),
        kinds=frozenset({"K03", "K04"}),
        outcomes=LEAK,
        workload="nth-mid-abort",
        owner="aborted turn",
    ),
    Mutant(
        name="preemption-frees-one-too-few",
        module=SCHEDULER,
        old="        self._free_request_blocks(request)\n        self.encoder_cache_manager.free(request)",
        new=(
            "        blocks = self.kv_cache_manager.pop_blocks_for_free(request)\n"
            "        self.kv_cache_manager.block_pool.free_blocks(reversed(blocks[:-1]))\n"
            "        self.encoder_cache_manager.free(request)"
        ),
        kinds=frozenset({"K05"}),
        outcomes=LEAK | {"stuck"},
        workload="stress-concurrent",
        cell={"retract": {"interval": 3}, "context_length": 2048},
    ),
    Mutant(
        name="speculative-lookahead-kept",
        module=MANAGER,
        old="        self.coordinator.free(request.request_id)",
        new=(
            "        blocks = self.coordinator.pop_blocks_for_free(request.request_id)\n"
            "        size = self.coordinator.single_type_managers[0].block_size\n"
            "        kept = cdiv(request.num_computed_tokens, size)\n"
            "        self.block_pool.free_blocks(reversed(blocks[:kept]))"
        ),
        kinds=frozenset({"K02", "K01"}),
        outcomes=LEAK,
        workload="stress-concurrent",
        cell={"speculative": {"algorithm": "EAGLE", "version": "v2", "overlap": False}},
        draft="tiny-llama-eagle-vllm",
    ),
    Mutant(
        name="double-free",
        module=MANAGER,
        old="        self.coordinator.free(request.request_id)",
        new=(
            "        blocks = self.coordinator.pop_blocks_for_free(request.request_id)\n"
            "        self.block_pool.free_blocks(reversed(blocks))\n"
            "        self.block_pool.free_blocks(reversed(blocks[-1:]))"
        ),
        kinds=frozenset({"K12", "K13"}),
        outcomes=frozenset({"leak", "crash", "mismatch"}),
        workload="stress-concurrent",
    ),
    Mutant(
        name="prefix-hash-of-wrong-tokens",
        module="vllm.v1.core.kv_cache_utils",
        old="curr_block_token_ids_tuple = tuple(curr_block_token_ids)",
        new="curr_block_token_ids_tuple = tuple(one % 2 for one in curr_block_token_ids[:2])",
        kinds=frozenset({"K17", "K13"}),
        outcomes=frozenset({"mismatch"}),
        workload="stress-concurrent",
    ),
    Mutant(
        name="sliding-window-blocks-never-released",
        module="vllm.v1.core.single_type_kv_cache_manager",
        old=(
            "            blocks[i] = self._null_block\n"
            "        if freed:\n"
            "            self.block_pool.free_blocks(freed)\n"
            "\n"
            "    def remove_skipped_blocks("
        ),
        new="            blocks[i] = self._null_block\n\n    def remove_skipped_blocks(",
        kinds=frozenset({"K14", "K01"}),
        outcomes=LEAK,
        workload="stress-concurrent",
        # Every token that leaves the window is lost: a small pool would starve before the verdict.
        cell={"pool_tokens": 131072},
        model="tiny-swa",
    ),
)
