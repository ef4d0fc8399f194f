"""The peers of the GPU benchmark: which there are, why one does not run, and their times.

JAX's peers run in this process, torch's in a worker (`benchmarks.gpu.peer_worker`) with a separate
share of the GPU's memory. All get jattn's data; each result is checked against the same float64
rows, with the same tolerance, before it is timed.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import worker as workers
from benchmarks.gpu import data as gpu_data
from benchmarks.gpu import session as gpu_session
from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu.data import Data
from benchmarks.gpu.timing import GRAPH
from benchmarks.workloads import Workload

ROOT = Path(__file__).resolve().parents[2]
WORKER = "benchmarks.gpu.peer_worker"
# What the worker may hold: a workload's copies, also in the peer's own layout. At most SHARE of the
# GPU's memory: JAX has half, and the context of each process some of the rest.
GIGABYTES = 56.0
SHARE = 0.4
# A command that compiles may take long; one that hangs must not end the run.
PATIENCE = 240.0
# JAX's in-tree kernel: splits and pages per step, with its own defaults.
PALLAS_PAGES = 16 * 8
# In import order.
VLLM_FILES = ("triton_attention_helpers.py", "triton_unified_attention.py")


# --- The peers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A kernel of another project.

    Attributes:
      name: the name in rows and in `--peers`.
      package: the package that it needs.
      install: how to install it.
      refuses: returns why it cannot run a workload, or None if it can.
    """

    name: str
    package: str
    install: str
    refuses: Callable[[Workload], str | None]

    @property
    def in_jax(self) -> bool:
        """Whether the peer runs in this process."""
        return self.package == "jax"


def _decode(w: Workload) -> bool:
    return w.max_query_len == 1


def _pallas(w: Workload) -> str | None:
    if not _decode(w):
        return "it only decodes one token per sequence"
    if w.sliding_window is not None:
        return "it has no sliding window"
    if w.head_dim != w.value_dim or w.head_dim & (w.head_dim - 1):
        return f"head size {w.head_dim}/{w.value_dim}: it takes equal powers of two"
    return None


def _dense(w: Workload) -> str | None:
    """Return why attention over contiguous keys cannot run a workload, or None."""
    if len(set(w.query_lens)) > 1:
        return "sequences have different numbers of query tokens, and it has no ragged batch"
    return None


def _cudnn(w: Workload) -> str | None:
    if w.head_dim > 256 or w.head_dim % 8:
        return f"head size {w.head_dim}: cuDNN takes multiples of 8 up to 256"
    if reason := _dense(w):
        return reason
    if not _decode(w) and w.query_lens != w.seq_lens:
        return "jax.nn aligns its causal mask with the first key; queries here follow older keys"
    return None


def _sdpa(w: Workload) -> str | None:
    if w.head_dim > 256 or w.head_dim % 8:
        return f"head size {w.head_dim}: torch's fused kernels take multiples of 8 up to 256"
    if reason := _dense(w):
        return reason
    if len(set(w.seq_lens)) > 1:
        return "sequences have different lengths, and it has no ragged batch"
    if w.sliding_window is not None and not _decode(w):
        return "it has no sliding window"
    return None


def _flex(w: Workload) -> str | None:
    if w.head_dim & (w.head_dim - 1) or w.value_dim & (w.value_dim - 1):
        return f"head size {w.head_dim}/{w.value_dim}: it takes powers of two"
    return _dense(w)


def _vllm(w: Workload) -> str | None:
    if w.head_dim != w.value_dim:
        return f"head size {w.head_dim}/{w.value_dim}: it takes equal ones"
    return None


def _flashinfer(w: Workload) -> str | None:
    if w.head_dim != w.value_dim or w.head_dim not in (64, 128, 256, 512):
        return f"head size {w.head_dim}/{w.value_dim}: it takes 64, 128, 256 and 512"
    return None


def _flash(w: Workload) -> str | None:
    if w.head_dim != w.value_dim or w.head_dim not in (64, 128, 192, 256, 512):
        return f"head size {w.head_dim}/{w.value_dim}: it takes 64, 128, 192, 256 and 512"
    return None


_TORCH = "pip install torch"
_FLASH = "pip install flash-attn-4; for head size 512 vLLM's fork of flash-attention"
_VLLM = f"pip install vllm, or name a folder with its {' and '.join(VLLM_FILES)}: --vllm-kernels"
PEERS = (
    Peer("jax-pallas", "jax", "pip install jax", _pallas),
    Peer("jax-cudnn", "jax", "pip install jax[cuda13]", _cudnn),
    Peer("torch-sdpa", "torch", _TORCH, _sdpa),
    Peer("torch-flex", "torch", _TORCH, _flex),
    Peer("vllm-triton", "vllm", _VLLM, _vllm),
    Peer("flashinfer-nhd", "flashinfer", "pip install flashinfer-python", _flashinfer),
    Peer("flashinfer-hnd", "flashinfer", "pip install flashinfer-python", _flashinfer),
    Peer("flash-attention-4", "flash_attn", _FLASH, _flash),
)
NAMES = tuple(peer.name for peer in PEERS)


def installed(python: str | None = None) -> frozenset[str]:
    """Return the peers' packages that this Python or the worker's has, without importing any."""
    names = sorted({peer.package for peer in PEERS})
    if python is None:
        return frozenset(name for name in names if importlib.util.find_spec(name) is not None)
    code = (
        "import importlib.util, json, sys; "
        "print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n)]))"
    )
    try:
        said = subprocess.run(
            [python, "-c", code, *names], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(json.loads(said.stdout))


@dataclass(frozen=True)
class Found:
    """The software found for peers.

    Attributes:
      here: packages of this Python.
      worker: packages of the worker's Python.
      vllm_kernels: the folder with the two files of vLLM's kernel, or None.
    """

    here: frozenset[str]
    worker: frozenset[str]
    vllm_kernels: str | None = None

    def why_not(self, peer: Peer, w: Workload) -> str | None:
        """Return why `peer` does not run `w` (not installed, or unable), or None if it does."""
        if peer.in_jax:
            return peer.refuses(w) if "jax" in self.here else f"no jax: {peer.install}"
        if "torch" not in self.worker:
            return f"no torch: {_TORCH}, or name a Python that has it: --peer-python"
        if peer.package == "vllm" and self.vllm_kernels is not None:
            folder = Path(self.vllm_kernels)
            absent = [name for name in VLLM_FILES if not (folder / name).is_file()]
            return f"{folder} has no {' and no '.join(absent)}" if absent else peer.refuses(w)
        if peer.package not in self.worker:
            return f"no {peer.package}: {peer.install}"
        return peer.refuses(w)


def find(peer_python: str | None, vllm_kernels: str | None) -> Found:
    """Find the software in this Python and the worker's."""
    here = installed()
    return Found(here, installed(peer_python) if peer_python else here, vllm_kernels)


# --- JAX's ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The result of a peer.

    Attributes:
      rows: the sampled rows, [n, H, V].
      finite: whether all other rows are finite too.
      time: returns the seconds of a call, measured several times, and how it was timed.
    """

    rows: np.ndarray
    finite: bool
    time: Callable[[], tuple[list[float], str]]


def _sampled(w: Workload, out: Any) -> tuple[np.ndarray, bool]:
    import jax.numpy as jnp

    rows = np.asarray(out[np.asarray(gpu_data.sampled_tokens(w))]).astype(np.float32)
    return rows, bool(jnp.isfinite(out).all())


def jax_pallas(w: Workload, data: Data, repeats: int = 1) -> Result:
    """Run JAX's in-tree paged attention, which stores pages [K, N, S, D] and does not scale."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    pools = tuple(cache.swapaxes(0, 1) for cache in (data.key_cache, data.value_cache))
    query = (data.query.astype(jnp.float32) * np.float32(w.scale)).astype(data.query.dtype)
    tables = gpu_data.named_blocks(w, np.asarray(data.tables))
    tables = np.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[-1] % PALLAS_PAGES)))

    def step(query: Any, arrays: Any, table: Any) -> Any:
        pools, lengths = arrays
        return paged_attention(query, *pools, table, lengths)

    given = query, (pools, data.seq_lens), list(jnp.asarray(tables))
    out = step(query, given[1], given[2][0])

    def timed() -> tuple[list[float], str]:
        chain = jax.jit(gpu_timing.chain_of(step))
        return gpu_timing.time_chain(chain, *given, repeats=repeats), GRAPH

    return Result(*_sampled(w, out), timed)


def jax_dense(w: Workload, data: Data, implementation: str = "cudnn", repeats: int = 1) -> Result:
    """Run `jax.nn.dot_product_attention` over keys made contiguous before the clock starts."""
    import jax
    import jax.numpy as jnp

    slots, lengths = gpu_data.visible_slots(w, np.asarray(data.tables))
    same = len(set(lengths.tolist())) == 1
    known = None if same else jnp.asarray(lengths, jnp.int32)
    window = None if _decode(w) or w.sliding_window is None else (w.sliding_window - 1, 0)

    @jax.jit
    def gather(cache: Any, slots: Any) -> Any:
        return cache[slots // w.block_size, :, slots % w.block_size]

    caches = data.key_cache, data.value_cache
    copies = [
        tuple(gather(cache, jnp.asarray(slot, jnp.int32)) for cache in caches) for slot in slots
    ]

    def step(query: Any, _: None, copy: Any) -> Any:
        query = query.reshape(w.num_seqs, w.max_query_len, w.num_heads, w.head_dim)
        out = jax.nn.dot_product_attention(
            query,
            *copy,
            scale=w.scale,
            is_causal=not _decode(w),
            key_value_seq_lengths=known,
            local_window_size=window,
            implementation=implementation,
        )
        return out.reshape(w.num_tokens, w.num_heads, w.value_dim)

    out = jax.jit(step)(data.query, None, copies[0])

    def timed() -> tuple[list[float], str]:
        chain = jax.jit(gpu_timing.chain_of(step))
        return gpu_timing.time_chain(chain, data.query, None, copies, repeats=repeats), GRAPH

    return Result(*_sampled(w, out), timed)


# --- torch's --------------------------------------------------------------------------------------


class Worker(workers.Worker):
    """A process with torch."""

    def __init__(
        self,
        python: str = sys.executable,
        device: str = "cuda",
        gigabytes: float = GIGABYTES,
        vllm_kernels: str | None = None,
        module: str = WORKER,
    ):
        opening = {"device": device, "gigabytes": gigabytes, "vllm_kernels": vllm_kernels}
        super().__init__(python, module, PATIENCE, **opening)

    def run(self, peer: Peer, w: Workload, copies: int, repeats: int = 1) -> Result:
        """Prepare `w`, run it once and return its sampled rows; `repeats` is for its timing."""
        self.ask("prepare", peer=peer.name, workload=dataclasses.asdict(w), copies=copies)
        path = self.path("rows.npz")
        self.ask("rows", tokens=gpu_data.sampled_tokens(w), path=str(path))
        with np.load(path) as saved:
            rows, finite = saved["rows"], bool(saved["finite"])

        def timed() -> tuple[list[float], str]:
            answer = self.ask("time", turns=gpu_timing.TURNS, repeats=repeats)
            return answer["seconds"], answer["how"]

        return Result(rows, finite, timed)


# --- Measuring ------------------------------------------------------------------------------------


def judge(w: Workload, result: Result, want: np.ndarray) -> str | None:
    """Return why a result must not be timed, or None."""
    if found := gpu_data.wrong_rows(w, want, result.rows):
        return f"out of budget: {'; '.join(found)}"
    return None if result.finite else "out of budget: it has elements that are not finite"


def measure(
    peer: Peer, w: Workload, data: Data, want: np.ndarray, worker: Worker, repeats: int = 1
) -> tuple[list[float], str] | str:
    """Return the seconds of a call, measured several times, and how; or why there are none.

    Args:
      peer, w, data: the peer, and the workload and data it runs on.
      want: the result of `gpu_data.expected_rows`.
      worker: the process with torch.
      repeats: how often a round goes over the copies.
    """
    try:
        if peer.name == "jax-pallas":
            result = jax_pallas(w, data, repeats)
        elif peer.name == "jax-cudnn":
            result = jax_dense(w, data, repeats=repeats)
        else:
            result = worker.run(peer, w, len(data.tables), repeats)
        return judge(w, result, want) or result.time()
    except Exception as error:  # a peer's own limits must not end our run
        return gpu_session.first_line(error)


def listed(
    found: Found, w: Workload, names: Sequence[str] = NAMES
) -> Iterator[tuple[Peer, str | None]]:
    """Return the named peers, each with the reason why it does not run `w`, or None."""
    for peer in PEERS:
        if peer.name in names:
            yield peer, found.why_not(peer, w)
