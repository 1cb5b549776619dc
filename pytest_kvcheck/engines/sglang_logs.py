"""SGLang's log lines, old and new texts side by side: which mean a leak, an end, an account, a retraction."""

from __future__ import annotations

import re

from pytest_kvcheck.observe.logs import LogRule, Meaning

_N = r"-?\d+"
# One pool's sums. The busy check of one iteration writes one such segment a pool.
_POOL = (
    rf"\[(?P<pool>[a-z][\w-]*)\] total=(?P<total>{_N}), available=(?P<available>{_N}), "
    rf"evictable=(?P<evictable>{_N}), protected=(?P<protected>{_N}), "
    rf"session_held=(?P<session_held>{_N}), uncached=(?P<uncached>{_N})"
)
_OLD_BUSY = (
    rf"\[Mem Check \(BUSY\)\] available_size=(?P<available>{_N}), evictable_size=(?P<evictable>{_N}), "
    rf"protected_size=(?P<protected>{_N}), uncached_size=(?P<uncached>{_N})"
)
_OLD_IDLE = (
    r"token_to_kv_pool_allocator memory leak detected!"
    rf"(?: self\.max_total_num_tokens=(?P<total>{_N}), available_size=(?P<available>{_N}), "
    rf"evictable_size=(?P<evictable>{_N}), protected_size=(?P<protected>{_N}))?"
)


def _rule(name: str, pattern: str, meaning: Meaning, kind: str = "") -> LogRule:
    return LogRule(name, re.compile(pattern), meaning, kind)


RULES: tuple[LogRule, ...] = (
    # --- the engine's own verdicts ---------------------------------------------------------------
    # A traceback also quotes the source line of the assertion; only the message itself has a number behind.
    _rule("busy-full", rf"Full Pool Mem Leak Detected! {_POOL}", "leak", "K01"),
    _rule("busy-swa", rf"SWA Pool Mem Leak Detected! {_POOL}", "leak", "K14"),
    _rule("busy-old", rf"(?<!Pool )Mem Leak Detected! total_tokens=(?P<accounted>{_N}) vs "
          rf"self\.max_total_num_tokens=(?P<total>{_N})", "leak", "K01"),
    _rule("idle-pool", rf"(?<!\w)pool memory leak detected!(?: {_POOL})?", "leak", "K01"),
    _rule("idle-bytes", r"(?<!\w)pool-bytes memory leak detected! ?(?P<detail>.{0,200})", "leak", "K01"),
    _rule("idle-old", _OLD_IDLE, "leak", "K01"),
    _rule("idle-rows", rf"req_to_token_pool memory leak detected!\s*available_size=(?P<available>{_N}), "
          rf"(?:session_held=(?P<session_held>{_N}), )?total_size=(?P<total>{_N})", "leak", "K11"),
    _rule("double-free", rf"KV double free: sub-pool (?P<pool>\d+) has (?P<pages>{_N}) duplicate pages",
          "leak", "K12"),
    _rule("use-after-free", r"KV page use-after-free: (?P<pages>\d+) owner page refs", "leak", "K13"),
    _rule("canary", r"kv_canary violation: launch_tag=(?P<launch_tag>\S+) fail_reason=(?P<fail_reason>\S+)",
          "leak", "K13"),
    # --- the end ---------------------------------------------------------------------------------
    _rule("exception", r"Scheduler hit an exception", "fatal"),
    _rule("sigquit", r"SIGQUIT received\.|Received sigquit from a child process", "fatal"),
    _rule("watchdog", r"Scheduler watchdog timeout", "fatal"),
    # --- the account of one iteration ------------------------------------------------------------
    # A watchdog's dump has the same segment at the start of a line and leaves requests out: no account.
    _rule("busy", rf"(?:\[Mem Check \(BUSY\)\] |(?<=\d)[,;]? ){_POOL}", "account"),
    _rule("busy-before-0.5.11", _OLD_BUSY, "account"),
    # --- what explains ---------------------------------------------------------------------------
    _rule("retract-full", r"KV cache pool is full\. Retract requests\. #retracted_reqs: (?P<count>[1-9]\d*)",
          "retract"),
    _rule("retract-forced", r"Testing retraction\. #retracted_reqs: (?P<count>[1-9]\d*)", "retract"),
    _rule("session-opened", r"Session opened: (?P<session>\S+) \(active=(?P<active>\d+)\)", "session"),
    _rule("session-closed", r"Session closed: (?P<session>\S+) \(active=(?P<active>\d+)\)", "session"),
    _rule("session-released", r"Session KV released: (?P<session>\S+) \((?P<tokens>\d+) tokens freed\)",
          "session"),
    _rule("session-deferred", r"Deferring session close for (?P<session>\S+)", "session"),
    _rule("session-deferred-ready", r"Deferred close ready for session (?P<session>[^\s,]+)", "session"),
    _rule("session-timeout", r"Session (?P<session>\S+) timed out, closing", "session"),
    _rule("zombie", r"Received output for rid=\S+ but the state was deleted", "warning", "K04"),
    _rule("not-flushed", r"Cache not flushed because there are pending requests", "warning"),
    _rule("flushed", r"Cache flushed successfully", "lifecycle"),
    _rule("ready", r"The server is fired up and ready to roll", "lifecycle"),
)  # fmt: skip
