"""jattn's GPU kernels on this GPU: the correctness matrix, then speed beside ceilings and peers.

    python -m benchmarks.gpu [--filter REGEX] [--implementation NAME ...] [--block-size S]
                             [--json FILE] [--skip-matrix]
    python -m benchmarks.gpu --dry-run [--sm 90]

First the test matrix of every implementation that can run here, with the ids it has on CPU. Then,
for every workload of `benchmarks.gpu_workloads`: random data in shuffled blocks, sampled rows
checked against float64, and only then the time of a call, as the median of several loops over
copies of the tables that share no block, so that keys come from memory and not from L2. Ceilings
are measured first, in the same run.

`--dry-run` needs no GPU: it lists what would run, with the time that the described GPU's bandwidth
(its data sheet's) allows, and compiles every workload for it.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks import gpu_workloads
from benchmarks.workloads import Workload, flops, make_block_tables

HEADER = (
    f"{'workload':<52} {'with':<12} {'median us':>10} {'spread':>6} {'GB/s':>7} {'TFLOP/s':>8} "
    f"{'of ceiling':>13}"
)
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
TURNS = 7
# What sampled rows may be off by, in bfloat16 ulps of the largest output.
ULPS = 4


@dataclass(frozen=True)
class Ceilings:
    """What this GPU did in this run: bytes read and matrix FLOPs, a second."""

    read: float
    matrix: float


@dataclass(frozen=True)
class Row:
    """One workload with one implementation, checked and timed."""

    name: str
    implementation: str
    median: float
    spread: float
    gigabytes: float
    teraflops: float
    share: float
    bound: str

    def line(self) -> str:
        """The row of the table."""
        return (
            f"{self.name:<52} {self.implementation:<12} {self.median * 1e6:>10.1f} "
            f"{self.spread:>6.0%} {self.gigabytes:>7.0f} {self.teraflops:>8.1f} "
            f"{self.share:>6.0%} {self.bound:<6}"
        )


def make_row(w: Workload, implementation: str, seconds: Sequence[float], limits: Ceilings) -> Row:
    """What several timings of a workload say."""
    low, median, high = np.percentile(seconds, (25, 50, 75))
    least, bound = gpu_workloads.floor(w, limits.read, limits.matrix)
    return Row(
        w.name,
        implementation,
        float(median),
        float((high - low) / median),
        gpu_workloads.moved_bytes(w) / median / 1e9,
        flops(w) / median / 1e12,
        least / median,
        bound,
    )


# --- Peers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """Somebody else's kernel: how to find it, and what it can run."""

    name: str
    package: str
    can: Callable[[Workload], bool]


PEERS = (
    Peer(
        "jax-pallas",
        "jax.experimental.pallas.ops.gpu.paged_attention",
        lambda w: w.max_query_len == 1 and w.sliding_window is None,
    ),
)


def peers(w: Workload) -> list[Peer]:
    """The peers that are installed and can run `w`."""
    return [peer for peer in PEERS if _installed(peer.package) and peer.can(w)]


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


# --- On the device --------------------------------------------------------------------------------


def matrix(implementations: Sequence[str]) -> int:
    """Run the test matrix on the GPU; pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_matrix.py"]
    command += ["-k", " or ".join(f"{name}-head" for name in implementations)]
    return subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cuda,cpu"}).returncode


def time_loop(step: Callable[[Any], Any], tables: Any, turns: int = TURNS) -> list[float]:
    """Seconds of one `step(table)`, of each of several loops over `tables` on the device."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def loop(tables: Any) -> Any:
        def body(carry: Any, table: Any) -> tuple[Any, None]:
            # Each step waits for the last: its table depends on a number that is always zero.
            out = step(table + carry)
            return (out.reshape(-1)[0] * 0).astype(jnp.int32), None

        return jax.lax.scan(body, jnp.int32(0), tables)[0]

    loop(tables).block_until_ready()
    found = []
    for _ in range(turns):
        start = time.perf_counter()
        loop(tables).block_until_ready()
        found.append((time.perf_counter() - start) / len(tables))
    return found


def measure_ceilings() -> Ceilings:
    """The rates of a sum over 4 GB and of a product of two bfloat16 matrices of 8,192."""
    import jax
    import jax.numpy as jnp

    numbers = jnp.ones((2, 2**30), jnp.uint16)
    index = jnp.tile(jnp.arange(2, dtype=jnp.int32), 10)
    read = time_loop(lambda i: jnp.take(numbers, i % 2, axis=0).max()[None], index)
    size = 8192
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = time_loop(lambda i: a @ (a + i.astype(jnp.bfloat16)), jnp.zeros((20,), jnp.int32))
    return Ceilings(numbers[0].nbytes / np.median(read), 2 * size**3 / np.median(product))


@dataclass(frozen=True)
class Data:
    """A workload's arrays on the device; tables [copies, B, M]."""

    query: Any
    key_cache: Any
    value_cache: Any
    tables: Any
    seq_lens: Any
    starts: Any


def make_data(w: Workload, l2_bytes: int) -> Data:
    """Random queries and pools, the tables of as many copies as exceed five times L2."""
    import jax
    import jax.numpy as jnp

    size = max(1, gpu_workloads.moved_bytes(w))
    copies = int(min(32, max(2, -(-5 * l2_bytes // size))))
    tables, num_blocks = make_block_tables(w, copies, w.block_size)
    keys = jax.random.split(jax.random.key(w.seed), 3)
    shape = (num_blocks, w.num_kv_heads, w.block_size)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    return Data(
        2 * normal(keys[0], (w.num_tokens, w.num_heads, w.head_dim)),
        normal(keys[1], (*shape, w.head_dim)),
        normal(keys[2], (*shape, w.value_dim)),
        jnp.asarray(tables),
        jnp.asarray(w.seq_lens, jnp.int32),
        jnp.asarray(w.query_start()),
    )


def attend(w: Workload, data: Data, implementation: str, table: Any) -> Any:
    """One call of jattn."""
    import jattn

    return jattn.paged_attention(
        data.query,
        data.key_cache,
        data.value_cache,
        block_tables=table,
        seq_lens=data.seq_lens,
        query_start_loc=data.starts,
        max_query_len=w.max_query_len,
        sliding_window=w.sliding_window,
        implementation=implementation,
    )


def sampled_rows(w: Workload, count: int = 6) -> list[tuple[int, int]]:
    """`(sequence, its query token)`: the first and last of the batch, and some between."""
    rng = np.random.default_rng(w.seed)
    picked = {(0, 0), (w.num_seqs - 1, w.query_lens[-1] - 1)}
    while len(picked) < min(count, w.num_tokens):
        b = int(rng.integers(w.num_seqs))
        picked.add((b, int(rng.integers(w.query_lens[b]))))
    return sorted(picked)


def expected_row(w: Workload, data: Data, table: np.ndarray, b: int, i: int) -> np.ndarray:
    """[H, V] of one query token, in float64."""
    position = w.seq_lens[b] - w.query_lens[b] + i
    first = 0 if w.sliding_window is None else max(0, position - w.sliding_window + 1)
    blocks = table[b, first // w.block_size : position // w.block_size + 1]
    skip = first - first // w.block_size * w.block_size

    def tokens(cache: Any) -> np.ndarray:
        pages = np.asarray(cache[np.asarray(blocks)]).astype(np.float64)
        flat = pages.swapaxes(1, 2).reshape(-1, *pages.shape[1:2], pages.shape[3])
        return flat[skip : skip + position - first + 1].swapaxes(0, 1)

    query = np.asarray(data.query[int(w.query_start()[b]) + i]).astype(np.float64)
    query = query.reshape(w.num_kv_heads, -1, w.head_dim)
    logits = np.einsum("kgd,knd->kgn", query, tokens(data.key_cache)) * w.scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgn,knv->kgv", weights, tokens(data.value_cache)).reshape(w.num_heads, -1)


def wrong_rows(w: Workload, data: Data, out: np.ndarray, table: np.ndarray) -> list[str]:
    """Sampled rows that are further from float64 than bfloat16 explains."""
    found = []
    for b, i in sampled_rows(w):
        want = expected_row(w, data, table, b, i)
        have = np.asarray(out[int(w.query_start()[b]) + i]).astype(np.float64)
        allowed = ULPS * np.abs(want).max() * 2.0**-8
        error = np.abs(have - want).max()
        if not error <= allowed:
            found.append(f"sequence {b}, token {i}: off by {error:.3g}, allowed {allowed:.3g}")
    return found


def measure(w: Workload, implementation: str, data: Data, limits: Ceilings) -> Row | str:
    """A checked and timed row, or why there is none."""
    import jattn

    try:
        out = np.asarray(attend(w, data, implementation, data.tables[0]))
    except jattn.UnsupportedError as error:
        return str(error)
    if found := wrong_rows(w, data, out, np.asarray(data.tables[0])):
        return f"WRONG: {'; '.join(found)}"
    step = functools.partial(attend, w, data, implementation)
    return make_row(w, implementation, time_loop(step, data.tables), limits)


def measure_peer(w: Workload, peer: Peer, data: Data, limits: Ceilings) -> Row | str:
    """The same for JAX's in-tree kernel, which stores pages [K, N, S, D]."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    pools = [cache.swapaxes(0, 1) for cache in (data.key_cache, data.value_cache)]
    query = data.query * np.float32(w.scale).astype(data.query.dtype)

    def step(table: Any) -> Any:
        return paged_attention(query, *pools, table, data.seq_lens)

    try:
        return make_row(w, peer.name, time_loop(step, data.tables), limits)
    except Exception as error:  # a peer's own limits must not end our run
        return f"{type(error).__name__}: {str(error)[:200]}"


# --- The command ----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--filter", default="", metavar="REGEX", help="only workloads named so")
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=None)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", metavar="FILE", help="write JSON lines too")
    parser.add_argument("--skip-matrix", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="list and compile; needs no GPU")
    parser.add_argument("--sm", type=int, default=90, help="what to compile for in a dry run")
    return parser.parse_args(arguments)


def dry_run(chosen: Sequence[Workload], implementations: Sequence[str], sm: int) -> int:
    """List the workloads and compile each; 1 where one does not compile."""
    import jax
    import jax.numpy as jnp

    from benchmarks import gpu_report, gpu_targets

    struct, rate = jax.ShapeDtypeStruct, gpu_targets.GPUS[sm].bandwidth * 1e9
    failed = False
    for w in chosen:
        least = gpu_workloads.moved_bytes(w) / rate * 1e6
        print(
            f"{w.name:<52} {flops(w) / 1e9:>8.1f} GFLOP {gpu_workloads.moved_bytes(w) / 1e6:>8.1f} "
            f"MB, at least {least:.1f} us by the data sheet's bandwidth; peers: "
            f"{', '.join(p.name for p in peers(w)) or 'none'}"
        )
        tables, num_blocks = make_block_tables(w, 1, w.block_size)
        shape = (num_blocks, w.num_kv_heads, w.block_size)
        data = Data(
            struct((w.num_tokens, w.num_heads, w.head_dim), jnp.bfloat16),
            struct((*shape, w.head_dim), jnp.bfloat16),
            struct((*shape, w.value_dim), jnp.bfloat16),
            struct(tables.shape[1:], jnp.int32),
            struct((w.num_seqs,), jnp.int32),
            struct((w.num_seqs + 1,), jnp.int32),
        )
        for implementation in implementations:

            def call(*arrays: Any, w: Workload = w, name: str = implementation) -> Any:
                given = Data(*arrays)
                return attend(w, given, name, given.tables)

            try:
                kernels = gpu_report.report(call, *asdict(data).values(), sm=sm, xla=False)
            except Exception as error:
                failed = True
                print(f"  {implementation}: does not compile: {str(error)[:200]}")
                continue
            for k in kernels:
                print(
                    f"  {implementation}: {k.name} {k.registers} registers, {k.spill_bytes} bytes "
                    f"spilled, {k.shared} shared, {k.blocks_per_core} a core"
                )
    return int(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where something is wrong, 2 where there is nothing to do."""
    args = parse(arguments)
    chosen = [w for w in gpu_workloads.suite(args.block_size) if re.search(args.filter, w.name)]
    if not chosen:
        print(f"no workload is named like {args.filter!r}", file=sys.stderr)
        return 2
    if args.dry_run:
        return dry_run(chosen, args.implementation or ("triton",), args.sm)
    import jax

    import jattn
    from benchmarks import gpu_targets

    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"this is {device.platform}, not a GPU; --dry-run needs none", file=sys.stderr)
        return 2
    implementations = args.implementation or IMPLEMENTATIONS
    wrong = 0 if args.skip_matrix else matrix(implementations)
    packages = ("jax", "jaxlib", "jax-triton", "triton")
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "jattn": jattn.__version__,
        **{p: importlib.metadata.version(p) for p in packages if _installed(p.replace("-", "_"))},
    }
    limits = measure_ceilings()
    lines = [{"kind": "run", **facts, **asdict(limits)}]
    print("  ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"read {limits.read / 1e12:.2f} TB/s, matrix {limits.matrix / 1e12:.0f} TFLOP/s")
    print(HEADER, flush=True)
    sm = int(10 * float(device.compute_capability))
    l2 = getattr(gpu_targets.GPUS.get(sm), "l2", 64 << 20)
    for w in chosen:
        data = make_data(w, l2)
        found = [(name, measure(w, name, data, limits)) for name in implementations]
        found += [(peer.name, measure_peer(w, peer, data, limits)) for peer in peers(w)]
        for name, row in found:
            if isinstance(row, Row):
                lines.append({"kind": "row", **asdict(row)})
                print(row.line(), flush=True)
            else:
                wrong |= row.startswith("WRONG")
                lines.append({"kind": "none", "name": w.name, "implementation": name, "why": row})
                print(f"{w.name:<52} {name:<12} {row.splitlines()[-1]}", flush=True)
    if args.json:
        with open(args.json, "w") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
