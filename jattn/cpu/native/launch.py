"""A call and its operands as the buffers and attributes of the native kernel's FFI call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jattn import call as calls
from jattn import formats
from jattn.call import batching
from jattn.call.arguments import KINDS
from jattn.cpu.native import library, partition
from jattn.cpu.xla import gradient
from jattn.varying import as_varying

# The library's numbers for formats, and for what a scale belongs to: see src/problem.h.
FORMATS = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "e4m3": 3,
    "e5m2": 4,
    "int8": 5,
    "int4": 6,
    "nvfp4": 7,
}
PER = {None: 0, "head": 0, "block": 1, "token": 2}


def format_code(format: formats.Format) -> int:
    """Return the library's number for a format."""
    return FORMATS[format.codes]


@gradient.differentiable
@batching.one_by_one
def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`; gradients are the XLA path's."""
    assert library.load().library is not None, "the row refuses calls without a library"
    given = dict[str, jax.Array | None]()
    for name, x in operands._asdict().items():
        if isinstance(x, formats.QuantParams):
            given |= {f"{name}.{part}": array for part, array in x._asdict().items()}
        else:
            given[name] = x
    present = sum(1 << i for i, x in enumerate(given.values()) if x is not None)
    there = {name: x for name, x in given.items() if x is not None}
    # Under `jax.shard_map` all operands must vary over the same axes, and results that do not vary
    # would count as the same on all devices.
    arrays = as_varying([*there.values()], operands)
    # `present` says which options there are, and a set's `repr` has no fixed order. With several
    # devices, only this enters the key of XLA's cache on disk.
    static = (dataclasses.replace(call, options=frozenset()), present, library.version())
    out, lse = partition.run(_attend, static, _division(call, there), arrays)
    return as_varying((out, lse), operands)


def _attend(
    static: tuple[calls.Call, int, int], query: jax.Array, *rest: jax.Array
) -> Sequence[jax.Array]:
    """Call the kernel for the heads of `query` and of the pools."""
    call, present, version = static
    kv_heads = max(call.num_kv_heads * query.shape[1] // call.num_heads, 1)
    results = (
        jax.ShapeDtypeStruct((*query.shape[:2], call.value_dim), call.out_dtype),
        jax.ShapeDtypeStruct(query.shape[:2], np.float32),
    )
    attributes = {
        "version": version,
        "present": present,
        "key_format": format_code(call.key_format),
        "value_format": format_code(call.value_format),
        "key_per": PER[call.key_format.per],
        "value_per": PER[call.value_format.per],
        "nhd": call.kv_layout != "HND",
        "blocks": call.num_blocks,
        "block_size": call.block_size,
        "kv_heads": kv_heads,
        "stored_heads": kv_heads if call.rows is None else call.rows.count,
        "row_width": 0 if call.rows is None else call.rows.width,  # 0: keys and values separate
        "value_start": 0 if call.rows is None else call.rows.value_start,
        "causal": call.is_causal is not False,
        "value_dim": call.value_dim,
        "max_query_len": call.max_query_len,
    }
    native = jax.ffi.ffi_call(library.TARGET, results)
    return native(query, *rest, **{name: np.int64(value) for name, value in attributes.items()})


def _division(call: calls.Call, given: dict[str, jax.Array]) -> partition.Division:
    """Return which axes of a call's operands are heads."""

    def axes(name: str, ndim: int) -> partition.Axes:
        if name == "query":
            return None, "heads", None
        kind = KINDS.get(name)
        if kind is not None and kind.query_heads:
            after = kind.query_heads - 1
            return (*(None,) * (ndim - 1 - after), "heads", *(None,) * after)
        if kind is not None and kind.per_kv_head:
            return ("kv_heads",)
        if call.rows is None and pool(name):
            return pool_axes(ndim, call.kv_layout)
        return (None,) * ndim

    def pool(name: str) -> str | None:
        return name if name.split(".")[0] in batching.POOLS else None

    return partition.Division(
        operands=tuple(axes(name, x.ndim) for name, x in given.items()),
        results=((None, "heads", None), (None, "heads")),
        pools=tuple(map(pool, given)),
        # A token of `KVRows` holds the rows of all heads.
        kv_heads=0 if call.rows is not None and call.num_kv_heads > 1 else call.num_kv_heads,
        group=call.group,
    )


def pool_axes(ndim: int, kv_layout: str) -> partition.Axes:
    """Name the axes of a pool's words, or of its scales: per block, token or group."""
    if ndim == 2:
        return (None, "kv_heads")
    if kv_layout == "NHD":
        return (None, None, "kv_heads", None)[:ndim]
    return (None, "kv_heads", None, None)[:ndim]
