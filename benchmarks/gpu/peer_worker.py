"""The torch peers' worker: makes a workload's data, runs a peer's kernel, times it.

`benchmarks.gpu.peers` starts it with a Python that has torch; JAX is not needed. Each line in is a
JSON command, each line out a JSON answer; rows of results go through a file. A kernel is called as
its own engine calls it: plans and masks are made once per step, before the clock starts, and its
keys are in the layout that is best for it.

A peer is timed between two events as a CUDA graph of one call on every copy of the keys, so that
they come from memory and not from L2. If the peer cannot be captured, it runs without a graph, and
the answer says so.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
import time
import types
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import data as gpu_data
from benchmarks.gpu import peers as gpu_peers
from benchmarks.worker import serve
from benchmarks.workloads import Workload, from_json

# Elements made at a time; their hashes are 64-bit here.
CHUNK = 2**26
WARM_UP = 3
FLEX_BLOCK = 128
# As vLLM's Triton backend sets them.
VLLM_SEGMENTS = 16
VLLM_LAUNCH = 128
WORKSPACE_BYTES = 128 << 20

# `call(copy)` attends over one copy of the keys and returns [T, H, V].
Call = Callable[[int], torch.Tensor]


# --- Data -----------------------------------------------------------------------------------------


def fill(device: str, stream: int, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Make the array of `gpu_data.make_data`, in bfloat16."""
    words = torch.from_numpy(gpu_data.normal_words(scale).view(np.int16)).to(device)
    numbers = words.view(torch.bfloat16)
    rows, columns = shape[0], int(np.prod(shape[1:]))
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
    across = torch.arange(columns, device=device)[None]
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        down = torch.arange(start, min(start + step, rows), device=device)[:, None]
        out[start : start + step] = numbers[gpu_data.choices(stream, down, across, int)]
    return out.view(shape)


class Problem:
    """One workload's data, as jattn has it: pools [N, K, S, D] and tables [copies, B, M]."""

    def __init__(self, w: Workload, copies: int, device: str):
        self.w, self.device = w, device
        data = gpu_data.arrays_of(w, copies, functools.partial(fill, device))
        self.tables, self.query = data.tables, data.query
        self.key_cache, self.value_cache = data.key_cache, data.value_cache

    def on_device(self, x: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(np.asarray(x)).to(device=self.device, dtype=dtype)

    def token_major(self) -> list[torch.Tensor]:
        """Return the pools as [N, S, K, D], and free the originals."""
        pools = []
        for name in ("key_cache", "value_cache"):
            pools.append(getattr(self, name).transpose(1, 2).contiguous())
            setattr(self, name, None)
        return pools

    def contiguous(self) -> tuple[list[list[torch.Tensor]], np.ndarray]:
        """Return every copy's visible keys and values [B, L, K, D], and their numbers."""
        slots, lengths = gpu_data.visible_slots(self.w, self.tables)
        pools = [pool.flatten(0, 1) for pool in self.token_major()]
        found = []
        for copy in slots:
            index = self.on_device(copy, torch.int64)
            found.append([pool[index] for pool in pools])
        return found, lengths


# --- torch ----------------------------------------------------------------------------------------


def batched(w: Workload, query: torch.Tensor) -> torch.Tensor:
    """Return queries of equally long sequences as [B, H, n, D]."""
    return query.view(w.num_seqs, w.max_query_len, *query.shape[1:]).transpose(1, 2)


def unbatched(out: torch.Tensor) -> torch.Tensor:
    """Return [B, H, n, V] as [T, H, V]."""
    return out.transpose(1, 2).flatten(0, 1)


def sdpa(problem: Problem) -> Call:
    """Make a call of torch's fused attention over contiguous keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    w = problem.w
    query = batched(w, problem.query).contiguous()
    copies, lengths = problem.contiguous()
    pairs = [[x.transpose(1, 2).contiguous() for x in pair] for pair in copies]
    n, length = w.max_query_len, int(lengths[0])
    mask = causal_lower_right(n, length) if 1 < n < length else None
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    if problem.device == "cpu":
        backends.append(SDPBackend.MATH)

    def call(copy: int) -> torch.Tensor:
        with sdpa_kernel(backends):
            return unbatched(
                torch.nn.functional.scaled_dot_product_attention(
                    query,
                    *pairs[copy],
                    attn_mask=mask,
                    is_causal=n == length > 1,
                    scale=w.scale,
                    enable_gqa=w.num_heads != w.num_kv_heads,
                )
            )

    return call


def flex_mask(problem: Problem, ids: np.ndarray, lengths: np.ndarray, count: int) -> Any:
    """Make the `BlockMask` of one copy.

    Args:
      problem: the workload.
      ids: physical blocks of the visible tokens, [B, blocks].
      lengths: how many tokens are visible, [B].
      count: number of physical blocks in the pool.
    """
    from torch.nn.attention.flex_attention import BlockMask

    w, size, n, wide = problem.w, FLEX_BLOCK, problem.w.max_query_len, ids.shape[1]
    kept = problem.on_device(lengths)
    q_block = np.arange(-(-n // size)) * size
    logical = np.full((w.num_seqs, count), -1)
    np.put_along_axis(logical, ids, np.arange(wide)[None], 1)
    logical_of = problem.on_device(logical)

    def visible(b, h, q, slot):
        block = logical_of[b, slot // size]
        position, limit = block * size + slot % size, kept[b] - n + q
        seen = (block >= 0) & (position <= limit)
        return seen if w.sliding_window is None else seen & (position > limit - w.sliding_window)

    # First and last query of a block of queries, [B, Q, 1]; first and last key, [1, 1, blocks].
    first = (lengths[:, None] - n + q_block)[..., None]
    last = np.minimum(first + size, lengths[:, None, None]) - 1
    key = (np.arange(wide) * size)[None, None]
    some, whole = key <= last, key + size - 1 <= first
    if w.sliding_window is not None:
        some &= key + size - 1 > first - w.sliding_window
        whole &= key > last - w.sliding_window
    lists = []
    for chosen in (some & ~whole, some & whole):
        # The selected blocks come first, in order, as flex_attention reads them.
        order = np.argsort(~chosen, axis=-1, kind="stable")
        physical = np.take_along_axis(ids[:, None].repeat(len(q_block), 1), order, -1)
        padded = np.zeros((*physical.shape[:2], count), np.int32)
        padded[..., :wide] = physical
        lists += [
            problem.on_device(chosen.sum(-1)[:, None]),
            problem.on_device(padded[:, None]),
        ]
    return BlockMask.from_kv_blocks(
        *lists,
        BLOCK_SIZE=(size, size),
        mask_mod=visible,
        seq_lengths=(n, count * size),
        compute_q_blocks=False,
    )


def flex(problem: Problem) -> Call:
    """Make a call of torch's flex_attention, compiled, over a pool of blocks of 128 tokens.

    The pool is one long row of keys; a `BlockMask` per sequence names the physical blocks that each
    128 query tokens see, with whole blocks separate from those that need a mask.
    """
    from torch.nn.attention.flex_attention import flex_attention

    w, size = problem.w, FLEX_BLOCK
    copies, lengths = problem.contiguous()
    # The window hides what precedes the first visible token; positions count from there.
    wide = -(-int(lengths.max()) // size)
    count = len(copies) * w.num_seqs * wide
    ids = np.random.default_rng(w.seed).permutation(count).reshape(len(copies), w.num_seqs, wide)
    key_pool, value_pool = (
        torch.zeros((w.num_kv_heads, count * size, d), dtype=torch.bfloat16, device=problem.device)
        for d in (w.head_dim, w.value_dim)
    )
    for c, pair in enumerate(copies):
        places = np.arange(int(lengths.max()))
        slots = problem.on_device(ids[c][:, places // size] * size + places % size, torch.int64)
        for pool, tokens in zip((key_pool, value_pool), pair, strict=True):
            pool[:, slots.flatten()] = tokens.flatten(0, 1).transpose(0, 1)
    del copies
    query = batched(w, problem.query).contiguous()
    masks = [flex_mask(problem, ids_of, lengths, count) for ids_of in ids]
    # Compiled whole or not at all: in parts it would store every logit.
    attend = flex_attention
    if problem.device != "cpu":
        attend = torch.compile(flex_attention, fullgraph=True)

    def call(copy: int) -> torch.Tensor:
        out = attend(
            query,
            key_pool[None],
            value_pool[None],
            block_mask=masks[copy],
            scale=w.scale,
            enable_gqa=w.num_heads != w.num_kv_heads,
        )
        return unbatched(out)

    return call


# --- vLLM -----------------------------------------------------------------------------------------


class KVQuantMode(IntEnum):
    """A stub of vLLM's, of which only the unquantized mode is used."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def load_unified_attention(folder: str | None) -> Callable[..., None]:
    """Load vLLM's `unified_attention`: the installed one, or from two files in `folder`.

    The files import a few names of vLLM; stub modules provide them.
    """
    if folder is None:
        return importlib.import_module(
            "vllm.v1.attention.ops.triton_unified_attention"
        ).unified_attention
    import triton
    import triton.language

    def family(number: int) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] * 10 == number

    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=family
    )
    quiet = types.SimpleNamespace(
        **dict.fromkeys(("debug", "info", "warning", "warning_once"), lambda *a, **k: None)
    )
    names = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: quiet},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {},
    }
    for name, members in names.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for file in gpu_peers.VLLM_FILES:
        name = f"vllm.v1.attention.ops.{file.removesuffix('.py')}"
        spec = importlib.util.spec_from_file_location(name, Path(folder) / file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].unified_attention


def vllm_triton(problem: Problem, folder: str | None) -> Call:
    """Make a call of vLLM's unified Triton kernel, with its backend's split of decode."""
    attend = load_unified_attention(folder)
    w = problem.w
    padded = 1 << (w.head_dim - 1).bit_length()
    most = VLLM_LAUNCH // w.num_kv_heads
    parts = (most, w.num_heads, VLLM_SEGMENTS)
    scratch = [
        torch.empty(shape, dtype=torch.float32, device=problem.device)
        for shape in ((*parts, padded), parts, parts)
    ]
    given = dict(
        q=problem.query,
        out=torch.empty_like(problem.query),
        cu_seqlens_q=problem.on_device(w.query_start()),
        max_seqlen_q=w.max_query_len,
        seqused_k=problem.on_device(w.seq_lens),
        max_seqlen_k=max(w.seq_lens),
        softmax_scale=w.scale,
        causal=True,
        window_size=(-1, -1) if w.sliding_window is None else (w.sliding_window - 1, 0),
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=most,
        # If these are missing, some releases count on the device and wait for it in every call.
        num_prefills=sum(n > 1 for n in w.query_lens),
        num_decodes=sum(n == 1 for n in w.query_lens),
        split_launch=False,  # it would need decoding sequences to come first
        num_par_softmax_segments=VLLM_SEGMENTS,
        softmax_segm_output=scratch[0],
        softmax_segm_max=scratch[1],
        softmax_segm_expsum=scratch[2],
    )
    # Releases add arguments; one that a release does not know, it does not need.
    known = inspect.signature(attend).parameters
    given = {name: value for name, value in given.items() if name in known}
    given["k"], given["v"] = problem.token_major()
    tables = [problem.on_device(t) for t in gpu_data.named_blocks(w, problem.tables)]

    def call(copy: int) -> torch.Tensor:
        attend(**given, block_table=tables[copy])
        return given["out"]

    return call


# --- FlashInfer -----------------------------------------------------------------------------------


def flashinfer_paged(problem: Problem, layout: str) -> Call:
    """Make a call of FlashInfer's paged wrappers: one per copy, because a plan holds its pages."""
    import flashinfer

    w, size = problem.w, problem.w.block_size
    if layout == "NHD":
        pools = tuple(problem.token_major())
    else:
        pools = (problem.key_cache, problem.value_cache)
    firsts = [w.first_visible(b) // size if w.max_query_len == 1 else 0 for b in range(w.num_seqs)]
    used = [-(-length // size) for length in w.seq_lens]
    pages = problem.on_device(np.cumsum([0, *(u - f for u, f in zip(used, firsts, strict=True))]))
    last = problem.on_device([(length - 1) % size + 1 for length in w.seq_lens])
    heads = (w.num_heads, w.num_kv_heads, w.head_dim, size)
    options = dict(
        sm_scale=w.scale,
        window_left=-1 if w.sliding_window is None else w.sliding_window - 1,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    wrappers = []
    for table in problem.tables:
        ids = [table[b, f:u] for b, (f, u) in enumerate(zip(firsts, used, strict=True))]
        indices = problem.on_device(np.concatenate(ids))
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
        if w.max_query_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                # vLLM's rule: groups of more than four queries use the tensor cores.
                workspace,
                layout,
                use_tensor_cores=w.num_heads // w.num_kv_heads > 4,
            )
            wrapper.plan(pages, indices, last, *heads, **options)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout)
            starts = problem.on_device(w.query_start())
            wrapper.plan(starts, pages, indices, last, *heads, causal=True, **options)
        wrappers.append(wrapper)
    return lambda copy: wrappers[copy].run(problem.query, pools)


# --- FlashAttention 4 -----------------------------------------------------------------------------


def flash_attention_4(problem: Problem) -> Call:
    """Make a call of FlashAttention 4 (CuTe), fastest if a block is one of its tiles of keys."""
    from flash_attn.cute import flash_attn_varlen_func

    w = problem.w
    keys, values = problem.token_major()
    options = dict(
        cu_seqlens_q=problem.on_device(w.query_start()),
        seqused_k=problem.on_device(w.seq_lens),
        max_seqlen_q=w.max_query_len,
        max_seqlen_k=max(w.seq_lens),
        softmax_scale=w.scale,
        causal=True,
        window_size=(None if w.sliding_window is None else w.sliding_window - 1, None),
        num_splits=0 if w.max_query_len <= 8 else 1,  # 0: it chooses
    )
    tables = [problem.on_device(t) for t in gpu_data.named_blocks(w, problem.tables)]

    def call(copy: int) -> torch.Tensor:
        given = (problem.query, keys, values)
        found = flash_attn_varlen_func(*given, page_table=tables[copy], **options)
        return found[0] if isinstance(found, tuple) else found  # some releases also return the lse

    return call


# --- Timing ---------------------------------------------------------------------------------------


def time_calls(
    call: Call, copies: int, turns: int, device: str, repeats: int = 1
) -> tuple[list[float], str]:
    """Return the seconds of a call in each of several rounds, and how they were timed.

    A round goes `repeats` times over the copies before it waits, like jattn's rounds
    (`benchmarks.gpu.timing`): a GPU that stays busy longer runs slower.
    """

    def round_() -> None:
        for copy in range(copies):
            call(copy)

    for _ in range(WARM_UP):
        round_()
    if device == "cpu":
        found = []
        for _ in range(turns):
            begin = time.perf_counter()
            for _ in range(repeats):
                round_()
            found.append((time.perf_counter() - begin) / copies / repeats)
        return found, "host clock"
    torch.cuda.synchronize()
    run, how = round_, "events"
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            round_()
        run, how = graph.replay, "events, CUDA graph"
        run()
    except Exception as error:
        torch.cuda.synchronize()  # raises if the device is lost, and the result with it
        how += f"; no CUDA graph: {str(error)[:80]}"
    found = []
    for _ in range(turns):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / copies / repeats)
    return found, how


# --- The pipe -------------------------------------------------------------------------------------


class Worker:
    """The worker's commands, which hold one workload with one peer at a time."""

    def __init__(self) -> None:
        self.device, self.kernels = "cpu", None
        self.call: Call | None = None
        self.copies = 0

    def open(self, device: str, gigabytes: float, vllm_kernels: str | None) -> dict[str, str]:
        self.device, self.kernels = device, vllm_kernels
        if device != "cpu":
            total = torch.cuda.get_device_properties(0).total_memory
            share = min(gpu_peers.SHARE, gigabytes * 1e9 / total)
            torch.cuda.set_per_process_memory_fraction(share)
        return {"torch": torch.__version__}

    def prepare(self, peer: str, workload: dict[str, Any], copies: int) -> None:
        self.call = None  # there may be no room for two workloads
        if self.device != "cpu":
            torch.cuda.empty_cache()
        problem = Problem(from_json(workload), copies, self.device)
        self.copies = copies
        match peer:
            case "torch-sdpa":
                self.call = sdpa(problem)
            case "torch-flex":
                self.call = flex(problem)
            case "vllm-triton":
                self.call = vllm_triton(problem, self.kernels)
            case "flashinfer-nhd" | "flashinfer-hnd":
                self.call = flashinfer_paged(problem, peer[-3:].upper())
            case "flash-attention-4":
                self.call = flash_attention_4(problem)
            case _:
                raise ValueError(f"unknown peer {peer!r}")

    def rows(self, tokens: list[int], path: str) -> None:
        """Save some tokens' rows for the first copy, float32, and whether all rows are finite."""
        out = self.call(0)
        rows = out[tokens].float().cpu().numpy()
        np.savez(path, rows=rows, finite=bool(torch.isfinite(out).all()))

    def lost(self) -> bool:
        """Whether the device no longer computes, as after an illegal access."""
        if self.device == "cpu":
            return False
        try:
            return float(torch.arange(3.0, device=self.device).sum()) != 3.0
        except Exception:
            return True

    def time(self, turns: int, repeats: int = 1) -> dict[str, Any]:
        seconds, how = time_calls(self.call, self.copies, turns, self.device, repeats)
        return {"seconds": seconds, "how": how}


def main() -> None:
    with torch.inference_mode():
        serve(Worker())


if __name__ == "__main__":
    main()
