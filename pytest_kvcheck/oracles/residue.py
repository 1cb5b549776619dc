"""What a server leaves behind: processes, its port, GPU memory; and descriptors that grow with requests."""

from __future__ import annotations

from pytest_kvcheck.findings import Finding
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import overlapping, requests

NAME = "residue"
# The driver's own bookkeeping for a process that is going may stay for a moment.
GPU_SLACK = 64 << 20
# Log files, event loops and lazily opened devices; connections that are kept alive come on top.
FD_SLACK = 24


def judge_residue(facts: CaseFacts) -> list[Finding]:
    """One finding for each thing left. A server that was attached to is never stopped, so leaves nothing."""
    server = facts.server
    found = []
    if server.stopped and not server.attached:
        if server.leftover_processes:
            found.append(
                _residue(
                    f"{len(server.leftover_processes)} processes outlived the server (expected none)",
                    (f"They were ended now: {'; '.join(server.leftover_processes[:5])}.",),
                    "look at which child does not hear the end of its parent",
                )
            )
        if server.port_still_open:
            found.append(
                _residue(
                    "the server's port is still being listened on after it was stopped",
                    (),
                    "look for a child that inherited the listening socket",
                )
            )
        left = server.gpu_memory_left
        if left is not None and left > GPU_SLACK:
            found.append(
                _residue(
                    f"{left >> 20} MiB of GPU memory are still charged after the server ended (expected 0)",
                    (),
                    "look for a process that still holds the device",
                )
            )
    return [*found, *_descriptors(facts)]


def _descriptors(facts: CaseFacts) -> list[Finding]:
    before, after = facts.server.fds_before, facts.server.fds_after
    asked = requests(facts.records)
    if before is None or after is None or not asked:
        return []
    workload = requests(facts.of_phase("workload", "probe"))
    # Each connection that the client keeps open is one descriptor of the server, or two with a worker between.
    kept = 2 * max((len(overlapping(record, workload)) + 1 for record in workload), default=0)
    grown = after - before
    if grown <= FD_SLACK + kept or grown < len(asked) / 4:
        return []
    return [
        _residue(
            f"the server holds {grown} descriptors more after {len(asked)} requests ({before} before, {after} "
            f"after; expected at most {FD_SLACK + kept} more)",
            (),
            "list the descriptors of the process: sockets of ended requests, or files",
        )
    ]


def _residue(headline: str, evidence: tuple[str, ...], next_step: str) -> Finding:
    return Finding(
        kind="K22", oracle=NAME, status="residue", headline=headline, evidence=evidence, next_step=next_step
    )
