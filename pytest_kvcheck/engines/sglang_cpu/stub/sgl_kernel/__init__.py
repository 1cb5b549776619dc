"""Torch stand-in for the CPU helper kernels that SGLang 0.5.23 imports from ``sgl_kernel``.

With ``SGLANG_USE_CPU_ENGINE=1`` nine of them are imported whatever the model. The published CPU build of that
library needs AVX512 and is on no package index. Here stand index copies and the greedy verification of a
draft tree, written from what each is documented to do; nothing of scheduling or accounting.
"""

import ctypes

import torch

__version__ = "0.0.0+kvcheck.torch"


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, _pool_len):
    """Writes consecutive slots to positions [start, end) of each request's row."""
    taken = 0
    for row, start, end in _lists(rows, starts, ends):
        if end > start:
            table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
            taken += end - start


def assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, _pool_len):
    """The other direction: collects positions [start, end) of each row."""
    taken = 0
    for row, start, end in _lists(rows, starts, ends):
        if end > start:
            slots[taken : taken + end - start] = table[row, start:end].to(slots.dtype)
            taken += end - start


def assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, slots, _pool_len, topk, steps):
    drafted = topk * steps
    for i, (row, length) in enumerate(_lists(rows, lengths)):
        slots[i * drafted : (i + 1) * drafted] = table[row, length : length + drafted].to(slots.dtype)


def fill_bonus_tokens_cpu(accepted, accept_lens, bonus, stride):
    """The last accepted token of each request, its bonus token."""
    count = accept_lens.numel()
    last = torch.arange(count) * stride + accept_lens.long().view(-1) - 1
    bonus.view(-1)[:count] = accepted.reshape(-1)[last].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, slots, accepted_slots):
    index = accept_index.reshape(-1)
    index = index[index > -1].long()
    accepted_slots[: index.numel()] = slots[index].to(accepted_slots.dtype)


def rotate_input_ids_cpu(input_ids, starts, lengths, topk_index, select_index=None):
    """Shifts each request's tokens left by one and puts its newly drafted token where the last one stood."""
    drafted = topk_index.reshape(-1).tolist()
    places = None if select_index is None else select_index.reshape(-1).tolist()
    for i, (start, length) in enumerate(_lists(starts, lengths)):
        if length > 0:
            last = start + length - 1
            input_ids[start:last] = input_ids[start + 1 : last + 1].clone()
            input_ids[last if places is None else places[i]] = drafted[i]


def copy_all_layer_kv_cache_cpu(buffers, strides, targets, sources):
    """Copies whole slots within each layer's buffer, given as addresses and bytes a slot."""
    targets, sources = targets.tolist(), sources.tolist()
    for base, stride in _lists(buffers, strides):
        held = [ctypes.string_at(base + source * stride, stride) for source in sources]  # may overlap
        for target, content in zip(targets, held, strict=True):
            ctypes.memmove(base + target * stride, content, stride)


def build_tree_kernel_efficient_cpu(
    parents,
    selected,
    lengths,
    tree_mask,
    positions,
    retrieve_index,
    next_token,
    next_sibling,
    topk,
    depth,
    drafted,
    mask_mode,
):
    """Links the selected draft tokens into a tree (first child, next sibling) and marks each one's ancestors.

    Node 0 is the root, the last verified token; node i + 1 is ``selected[i]``, an index into all tokens that
    were drafted; ``parents`` names the drafted token each branch came from. ``mask_mode`` 0 masks history and
    tree, 1 the tree alone.
    """
    mode = int(mask_mode)
    if mode not in (0, 1):
        raise NotImplementedError(f"expected tree mask mode 0 or 1, found {mode}")
    mask, index = tree_mask.view(-1), retrieve_index.view(-1)
    child, sibling, position = next_token.view(-1), next_sibling.view(-1), positions.view(-1)
    history = 0
    for b, (chosen, branch, length) in enumerate(_lists(selected, parents, lengths)):
        above = [_parent_node(node, chosen, branch, topk, drafted) for node in range(1, drafted)]
        first, beside = [-1] * drafted, [-1] * drafted
        for node in range(drafted - 1, 0, -1):
            index[b * drafted + node] = b * drafted + node
            parent = above[node - 1]
            if parent is not None:
                beside[node], first[parent] = first[parent], node
        index[b * drafted] = b * drafted
        for node in range(drafted):
            if first[node] != -1:
                child[b * drafted + node] = first[node]
            if beside[node] != -1:
                sibling[b * drafted + node] = beside[node]

            row = drafted * drafted * b + drafted * node
            if mode == 0:
                row = drafted * drafted * b + history * drafted + (length + drafted) * node + length
            mask[row] = True
            mask[row + 1 : row + drafted] = False
            steps, at = 0, node
            while at and steps < depth:
                mask[row + at] = True
                steps += 1
                at = above[at - 1] or 0
            position[b * drafted + node] = length + steps
        history += length


def _parent_node(node, chosen, branch, topk, drafted):
    """The node above this one; None where the token it came from was not selected."""
    group = chosen[node - 1] // topk
    if group == 0:
        return 0
    token = branch[group]
    return chosen.index(token) + 1 if token in chosen[: drafted - 1] else None


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walks each tree along the target's own choices; what it agrees with is accepted, then one token more.

    Called by keyword, so the names are SGLang's.
    """
    longest = accept_index.shape[1]
    target = target_predict.reshape(-1).tolist()
    trees = _lists(candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for b, (token, index, child, sibling) in enumerate(trees):
        node, last, accepted = 0, index[0], 0
        accept_index[b, 0] = last
        while accepted + 1 < longest:
            node = child[node]
            while node != -1 and token[node] != target[last]:
                node = sibling[node]
            if node == -1:
                break
            predicts[last] = target[last]
            accepted += 1
            last = index[node]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = target[last]


def _lists(*tensors):
    return zip(*(tensor.tolist() for tensor in tensors), strict=False)  # some callers pad
