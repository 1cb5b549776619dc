"""The stand-in's kernels, called as SGLang calls them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pytest_kvcheck

torch = pytest.importorskip("torch")
STUB = Path(pytest_kvcheck.__file__).parent / "engines" / "sglang_cpu" / "stub"


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvcheck_test_kernels", STUB / "sgl_kernel" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slots_go_to_a_row_and_come_back(kernels: ModuleType) -> None:
    table = torch.zeros(3, 10, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 4])
    kernels.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([71, 72, 73]), 10)
    assert table[2].tolist() == [0, 71, 72, 73, 0, 0, 0, 0, 0, 0]
    assert not table[0].any()
    back = torch.zeros(3, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, table, starts, ends, back, 10)
    assert back.tolist() == [71, 72, 73]


def test_tokens_are_rotated_within_each_request(kernels: ModuleType) -> None:
    ids = torch.tensor([1, 2, 3, 11, 12])
    kernels.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[9], [19]]))
    assert ids.tolist() == [2, 3, 9, 12, 19]


def test_slots_are_copied_even_where_source_and_target_overlap(kernels: ModuleType) -> None:
    buffer = torch.arange(12.0).view(4, 3).clone()
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr()]), torch.tensor([12]), torch.tensor([1, 2]), torch.tensor([0, 1])
    )
    assert buffer[:, 0].tolist() == [0.0, 0.0, 3.0, 9.0]


def _chain(kernels: ModuleType, drafted: list[int], target: list[int]) -> tuple[list[int], list[int]]:
    """Drafts one chain behind a root and verifies it; what was accepted, and what is predicted."""
    size = len(drafted)
    index, child, sibling = (torch.full((1, size), -1) for _ in range(3))
    mask, positions = torch.ones(size * size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)
    parents = torch.tensor([[-1, *range(size - 2)]])
    kernels.build_tree_kernel_efficient_cpu(
        parents,
        torch.tensor([list(range(size - 1))]),
        torch.tensor([7]),
        mask,
        positions,
        index,
        child,
        sibling,
        1,
        size - 1,
        size,
        1,
    )
    assert positions.tolist() == list(range(7, 7 + size))
    assert torch.equal(mask.view(size, size), torch.ones(size, size, dtype=torch.bool).tril())
    accepted = torch.full((1, size), -1)
    count, predicts = torch.zeros(1, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor([drafted]),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor(target),
    )
    assert int(count) == sum(i >= 0 for i in accepted[0].tolist()) - 1
    return [i for i in accepted[0].tolist() if i >= 0], predicts.tolist()


@pytest.mark.parametrize(
    ("target", "accepted"),
    [([5, 6, 7, 8], [0, 1, 2, 3]), ([5, 6, 9, 8], [0, 1, 2]), ([9, 6, 7, 8], [0])],
)
def test_a_chain_is_accepted_up_to_the_first_disagreement(
    kernels: ModuleType, target: list[int], accepted: list[int]
) -> None:
    found, predicted = _chain(kernels, [4, 5, 6, 7], target)
    assert found == accepted
    assert [predicted[i] for i in found] == target[: len(accepted)]


def test_of_two_siblings_the_one_that_the_target_chose_is_taken(kernels: ModuleType) -> None:
    index, child, sibling = torch.tensor([[0, 1, 2]]), torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]])
    accepted, count = torch.full((1, 2), -1), torch.zeros(1, dtype=torch.int64)
    predicts = torch.zeros(3, dtype=torch.int64)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor([[3, 40, 50]]),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor([50, 1, 60]),
    )
    assert accepted.tolist() == [[0, 2]]
    assert predicts.tolist() == [50, 0, 60]


def test_the_stand_in_is_never_imported_by_the_plugin() -> None:
    assert "sgl_kernel" not in sys.modules
