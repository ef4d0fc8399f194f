"""Mosaic GPU decode without a GPU: every configuration compiled, and what a model expects of it.

    python -m benchmarks.gpu.mosaic_decode            # the table of docs/performance-gpu.md
    python -m benchmarks.gpu.report benchmarks/gpu/mosaic_decode.py:cases

The model counts, for one multiprocessor and one tile of 64 keys, the cycles that reading K and V
from memory takes, those of shared memory, and those of the one warpgroup that computes:

    memory    = 64 (D + V) bytes / (bandwidth / cores / clock)
    shared    = (copied in + read as A + read as B [+ fp8: read, written widened]) / 128
    consumer  = A and B read + softmax + rescaling [+ fp8: widening] + waiting
    predicted = memory / max(memory, shared, consumer / blocks on a multiprocessor)

Its numbers are the data sheet's and guesses that say so; none of it was measured.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jattn
from benchmarks.gpu import cases as gpu_cases
from jattn.pallas.mosaic_gpu.decode import tiles as sizes

# H200: the copy bandwidth that was seen on one (read and write), its cores, its highest clock.
BANDWIDTH, CORES, CLOCK = 4.3e12, 132, 1.98e9
SHARED_BYTES = 128  # per cycle
# Guesses, in cycles: a wait for products or a barrier; a logit through mask, exponential and
# stores; widening 64 rows of one column of fp8, spread over a multiprocessor.
WAIT, LOGIT, WIDEN = 80, 14, 1.0

HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
HEADS = (*HEADS, (512, 512), (576, 512))
FORMATS = {"bfloat16": jattn.Dense("bfloat16"), "float16": jattn.Dense("float16")}
FORMATS |= {f"fp8_{kind}": jattn.Fp8(kind) for kind in jattn.Fp8.kinds}
OPTIONS = ("is_causal", "sliding_window", "logits_soft_cap", "sinks", "alibi_slopes")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A call of which the kernel's code depends on nothing else.

    Attributes:
      head: D and V.
      format: of the cache; an fp8 cache is read with a bfloat16 query.
      group: query heads per KV head.
      block_size: S.
      kv_layout: "HND" or "NHD".
      everything: all options, or none.
    """

    head: tuple[int, int]
    format: str
    group: int
    block_size: int
    kv_layout: str
    everything: bool

    @property
    def label(self) -> str:
        """Like `head512-fp8_e4m3-group8-block16-hnd-everything`."""
        d, v = self.head
        size = f"head{d}" if d == v else f"head{d}v{v}"
        last = "everything" if self.everything else "causal"
        parts = (size, self.format, f"group{self.group}", f"block{self.block_size}")
        return "-".join((*parts, self.kv_layout.lower(), last))

    def arguments(self, num_seqs: int = 4, num_blocks: int = 64) -> dict[str, Any]:
        """Arguments of `paged_attention` as ShapeDtypeStructs: one query token per sequence."""
        struct, format = jax.ShapeDtypeStruct, FORMATS[self.format]
        query = "float16" if self.format == "float16" else "bfloat16"
        inner = (1, self.block_size) if self.kv_layout == "HND" else (self.block_size, 1)

        def cache(width: int) -> jattn.KVArray:
            return jattn.KVArray(
                struct((num_blocks, *inner, width), format.word_dtype), None, format
            )

        given = {
            "query": struct((num_seqs, self.group, self.head[0]), jnp.dtype(query)),
            "key_cache": cache(self.head[0]),
            "value_cache": cache(self.head[1]),
            "block_tables": struct((num_seqs, 32), jnp.int32),
            "seq_lens": struct((num_seqs,), jnp.int32),
        }
        if self.everything:
            given |= {
                "is_causal": struct((num_seqs,), jnp.bool_),
                "sliding_window": struct((), jnp.int32),
                "logits_soft_cap": struct((), jnp.float32),
                "sinks": struct((self.group,), jnp.float32),
                "alibi_slopes": struct((self.group,), jnp.float32),
            }
        return given

    def fn(self) -> Callable[[dict[str, Any]], Any]:
        """The call itself, of a dictionary of arrays."""

        def run(given: dict[str, Any]) -> Any:
            return jattn.paged_attention(
                **given, kv_layout=self.kv_layout, implementation="mosaic_gpu"
            )

        return run

    def tiles(self) -> sizes.DecodeTiles:
        """The tiles that dispatch picks."""
        call = gpu_cases.described({"kv_layout": self.kv_layout, **self.arguments()})
        return sizes.pick(call, 1)


def configurations(thorough: bool = False) -> Iterator[Configuration]:
    """What dispatch tells apart: head, element size, rows, kernel block, layout, options.

    bfloat16 and float16 are the same code but for the names of instructions, as are the two fp8;
    each takes turns. Not thorough: of kernel blocks and options the two ends, 8 tokens with every
    option and 64 with none.
    """
    ends = [(8, True), (64, False)]
    if thorough:
        ends = [(size, all_) for size in (8, 16, 32, 64) for all_ in (False, True)]
    turn = 0
    for head in HEADS:
        for formats in (("bfloat16", "float16"), ("fp8_e4m3", "fp8_e5m2")):
            if sizes.chunk_of(*head, FORMATS[formats[0]].word_dtype.itemsize) is None:
                continue
            seen = set()
            for group in (8, 16, 32):
                first = Configuration(head, formats[0], group, 16, "HND", False)
                rows = first.tiles().row_block
                if rows in seen:
                    continue
                seen.add(rows)
                for size, everything in ends:
                    turn += 1
                    layout = ("HND", "NHD")[turn // 2 % 2]
                    format = formats[turn % 2]
                    yield Configuration(head, format, group, size, layout, everything)


def cases() -> list[tuple[str, Callable, tuple[Any, ...]]]:
    """For `benchmarks.gpu.report`."""
    return [(c.label, c.fn(), (c.arguments(),)) for c in configurations(thorough=True)]


def predict(tile: sizes.DecodeTiles) -> tuple[float, str]:
    """The share of the memory's read rate that the model expects, and what it is bound by."""
    columns, rows = tile.head_dim + tile.value_dim, tile.row_block
    stored = sizes.TILE * columns * tile.stored_bytes
    memory = stored / (BANDWIDTH / CORES / CLOCK)
    as_a = sizes.TILE * (tile.head_dim + tile.stored_rows) * 2 / SHARED_BYTES
    steps = tile.head_dim / 16 + tile.stored_rows / 64 * sizes.TILE / 16
    as_b = steps * rows * 16 * 2 / SHARED_BYTES
    widened = (stored + 2 * stored) / SHARED_BYTES if tile.stored_bytes == 1 else 0
    shared = stored / SHARED_BYTES + as_a + as_b + widened
    consumer = as_a + as_b + sizes.TILE * rows / 128 * LOGIT
    consumer += 2 * tile.stored_rows * rows / 128 + WAIT * (3 + tile.value_chunks)
    if tile.stored_bytes == 1:
        consumer += widened + WIDEN * columns + WAIT * (tile.key_chunks + tile.value_chunks)
    bounds = {"memory": memory, "shared": shared, "consumer": consumer / tile.blocks_per_core}
    bound = max(bounds, key=bounds.get)
    return memory / bounds[bound], bound


def main() -> int:
    """Print the table: the worst of every configuration's variants. 1 if something spills."""
    from benchmarks.gpu import report as gpu_report

    rows: dict[tuple, list] = {}
    for configuration in configurations():
        tile = configuration.tiles()
        kernels = gpu_report.report(configuration.fn(), configuration.arguments(), sm=90)
        kernel = max((k for k in kernels if k.kind == "mosaic"), key=lambda k: k.shared)
        key = (configuration.head, tile.stored_bytes, tile.row_block)
        rows.setdefault(key, []).append((configuration, tile, kernel))
        counts = (kernel.registers, kernel.spill_bytes)
        print(configuration.label, *counts, file=sys.stderr, flush=True)
    titles = ("D", "V", "bytes", "R", "columns", "ring", "blocks", "registers", "spills", "shared")
    print("| " + " | ".join((*titles, "predicted")) + " |")
    print("|" + "---|" * 11)
    spills = 0
    for ((d, v), stored, r), found in rows.items():
        tile = found[0][1]
        share, bound = predict(tile)
        registers = max(kernel.registers for *_, kernel in found)
        spilled = max(kernel.spill_bytes for *_, kernel in found)
        shared = max(kernel.shared for *_, kernel in found)
        spills += spilled
        print(
            f"| {d} | {v} | {stored} | {r} | {tile.chunk} | {tile.ring} | {tile.blocks_per_core} | "
            f"{registers} | {spilled} | {shared} | {share:.0%}, {bound} |"
        )
    return int(spills > 0)


if __name__ == "__main__":
    sys.exit(main())
