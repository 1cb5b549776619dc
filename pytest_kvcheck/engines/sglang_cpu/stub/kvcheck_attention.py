"""Attention that SGLang's torch_native backend lacks on CPU; applied by sitecustomize after import.

* EAGLE's target verification and multi-step drafting (upstream has them for GPUs and AMX only);
* sliding-window layers read through the map from full to window slots (upstream writes through it only).

Nothing but attention arithmetic: no scheduler, allocator, cache, session or speculative bookkeeping.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def _window(layer):
    size = layer.sliding_window_size
    return size if size is not None and size > -1 else None


def _buffer_rows(backend, layer, slots):
    """KV slots, which count in the full pool, as rows of this layer's buffers."""
    pool = backend.token_to_kv_pool
    if backend.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]:
        return pool.translate_loc_from_full_to_swa(slots.long()).long()
    return slots.long()


def _attend(backend, layer, query, out, slots, mask):
    """query, out: [tokens, query heads, head size]; slots: [keys]; mask: [tokens, keys] or None."""
    rows = _buffer_rows(backend, layer, slots)
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)[rows].to(query.dtype)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)[rows].to(query.dtype)
    result = scaled_dot_product_attention(
        query.movedim(0, 1)[None],
        keys.movedim(0, 1)[None],
        values.movedim(0, 1)[None],
        attn_mask=mask,
        scale=layer.scaling,
        enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
    )
    out.copy_(result[0].movedim(0, 1))


def patch_backend(module):
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend_class = module.TorchNativeAttnBackend
    own_init = backend_class.__init__
    own_extend = backend_class.forward_extend
    own_decode = backend_class.forward_decode

    def init(self, runner):
        own_init(self, runner)
        self.draft_slots = None

    def heads(layer, query):
        out = query.new_empty((query.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        return (
            out,
            query.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
        )

    def write(self, layer, batch, k, v, save):
        if save and k is not None and v is not None:
            where = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **_):
        verify = batch.forward_mode.is_target_verify()
        if not verify and not self.use_sliding_window_kv_pool and batch.extend_prefix_lens is not None:
            return own_extend(self, q, k, v, layer, batch, save_kv_cache)
        write(self, layer, batch, k, v, save_kv_cache)
        out, query_heads, out_heads = heads(layer, q)
        if verify:
            drafted = batch.spec_info.draft_token_num
            new_lens = [drafted] * batch.batch_size
            all_lens = [int(n) + drafted for n in batch.seq_lens.tolist()]
            tree = batch.spec_info.custom_mask if batch.spec_info.tree_topk != 1 else None
            tree = tree.view(-1, drafted, drafted).bool() if tree is not None and tree.numel() else None
        else:
            new_lens, all_lens, tree = batch.extend_seq_lens.tolist(), batch.seq_lens.tolist(), None
        table, window, start = self.req_to_token_pool.req_to_token, _window(layer), 0
        for i, (new, total, row) in enumerate(
            zip(new_lens, all_lens, batch.req_pool_indices.tolist(), strict=True)
        ):
            queries, keys = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
            mask = keys <= queries
            if tree is not None:
                mask = torch.cat([torch.ones(new, total - new, dtype=torch.bool), tree[i]], 1)
            first = 0
            if window is not None:
                mask = mask & (keys >= queries - window)
                first = max(0, total - new - window)  # slots left of every window may be in use elsewhere
            part = slice(start, start + new)
            _attend(self, layer, query_heads[part], out_heads[part], table[row, first:total], mask[:, first:])
            start += new
        return out

    def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True, **_):
        if self.draft_slots is None and not self.use_sliding_window_kv_pool:
            return own_decode(self, q, k, v, layer, batch, save_kv_cache)
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        write(self, layer, batch, k, v, save_kv_cache)
        out, query_heads, out_heads = heads(layer, q)
        slots = self.draft_slots
        if slots is None:
            table = self.req_to_token_pool.req_to_token
            rows = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
            slots = [table[row, :total] for row, total in rows]
        window = _window(layer)
        for i, held in enumerate(slots):
            if window is not None:
                held = held[max(0, held.numel() - 1 - window) :]
            _attend(self, layer, query_heads[i : i + 1], out_heads[i : i + 1], held, None)
        return out

    class TorchNativeMultiStepDraftBackend:
        """One backend a draft step; step s sees the history and the s + 1 tokens drafted on its branch."""

        def __init__(self, runner, topk, num_steps):
            self.topk, self.speculative_num_steps, self.device = topk, num_steps, runner.device
            self.attn_backends = [backend_class(runner) for _ in range(num_steps - 1)]

        def init_forward_metadata(self, batch):
            table = self.attn_backends[0].req_to_token_pool.req_to_token
            requests = list(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True))
            for step, backend in enumerate(self.attn_backends):
                backend.draft_slots = [
                    torch.cat([table[row, :total], table[row, branch : branch + step + 1]])
                    for row, total in requests
                    for branch in (total + b * self.speculative_num_steps for b in range(self.topk))
                ]
                backend.swa_out_cache_loc = None

    backend_class.__init__ = init
    backend_class.forward_extend = forward_extend
    backend_class.forward_decode = forward_decode
    module.TorchNativeMultiStepDraftBackend = TorchNativeMultiStepDraftBackend


def patch_draft_utils(module):
    factory = module.DraftBackendFactory
    own_create = factory._create_backend

    def create(self, name, backend_map, error, stamps_children=False):
        from sglang.srt.layers.attention import torch_native_backend as native

        def make():
            if stamps_children:
                backend = native.TorchNativeMultiStepDraftBackend(
                    self.draft_model_runner, self.topk, self.speculative_num_steps
                )
            else:
                backend = native.TorchNativeAttnBackend(self.draft_model_runner)
            return "torch_native", backend

        return own_create(self, name, {**backend_map, "torch_native": make}, error, stamps_children)

    factory._create_backend = create


PATCHES = {
    "sglang.srt.layers.attention.torch_native_backend": patch_backend,
    "sglang.srt.speculative.draft_utils": patch_draft_utils,
}
