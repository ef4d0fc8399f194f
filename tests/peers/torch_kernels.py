"""A pytest plugin that replaces kernels that PyTorch calls on GPUs with jattn.

`JATTN_PEER` names the function that does so. The test files import packages that need a GPU and are
not installed: stand-in modules provide the functions that the tests call. Tensors that tests put on
"cuda" stay on the CPU, where the references run.
"""

from __future__ import annotations

import enum
import itertools
import math
import os
import pathlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.overrides import TorchFunctionMode

import jattn

SOURCES = pathlib.Path(os.environ.get("JATTN_PEER_SOURCES", "."))
LOG2 = math.log(2.0)
merge = jax.jit(jattn.merge_attention_states)
FP8 = {torch.float8_e4m3fn: jattn.Fp8("e4m3"), torch.float8_e5m2: jattn.Fp8("e5m2")}


class OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU that tests ask for on "cuda" or on device 0."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to and len(args) > 1:
            place = args[1]
            on_gpu = (isinstance(place, int) and not isinstance(place, bool)) or str(
                place
            ).startswith("cuda")
            args = (args[0], "cpu", *args[2:]) if on_gpu else args
        return function(*args, **kwargs)


def to_jax(x: torch.Tensor) -> jax.Array:
    return jnp.from_dlpack(x.detach().contiguous())


def to_torch(x: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(x)


def to_cache(x: torch.Tensor, descale: torch.Tensor | None, layout: str = "NHD") -> Any:
    """Convert a torch cache [N, S, K, D] to jattn's, with its scale.

    The tests have a scale per sequence and head, which is the same in every sequence.
    """
    if x.dtype not in FP8:
        assert descale is None
        return to_jax(x)
    scale = jnp.ones((), jnp.float32)
    if descale is not None:
        rows = descale.float().reshape(-1, descale.shape[-1] if descale.ndim else 1)
        assert (rows == rows[0]).all()
        scale = to_jax(rows[0])
        scale = scale.reshape(()) if scale.shape == (1,) else scale
    return jattn.KVArray(to_jax(x.view(torch.uint8)), scale, FP8[x.dtype], kv_layout=layout)


def module(name: str, **names: Any) -> types.ModuleType:
    """Install a stand-in for a module that is not installed, and for the packages around it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            sys.modules[path] = types.ModuleType(path)
            sys.modules[path].__path__ = []
        if i > 1:
            setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[path])
    vars(sys.modules[name]).update(names)
    return sys.modules[name]


# vLLM


def _vllm() -> None:
    class Platform:
        device_type = "cpu"
        fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)
        is_cuda_alike = staticmethod(lambda: True)
        get_device_name = staticmethod(lambda: "CPU")
        seed_everything = staticmethod(torch.manual_seed)

    module("vllm.platforms", current_platform=Platform)
    # Decorated Triton kernels stay plain functions, which are never called.
    language = types.SimpleNamespace(constexpr=None)
    module("vllm.triton_utils", tl=language, triton=types.SimpleNamespace(jit=lambda f: f))
    module("vllm.utils.math_utils", next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    module("vllm.utils.torch_utils", set_random_seed=torch.manual_seed)


class KVQuantMode(enum.Enum):
    NONE = 0
    FP8_PER_TENSOR = 1


TUNING = {"seq_threshold_3D", "num_par_softmax_segments", "use_td", "max_seqlen_k"}


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, softmax_scale, causal, window_size,
    block_table, softcap, q_descale, k_descale, v_descale, output_scale=None, kv_quant_mode=None,
    **others,
):  # fmt: skip
    """Run vLLM's `unified_attention` by `jattn.paged_attention`, widening 8-bit queries first."""
    unknown = {
        name
        for name, x in others.items()
        if x is not None and name not in TUNING and not name.startswith("softmax_segm")
    }
    assert not unknown, unknown
    if q.dtype in FP8:
        q = (q.float() * (1 if q_descale is None else q_descale)).to(torch.bfloat16)
    left, right = window_size
    assert right <= 0
    result = jattn.paged_attention(
        to_jax(q),
        to_cache(k, k_descale),
        to_cache(v, v_descale),
        block_tables=to_jax(block_table),
        seq_lens=to_jax(seqused_k),
        query_start_loc=to_jax(cu_seqlens_q),
        max_query_len=max_seqlen_q,
        scale=softmax_scale,
        is_causal=causal,
        sliding_window=None if left < 0 else left + 1,
        logits_soft_cap=softcap or None,
        kv_layout="NHD",
    )
    result = to_torch(result)
    if output_scale is not None:
        result = (result.float() / output_scale).clamp(-448, 448)
    out.copy_(result)


def vllm_unified_attention() -> None:
    _vllm()
    ops = "vllm.v1.attention.ops"
    module(f"{ops}.triton_unified_attention", unified_attention=unified_attention)
    module(f"{ops}.triton_attention_helpers", apply_softcap=None, compute_tile_loop_bounds=None)
    module("vllm.v1.kv_cache_interface", KVQuantMode=KVQuantMode)


def merge_by_jattn(
    output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None,
    prefill_tokens_with_context=None, output_scale=None,
):  # fmt: skip
    """Run vLLM's `merge_attn_states`: states [T, H, V] with lse [H, T]; inf also means no keys.

    Only the first `prefill_tokens_with_context` tokens have a prefix; the others are copied.
    """
    count = output.shape[0] if prefill_tokens_with_context is None else prefill_tokens_with_context
    lses = [lse.masked_fill(lse == math.inf, -math.inf) for lse in (prefix_lse, suffix_lse)]
    states = zip((prefix_output, suffix_output), lses, strict=True)
    merged, lse = merge(
        *(to_jax(x) for out, lse in states for x in (out[:count], lse[:, :count].T))
    )
    merged = torch.cat([to_torch(merged), suffix_output[count:]])
    output.copy_(merged if output_scale is None else scaled_fp8_quant(merged, output_scale)[0])
    if output_lse is not None:
        output_lse.copy_(torch.cat([to_torch(lse).T, lses[1][:, count:]], dim=1))


def scaled_fp8_quant(x: torch.Tensor, scale: torch.Tensor):
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def vllm_merge_attn_states() -> None:
    """Replace vLLM's two kernels, which the tests compare with each other.

    One becomes jattn, the other the formula in PyTorch that the file has.
    """

    def stand_in(output, *given):
        (test,) = (x for name, x in sys.modules.items() if name == "test_merge_attn_states")
        prefix, prefix_lse, suffix, suffix_lse, output_lse, with_context, scale = given
        count = output.shape[0] if with_context is None else with_context
        merged, _lse = test.merge_attn_states_torch(
            output,
            prefix,
            prefix_lse.clone(),
            suffix,
            suffix_lse.clone(),
            None,
            with_context,
            scale,
        )
        output.copy_(merged)
        before, after = (x.masked_fill(x == math.inf, -math.inf) for x in (prefix_lse, suffix_lse))
        output_lse.copy_(after)
        output_lse[:, :count] = torch.logaddexp(before, after)[:, :count]

    _vllm()
    module("vllm._custom_ops", merge_attn_states=merge_by_jattn, scaled_fp8_quant=scaled_fp8_quant)
    ops = "vllm.v1.attention.ops"
    module(f"{ops}.triton_merge_attn_states", merge_attn_states=stand_in)
    torch.accelerator.synchronize = lambda: None
    torch.Event = lambda **options: types.SimpleNamespace(
        record=lambda: None, elapsed_time=lambda end: 1.0
    )


def cascade_by_jattn(
    output, query, key_cache, value_cache, cu_query_lens, max_query_len, suffix_kv_lens,
    softmax_scale, logits_soft_cap, block_table, common_prefix_len, **others,
):  # fmt: skip
    result = jattn.cascade_attention(
        to_jax(query),
        to_jax(key_cache),
        to_jax(value_cache),
        num_shared_blocks=common_prefix_len // key_cache.shape[1],
        block_tables=to_jax(block_table),
        seq_lens=to_jax(suffix_kv_lens + common_prefix_len),
        query_start_loc=to_jax(cu_query_lens),
        max_query_len=max_query_len,
        scale=softmax_scale,
        logits_soft_cap=logits_soft_cap or None,
        kv_layout="NHD",
    )
    output.copy_(to_torch(result))


def dense_attention(
    q, k, v, cu_seqlens_q, seqused_k, softmax_scale, block_table, softcap, **others
):
    """Compute causal attention in PyTorch, float32: the file's own reference is a GPU kernel."""
    outs = []
    starts = cu_seqlens_q.tolist()
    block_size, kv_heads = k.shape[1:3]
    for b, (start, end) in enumerate(itertools.pairwise(starts)):
        n = int(seqused_k[b])
        used = block_table[b, : -(-n // block_size)]
        keys, values = (x[used].flatten(0, 1)[:n].float() for x in (k, v))
        queries = q[start:end].float().unflatten(1, (kv_heads, -1))
        logits = softmax_scale * torch.einsum("qhgd,khd->hgqk", queries, keys)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        seen = torch.ones(end - start, n, dtype=torch.bool).tril(n - (end - start))
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
        out = torch.einsum("hgqk,khd->qhgd", weights, values)
        outs.append(out.flatten(1, 2).to(q.dtype))
    return torch.cat(outs)


def vllm_cascade() -> None:
    _vllm()
    module(
        "vllm.v1.attention.backends.flash_attn",
        cascade_attention=cascade_by_jattn,
        merge_attn_states=merge_by_jattn,
    )
    module(
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=dense_attention,
        is_fa_version_supported=lambda version: version == 2,
        fa_version_unsupported_reason=lambda version: "the same call of jattn",
    )


# FlashAttention


def combine_by_jattn(out_partial, lse_partial, out=None, out_dtype=None):
    """Run FlashAttention's combine of splits [splits, ..., V] as a sequence of merges."""
    lse = jnp.full(lse_partial.shape[1:], -jnp.inf, jnp.float32)
    out = jnp.zeros(out_partial.shape[1:], jnp.float32)
    for i in range(out_partial.shape[0]):
        out, lse = merge(out, lse, to_jax(out_partial[i]), to_jax(lse_partial[i]))
    return to_torch(out).to(out_dtype), to_torch(lse)


def kvcache_by_jattn(
    q, k_cache, v_cache, k=None, v=None, qv=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    return_softmax_lse=False, **others,
):  # fmt: skip
    """Run FlashAttention's decode over caches [B, S, K, D], a block per sequence, or over pages."""
    assert qv is None
    assert cache_leftpad is None
    assert window_size == (-1, -1)
    batch = cache_seqlens.shape[0]
    if page_table is None:
        page_table = torch.arange(k_cache.shape[0], dtype=torch.int32)[:, None]
    if cache_batch_idx is not None:
        page_table = page_table[cache_batch_idx]
    page_table = page_table[:batch]
    block_size = k_cache.shape[1]
    query = q if cu_seqlens_q is not None else q.flatten(0, 1)
    query = query.to(torch.bfloat16) if q.dtype in FP8 else query
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32) * q.shape[1]
    caches = [to_cache(x, None) for x in (k_cache, v_cache)]
    seq_lens = cache_seqlens
    if k is not None:
        if cu_seqlens_k_new is None:
            cu_seqlens_k_new = torch.arange(batch + 1, dtype=torch.int32) * k.shape[1]
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        added = cu_seqlens_k_new.diff()
        of = torch.repeat_interleave(torch.arange(batch), added)
        position = torch.arange(k.shape[0]) - cu_seqlens_k_new[of] + cache_seqlens[of]
        slots = page_table[of, position // block_size] * block_size + position % block_size
        if k.dtype in FP8:
            k, v = k.float(), v.float()
        caches = jattn.update_kv_cache(
            *caches, to_jax(k), to_jax(v), to_jax(slots.int()), kv_layout="NHD"
        )
        for theirs, ours in zip((k_cache, v_cache), caches, strict=True):
            if theirs.dtype in FP8:
                theirs.view(torch.uint8).copy_(to_torch(ours.data))
            else:
                theirs.copy_(to_torch(ours))
        seq_lens = cache_seqlens + added
    out, lse = jattn.paged_attention(
        to_jax(query),
        *caches,
        block_tables=to_jax(page_table),
        seq_lens=to_jax(seq_lens.int()),
        query_start_loc=to_jax(cu_seqlens_q.int()),
        is_causal=causal,
        attention_chunk_size=attention_chunk or None,
        kv_layout="NHD",
        return_lse=True,
    )
    out = to_torch(out)
    return (out if q.ndim == 3 else out.unflatten(0, q.shape[:2])), to_torch(lse)


def _flash_attention() -> None:
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    sys.path.insert(0, str(SOURCES / "hopper"))  # its helpers, `padding` and `test_util`
    module(
        "flash_attn_interface",
        flash_attn_func=None,
        flash_attn_varlen_func=None,
        flash_attn_combine=combine_by_jattn,
        flash_attn_with_kvcache=kvcache_by_jattn,
        get_scheduler_metadata=lambda *sizes, **others: None,
    )


flash_attention_combine = flash_attention_kvcache = _flash_attention


# FlashInfer


def merge_state(v_a, s_a, v_b, s_b):
    """Run FlashInfer's `merge_state`, whose lse is in base 2."""
    v, s = merge(to_jax(v_a), to_jax(s_a * LOG2), to_jax(v_b), to_jax(s_b * LOG2))
    return to_torch(v), to_torch(s) / LOG2


def merge_states(v, s):
    merged, lse = v[:, 0].float(), s[:, 0]
    for i in range(1, v.shape[1]):
        merged, lse = merge_state(merged, lse, v[:, i].float(), s[:, i])
    return merged.to(v.dtype), lse


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    assert mask is None
    merged, lse = merge_state(v, s, v_other, s_other)
    v.copy_(merged)
    s.copy_(lse)


def get_batch_indices_positions(append_indptr, seq_lens, nnz):
    added = append_indptr.diff()
    of = torch.repeat_interleave(torch.arange(len(added)), added)
    positions = torch.arange(nnz) - append_indptr[of] + (seq_lens - added)[of]
    return of.int(), positions.int()


def append_paged_kv_cache(
    key, value, batch_indices, positions, caches, indices, indptr, last_page_len, kv_layout="NHD"
):
    assert kv_layout == "NHD"
    size = caches[0].shape[1]
    blocks = indices[indptr[batch_indices] + positions // size]
    slots = (blocks * size + positions % size).int()
    written = jattn.update_kv_cache(*map(to_jax, (*caches, key, value, slots)), kv_layout="NHD")
    for theirs, ours in zip(caches, written, strict=True):
        theirs.copy_(to_torch(ours))


def tables_and_lengths(indptr, indices, last_page_len, block_size):
    """Turn concatenated rows of pages into a rectangle of block ids."""
    counts = indptr.diff()
    tables = torch.zeros(len(counts), max(int(counts.max()), 1), dtype=torch.int32)
    for b, count in enumerate(counts.tolist()):
        tables[b, :count] = indices[indptr[b] : indptr[b] + count]
    return tables, ((counts - 1) * block_size + last_page_len).int()


class Decode:
    """FlashInfer's `BatchDecodeWithPagedKVCacheWrapper`."""

    def __init__(self, workspace, kv_layout):
        assert kv_layout == "NHD"

    def plan(self, indptr, indices, last_page_len, heads, kv_heads, dim, block_size, **dtypes):
        self.tables = tables_and_lengths(indptr, indices, last_page_len, block_size)
        self.starts = None

    def run(self, q, caches):
        tables, lens = map(to_jax, self.tables)
        out = jattn.paged_attention(
            to_jax(q),
            *map(to_jax, caches if isinstance(caches, tuple) else caches.unbind(1)),
            block_tables=tables,
            seq_lens=lens,
            query_start_loc=self.starts,
            is_causal=False,
            kv_layout="NHD",
        )
        return to_torch(out)


class Cascade(Decode):
    """FlashInfer's `MultiLevelCascadeAttentionWrapper` with one level."""

    def __init__(self, levels, workspace, kv_layout):
        assert levels == 1
        super().__init__(workspace, kv_layout)

    def plan(self, starts, indptr, indices, last_page_len, *sizes, **dtypes):
        super().plan(indptr[0], indices[0], last_page_len[0], *sizes, **dtypes)
        self.starts = to_jax(starts[0].int())


def flashinfer() -> None:
    module("flashinfer.utils", get_compute_capability=lambda device: (9, 0))
    module("flashinfer.decode", BatchDecodeWithPagedKVCacheWrapper=Decode)
    package = module(
        "flashinfer",
        merge_state=merge_state,
        merge_states=merge_states,
        merge_state_in_place=merge_state_in_place,
        append_paged_kv_cache=append_paged_kv_cache,
        get_batch_indices_positions=get_batch_indices_positions,
        MultiLevelCascadeAttentionWrapper=Cascade,
    )
    package.__path__ = [str(SOURCES / "flashinfer")]  # its references
    trace = module("tests.trace")  # `tests` is ours
    trace.__path__ = [str(SOURCES / "tests" / "trace")]


if "JATTN_PEER" in os.environ:
    globals()[os.environ["JATTN_PEER"]]()
    torch.set_default_device = lambda device: None
    OnCpu().__enter__()
