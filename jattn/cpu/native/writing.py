"""Write new tokens into a cache with the native kernel: what it takes, and its FFI call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jattn import call as calls
from jattn import device, formats
from jattn.cpu.native import launch, library, partition
from jattn.cpu.xla import writing as xla
from jattn.varying import as_varying

ROWS, SLOTS = 8, 12  # where new tokens, and their slots, are among the operands: src/ffi.cc
SOURCES = calls.QUERY_DTYPES  # dtypes of new tokens


def refusals(new_rows: Sequence[xla.NewRows]) -> list[str]:
    """Return every reason why the kernel cannot write these rows; empty if it can."""
    here, reasons = device.platform(), []
    if here != "cpu":
        reasons.append(f"it runs on cpu, and this is {here}")
    reasons += library.missing()
    for name, new in zip(("key", "value"), new_rows, strict=False):
        if new.rows.dtype.name not in SOURCES:
            reasons.append(f"{name} is {new.rows.dtype.name}; it takes {', '.join(SOURCES)}")
    return reasons


def automatic_refusals(new_rows: Sequence[xla.NewRows]) -> list[str]:
    """Return every reason not to choose it when no implementation is named; empty if chosen."""
    reasons = refusals(new_rows)
    # In `jax.shard_map` XLA would gather a pool that automatic axes split, but can split a scatter.
    mesh = jax.sharding.get_abstract_mesh()
    if not reasons and mesh.manual_axes and partition.automatic_axes(mesh):
        reasons.append(
            f"the call is in jax.shard_map over {mesh.manual_axes}, and "
            f"{partition.automatic_axes(mesh)} may split a pool"
        )
    return reasons


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def run(
    writing: xla.Writing, new_rows: tuple[xla.NewRows, ...], slots: jax.Array
) -> tuple[formats.Quantized, ...]:
    """Write what `jattn.cpu.xla.writing.run` writes, bit for bit, with its derivatives."""
    return _batched(writing)(new_rows, slots)


@run.defjvp
def _derivative(
    writing: xla.Writing, primals: tuple[tuple[xla.NewRows, ...], jax.Array], tangents: Any
) -> tuple[tuple[formats.Quantized, ...], tuple[formats.Quantized, ...]]:
    _, moved = jax.jvp(functools.partial(xla.run, writing), primals, tangents)
    return run(writing, *primals), moved


@functools.cache
def _batched(writing: xla.Writing) -> Callable[..., tuple[formats.Quantized, ...]]:
    """Return the call for one batch; `vmap` uses XLA's scatter, which writes them all in place."""
    one = jax.custom_batching.custom_vmap(functools.partial(_call, writing))

    @one.def_vmap
    def many(size: int, batched: Sequence[object], *given: object) -> tuple[object, object]:
        axes = jax.tree.map(lambda each: 0 if each else None, batched)
        found = jax.vmap(functools.partial(xla.run, writing), in_axes=tuple(axes))(*given)
        return found, jax.tree.map(lambda _: True, found)

    return one


def _call(
    writing: xla.Writing, new_rows: tuple[xla.NewRows, ...], slots: jax.Array
) -> tuple[formats.Quantized, ...]:
    # In the order of src/ffi.cc. A call passes those it has, and gets the pools' arrays back.
    pools: list[jax.Array | None] = []
    for new in new_rows:
        pools += [new.pool.words, *new.pool.quant_params]
    pools += [None] * (8 - len(pools))
    pad = (None,) * (2 - len(new_rows))
    given = (
        *pools,
        *(*(new.rows for new in new_rows), *pad),
        *(*(new.scale for new in new_rows), *pad),
        slots,
    )
    kinds = (*writing.formats, writing.formats[0])[:2]
    attributes = {
        "version": library.version(),
        "present": sum(1 << i for i, x in enumerate(given) if x is not None),
        "key_format": launch.format_code(kinds[0]),
        "value_format": launch.format_code(kinds[1]),
        "key_per": launch.PER[kinds[0].per],
        "value_per": launch.PER[kinds[1].per],
        "nhd": writing.kv_layout == "NHD",
    }
    arrays = as_varying([x for x in given if x is not None], given)
    kept = len([x for x in pools if x is not None])
    static = (tuple(attributes.items()), kept)
    found = iter(partition.run(_update, static, _division(writing, new_rows, given, kept), arrays))
    results = []
    for new in new_rows:
        words = next(found)
        params = (None if x is None else next(found) for x in new.pool.quant_params)
        results.append(formats.Quantized(words, formats.QuantParams(*params)))
    return as_varying(tuple(results), given)


def _update(
    static: tuple[tuple[tuple[str, int], ...], int], *arrays: jax.Array
) -> Sequence[jax.Array]:
    """Call the kernel; the first arrays are pools, and are returned."""
    attributes, kept = static
    native = jax.ffi.ffi_call(
        library.UPDATE,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:kept]],
        input_output_aliases={i: i for i in range(kept)},
    )
    return native(*arrays, **{name: np.int64(value) for name, value in attributes})


def _division(
    writing: xla.Writing,
    new_rows: Sequence[xla.NewRows],
    given: Sequence[jax.Array | None],
    kept: int,
) -> partition.Division:
    """Return which axes of the arrays are KV heads."""
    words = new_rows[0].pool.words
    rows_of_heads = words.ndim == 4 and new_rows[0].rows.ndim == 3

    def axes(at: int, x: jax.Array) -> partition.Axes:
        if not rows_of_heads or at == SLOTS:  # a token of `KVRows` holds the rows of all heads
            return (None,) * x.ndim
        if at < ROWS:
            return launch.pool_axes(x.ndim, writing.kv_layout)
        return (None, "kv_heads", None)[: x.ndim] if x.ndim > 1 else ("kv_heads",)

    operands = tuple(axes(i, x) for i, x in enumerate(given) if x is not None)
    names = ("key_cache", "value_cache")
    return partition.Division(
        operands=operands,
        results=operands[:kept],
        pools=tuple(
            names[i >= 4] if i < ROWS else None for i, x in enumerate(given) if x is not None
        ),
        kv_heads=new_rows[0].rows.shape[1] if rows_of_heads else 0,
    )
