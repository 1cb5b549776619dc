"""Leases of ports and GPUs: exclusive among processes, given back by close and by death."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvcheck.launch import gpus
from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.launch.gpus import GpuLease, GpuState, candidates, lease_gpus
from pytest_kvcheck.launch.ports import lease_ports

HOLDER = """
import sys, time
from pytest_kvcheck.launch.ports import lease_ports
lease = lease_ports(4, 21000, 21004)
print(lease.base, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of other test runs on this machine must not decide these tests."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_block_is_leased_once_and_can_be_leased_again_after_close() -> None:
    first = lease_ports(4, 21000, 21008)
    second = lease_ports(4, 21000, 21008)
    assert {first.base, second.base} == {21000, 21004}
    with pytest.raises(LaunchError, match=r"expected 4 free ports in a row in 21000..21007"):
        lease_ports(4, 21000, 21008)
    first.close()
    first.close()
    again = lease_ports(4, 21000, 21008)
    assert again.base == first.base
    again.close()
    second.close()


def test_a_block_with_one_port_in_use_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 21018)):
        lease = lease_ports(4, 21016, 21024)
        assert lease.base == 21020
        lease.close()


def test_the_default_range_lies_below_the_ephemeral_ports() -> None:
    lease = lease_ports()
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert lease.base + lease.size <= low
    lease.close()


def test_the_lease_of_a_killed_process_is_free_again() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == b"21000\n"
        with pytest.raises(LaunchError):
            lease_ports(4, 21000, 21004)
        holder.kill()
        holder.wait(60)
    lease_ports(4, 21000, 21004).close()


def test_many_processes_never_share_a_block() -> None:
    code = (
        "from pytest_kvcheck.launch.ports import lease_ports; import sys\n"
        "lease = lease_ports(4, 21000, 21064); print(lease.base, flush=True); sys.stdin.read()"
    )
    holders = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(6)
    ]
    bases = []
    for holder in holders:
        assert holder.stdout is not None
        bases.append(holder.stdout.readline())
    assert len(set(bases)) == len(holders)
    for holder in holders:
        holder.communicate(timeout=60)


# --- GPUs, with an NVML of our own -------------------------------------------------------------------


class FakeNvml:
    count = 3

    def __init__(self) -> None:
        self.states = {index: GpuState(1 << 30, {}) for index in range(self.count)}

    def state(self, index: int) -> GpuState:
        return self.states[index]

    def uuid(self, index: int) -> str:
        return f"GPU-{index}abc"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(gpus, "nvml", lambda: fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_auto_takes_the_emptiest_and_a_second_worker_the_next(nvml: FakeNvml) -> None:
    nvml.states[0] = GpuState(9 << 30, {})
    first, second = lease_gpus(1), lease_gpus(1)
    assert (first.indices, second.indices) == ((1,), (2,))
    assert first.env == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with pytest.raises(LaunchError, match="expected 2 free GPUs"):
        lease_gpus(2, timeout=0.1)
    first.close()
    second.close()
    lease_gpus(3).close()


def test_a_list_and_what_an_outer_scheduler_left_visible(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert candidates("2, 0", nvml) == [2, 0]  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2a,1")
    assert candidates("auto", nvml) == [1, 2]  # type: ignore[arg-type]
    assert candidates("0,1", None) == [0, 1]


@pytest.mark.parametrize(
    ("choice", "count", "message"),
    [
        ("some", 1, "--kvcheck-gpus: expected auto or numbers as in 0,1, found 'some'"),
        ("0,7", 1, "--kvcheck-gpus: expected numbers below 3"),
        ("0", 2, r"the cell needs 2 GPUs \(tp\), found 1"),
    ],
)
def test_a_choice_that_cannot_be_met(choice: str, count: int, message: str, nvml: FakeNvml) -> None:
    with pytest.raises(LaunchError, match=message):
        lease_gpus(count, choice)


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "nvml", lambda: None)
    with pytest.raises(LaunchError, match="--kvcheck-device cuda: expected a GPU, found none"):
        lease_gpus(1)


def leased(nvml: FakeNvml) -> GpuLease:
    return lease_gpus(1, "0")


def test_cells_that_say_how_much_memory_they_take_share_a_gpu(nvml: FakeNvml) -> None:
    leases = [lease_gpus(1, "0", share=0.12) for _ in range(8)]
    assert {lease.indices for lease in leases} == {(0,)}
    for share in (0.01, 0.5, None):
        with pytest.raises(LaunchError, match="expected 1 free GPUs"):
            lease_gpus(1, "0", timeout=0.1, share=share)
    leases.pop().close()
    lease_gpus(1, "0", share=0.1).close()
    for lease in leases:
        lease.close()
    lease_gpus(1, "0", share=0.5).close()


def test_on_a_shared_gpu_only_processes_that_are_surely_the_engines_count(nvml: FakeNvml) -> None:
    lease = lease_gpus(1, "0", share=0.1)
    nvml.states[0] = GpuState(9 << 30, {8: 6 << 30})
    lease.note_processes(frozenset({1, 2}))
    assert lease.memory_left(60) is None
    lease.note_processes(frozenset({8}))
    assert lease.memory_left(0.1) == 6 << 30
    nvml.states[0] = GpuState(5 << 30, {})  # no processes shown at all: the sum may be others'
    other = lease_gpus(1, "0", share=0.1)
    assert other.memory_left(60) is None
    lease.close()
    other.close()


def test_memory_that_the_engines_process_still_holds_is_left(nvml: FakeNvml) -> None:
    nvml.states[0] = GpuState(3 << 30, {7: 2 << 30})
    lease = leased(nvml)
    nvml.states[0] = GpuState(9 << 30, {7: 2 << 30, 8: 6 << 30})
    lease.note_processes(frozenset({1, 2}))  # other pids than NVML's: a container
    assert lease.memory_left(0.1) == 6 << 30
    # Another user's process grew meanwhile: not ours.
    nvml.states[0] = GpuState(8 << 30, {7: 7 << 30})
    assert lease.memory_left(60) == 0
    lease.close()


def test_a_foreign_process_that_came_after_the_lease_is_not_the_engines(nvml: FakeNvml) -> None:
    lease = leased(nvml)
    nvml.states[0] = GpuState(9 << 30, {8: 6 << 30, 9: 2 << 30})
    lease.note_processes(frozenset({8}))
    nvml.states[0] = GpuState(4 << 30, {9: 2 << 30, 10: 1 << 30})
    lease.note_processes(frozenset({8}))
    assert lease.memory_left(60) == 0
    lease.close()


def test_where_nvml_shows_no_processes_the_sum_on_the_gpu_decides(nvml: FakeNvml) -> None:
    lease = leased(nvml)
    lease.note_processes(frozenset())
    nvml.states[0] = GpuState(5 << 30, {})
    assert lease.memory_left(0.1) == 4 << 30
    nvml.states[0] = GpuState((1 << 30) + (10 << 20), {})  # a driver's bookkeeping
    assert lease.memory_left(60) == 0
    nvml.states[0] = GpuState(5 << 30, {99: 4 << 30})  # somebody else came
    assert lease.memory_left(60) is None
    lease.close()


def test_gpu_memory_that_is_given_back_late_is_waited_for(nvml: FakeNvml) -> None:
    lease = leased(nvml)
    readings = iter([GpuState(5 << 30, {})] * 3)
    nvml.state = lambda index: next(readings, GpuState(1 << 30, {}))  # type: ignore[method-assign]
    assert lease.memory_left(60) == 0
    lease.close()


def test_without_nvml_a_given_gpu_is_leased_and_no_memory_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "nvml", lambda: None)
    lease = lease_gpus(1, "0")
    lease.note_processes(frozenset())
    assert lease.memory_left(60) is None
    lease.close()
