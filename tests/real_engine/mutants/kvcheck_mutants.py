"""Faults to build into an installed SGLang when it starts: the negative controls of kvcheck's own tests.

Put this folder on the engine's PYTHONPATH and set ``KVCHECK_MUTANT=<name>``. The module's source is changed
while it is imported; nothing is written. A text that is not there exactly once ends the process: a release
that has moved on must not turn a control into a run without a fault.
"""

import os
import sys
from dataclasses import dataclass, field
from importlib.machinery import PathFinder, SourceFileLoader

SESSION = "sglang.srt.session.streaming_session"
CONTROLLER = "sglang.srt.session.session_controller"


@dataclass(frozen=True)
class Mutant:
    """``edits``: release -> (module, text, what stands there instead).

    ``strict_sees``: whether the engine's own strict checks end the server (measured); ``feature``: what a cell
    needs for the changed line to run at all.
    """

    name: str
    kind: str
    what: str
    traffic: str
    strict_sees: bool
    edits: dict = field(default_factory=dict)
    feature: str = ""


MUTANTS = (
    Mutant(
        "session-release-frees-nothing",
        "K01",
        "closing a session forgets its private KV",
        "open, one turn, close",
        True,
        {
            "0.5.23": (
                SESSION,
                "            self.cache.free_kv_row(slot.kv, [(protected_len, slot.kv.kv_allocated_len)])\n",
                "",
            ),
            "0.5.12.post1": (
                SESSION,
                "                self.token_to_kv_pool_allocator.free(kv_indices)\n"
                "            self.req_to_token_pool",
                "                pass\n            self.req_to_token_pool",
            ),
        },
    ),
    Mutant(
        "session-row-kept",
        "K11",
        "closing a session forgets its request row",
        "open, one turn, close",
        True,
        {
            "0.5.23": (SESSION, "            self.cache.req_to_token_pool.free(slot)\n", ""),
            "0.5.12.post1": (
                SESSION,
                "            self.req_to_token_pool.free_slots.append(slot.req_pool_idx)\n",
                "",
            ),
        },
    ),
    Mutant(
        "session-lock-kept",
        "K10",
        "closing a session never releases its lock on the prefix tree",
        "open, one turn, close",
        False,
        {
            "0.5.23": (SESSION, "        self.cache.unlock(slot.lock)\n", ""),
            "0.5.12.post1": (
                SESSION,
                "                self.inner.dec_lock_ref(lock_node)\n\n        if slot.is_holding_kv",
                "                pass\n\n        if slot.is_holding_kv",
            ),
        },
    ),
    Mutant(
        "tail-free-nothing",
        "K01",
        "the stale tail of a session's row is overwritten without being freed",
        "a session's turn that is retracted and comes back",
        True,
        {
            "0.5.23": (
                SESSION,
                "        self._free_kv_aligned(kv, prefix_len, kv.kv_allocated_len)\n",
                "",
            ),
            "0.5.12.post1": (
                SESSION,
                "        self._free_kv_aligned(slot.req_pool_idx, prefix_len, slot.kv_allocated_len)\n",
                "",
            ),
        },
        feature="retract",
    ),
    Mutant(
        "overshoot-untrimmed",
        "K02",
        "what speculation allocated past the last token stays allocated, unknown to anyone",
        "a session's turn under speculation",
        True,
        {
            "0.5.23": (
                SESSION,
                "        self._free_kv_aligned(req.kv, target, req.kv.kv_allocated_len)\n",
                "",
            ),
            "0.5.12.post1": (
                SESSION,
                "        self._free_kv_aligned(req.req_pool_idx, target, req.kv_allocated_len)\n",
                "",
            ),
        },
        feature="speculative",
    ),
    Mutant(
        "abort-release-forgotten",
        "K03",
        "an aborted turn drops its session's KV record without giving anything back",
        "a session's turn that is aborted while it runs",
        True,
        {
            "0.5.23": (
                SESSION,
                "            req.lock, slot.lock = slot.lock, None\n"
                "            req.release_mm_inputs_on_abort()\n"
                "            req.session.abort_req()\n"
                "            return False\n",
                "            req.session.abort_req()\n            req.detach_kv()\n            return True\n",
            ),
            "0.5.12.post1": (
                SESSION,
                "            self.release_session(session_id)\n            req.req_pool_idx = None\n",
                "            self.slots.pop(session_id, None)\n            req.req_pool_idx = None\n",
            ),
        },
    ),
    Mutant(
        "retract-release-forgotten",
        "K05",
        "a plain request that is retracted loses the slots behind its cached prefix",
        "two plain requests at once, forced retraction",
        True,
        {
            "0.5.23": (
                "sglang.srt.managers.schedule_batch",
                "    release_kv_cache(req, tree_cache, checkpoint=False)\n"
                "    # NOTE(lsyin): we should use the newly evictable memory instantly.\n",
                "    if req.session is None:\n"
                "        req.kv.cache_protected_len = req.owned_kv_len()\n"
                "    release_kv_cache(req, tree_cache, checkpoint=False)\n",
            ),
        },
        feature="retract",
    ),
    Mutant(
        "double-free",
        "K12",
        "closing a session frees its private KV twice",
        "open, one turn, close",
        True,
        {
            "0.5.23": (
                SESSION,
                "            self.cache.free_kv_row(slot.kv, [(protected_len, slot.kv.kv_allocated_len)])\n",
                "            self.cache.free_kv_row(slot.kv, [(protected_len, slot.kv.kv_allocated_len)])\n"
                "            self.cache.free_kv_row(slot.kv, [(protected_len, slot.kv.kv_allocated_len)])\n",
            ),
            "0.5.12.post1": (
                SESSION,
                "                self.token_to_kv_pool_allocator.free(kv_indices)\n"
                "            self.req_to_token_pool",
                "                self.token_to_kv_pool_allocator.free(kv_indices)\n"
                "                self.token_to_kv_pool_allocator.free(kv_indices)\n"
                "            self.req_to_token_pool",
            ),
        },
    ),
    Mutant(
        "aborted-turn-kept",
        "K06",
        "an aborted turn becomes part of the session's history",
        "a turn that is aborted while it runs, then another",
        False,
        {
            "0.5.23": (
                SESSION,
                "        if isinstance(req.finished_reason, FINISH_ABORT):\n",
                "        aborted = isinstance(req.finished_reason, FINISH_ABORT)\n"
                "        if aborted and req.finished_reason.status_code:\n",
            ),
        },
    ),
    Mutant(
        "in-flight-flag-kept",
        "K07",
        "after an aborted turn its session counts as busy for good",
        "a turn that is aborted while it runs, then another",
        False,
        {
            "0.5.23": (
                CONTROLLER,
                '        """Clear inflight flag on abort (req_nodes stays unchanged)."""\n'
                "        self._inflight = False\n",
                "        pass\n",
            ),
        },
    ),
    Mutant(
        "close-in-flight-forgets",
        "K09",
        "a session closed while a turn runs is dropped, and what it holds stays held",
        "a close while a turn of the session runs",
        False,
        {
            "0.5.23": (
                CONTROLLER,
                "                self.sessions[sid].close_on_finish = False\n"
                "                self._close(sid)\n",
                "                del self.sessions[sid]\n",
            ),
        },
    ),
    Mutant(
        "abort-ignored",
        "K04",
        "an abort of a running request is dropped: it runs to its end",
        "an abort of a long request",
        False,
        {
            "0.5.23": (
                "sglang.srt.managers.scheduler",
                "                else:\n"
                "                    req.to_finish = FINISH_ABORT()\n\n"
                "    def _pause_engine",
                "\n    def _pause_engine",
            ),
        },
    ),
    Mutant(
        "stale-kv",
        "K13",
        "the newest inherited slot of a session holds another token's KV: every count is right",
        "a second turn, log-probs of what it says",
        False,
        {
            "0.5.23": (
                SESSION,
                "        self._free_tail(req.kv, prefix_len)\n",
                "        if prefix_len - slot.kv.cache_protected_len >= 2:\n"
                "            pool = self.cache.token_to_kv_pool_allocator.get_kvcache()\n"
                "            row = self.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]\n"
                "            for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):\n"
                "                for buffer in pool.get_kv_buffer(layer):\n"
                "                    buffer[row[prefix_len - 1]] = buffer[row[prefix_len - 2]]\n"
                "        self._free_tail(req.kv, prefix_len)\n",
            ),
            "0.5.12.post1": (
                SESSION,
                "        self._free_tail(slot, req, prefix_len)\n",
                "        if prefix_len - slot.cache_protected_len >= 2:\n"
                "            pool = self.token_to_kv_pool_allocator.get_kvcache()\n"
                "            row = self.req_to_token_pool.req_to_token[req.req_pool_idx]\n"
                "            for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):\n"
                "                for buffer in pool.get_kv_buffer(layer):\n"
                "                    buffer[row[prefix_len - 1]] = buffer[row[prefix_len - 2]]\n"
                "        self._free_tail(slot, req, prefix_len)\n",
            ),
        },
    ),
    Mutant(
        "neighbours-logprob",
        "K18",
        "a request in a batch is told the log-prob of its neighbour's token",
        "two requests at once with output log-probs",
        False,
        {
            "0.5.23": (
                "sglang.srt.managers.scheduler_components.logprob_result_processor",
                "req.logprob.output_token_logprobs_val.append(output.next_token_logprobs[i])",
                "req.logprob.output_token_logprobs_val.append(output.next_token_logprobs[i - 1])",
            ),
        },
    ),
    Mutant(
        "cached-tokens-short",
        "K19",
        "every reply says one cached token less than there were",
        "a second turn",
        False,
        {
            "0.5.23": (
                "sglang.srt.managers.schedule_batch",
                "                req.cached_tokens += new_cached\n",
                "                req.cached_tokens += max(0, new_cached - 1)\n",
            ),
        },
    ),
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def mutate(source, before, after):
    """Raises ``ValueError`` unless the text stands in the source exactly once."""
    count = source.count(before)
    if count != 1:
        raise ValueError(f"expected the text to change exactly once in the source, found it {count} times")
    return source.replace(before, after)


def install(name, release=None):
    """Arrange for the fault to be built in when its module is imported; ends the process where it cannot be."""
    mutant = BY_NAME.get(name)
    if mutant is None:
        _give_up(f"expected one of {', '.join(BY_NAME)}, found {name}")
    sys.meta_path.insert(0, _Finder(mutant, release))


class _Finder:
    def __init__(self, mutant, release):
        self.mutant, self.release = mutant, release

    def find_spec(self, name, path=None, target=None):
        if name not in {module for module, _, _ in self.mutant.edits.values()}:
            return None
        release = self.release or _release()
        edit = self.mutant.edits.get(release)
        if edit is None:
            _give_up(f"{self.mutant.name} is made for SGLang {', '.join(self.mutant.edits)}, found {release}")
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and name == edit[0]:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self.mutant.name, edit)
        return spec


class _Loader(SourceFileLoader):
    """Compiles the changed source, past any cached bytecode."""

    def __init__(self, name, path, mutant, edit):
        super().__init__(name, path)
        self.mutant, self.edit = mutant, edit

    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        try:
            source = mutate(source, *self.edit[1:])
        except ValueError as error:
            _give_up(f"{self.mutant} in {self.path}: {error}")
        print(f"kvcheck mutant {self.mutant} is in {fullname}", file=sys.stderr, flush=True)
        return compile(source, self.path, "exec", dont_inherit=True)


def _release():
    from importlib.metadata import version

    return version("sglang")


def _give_up(message):
    print(f"KVCHECK_MUTANT: {message}", file=sys.stderr, flush=True)
    os._exit(78)
