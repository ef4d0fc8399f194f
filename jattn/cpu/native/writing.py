"""Writing new rows into a cache by the native kernel: what it takes, and its FFI call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jattn import device, formats
from jattn.cpu.native import launch, library
from jattn.cpu.xla import writing as xla
from jattn.cpu.xla.varying import as_varying

SOURCES = ("float32", "bfloat16", "float16")  # dtypes of new rows


def refusals(sides: Sequence[xla.NewRows]) -> list[str]:
    """Every reason why the kernel cannot write these rows; empty if it can."""
    here, reasons = device.platform(), []
    if here != "cpu":
        reasons.append(f"it runs on cpu, and this is {here}")
    reasons += library.missing()
    for name, side in zip(("key", "value"), sides, strict=False):
        if side.rows.dtype.name not in SOURCES:
            reasons.append(f"{name} is {side.rows.dtype.name}; it takes {', '.join(SOURCES)}")
    return reasons


def automatic_refusals(sides: Sequence[xla.NewRows]) -> list[str]:
    """Every reason why it is not taken where no implementation is named; empty if it is."""
    reasons = refusals(sides)
    # Under `jit` a pool may be split over devices unseen: XLA would gather it for a custom call,
    # and splits its own scatter. In `shard_map` a device has its part.
    if not reasons and jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        reasons.append("there are several devices, and this is not in jax.shard_map")
    return reasons


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def run(
    writing: xla.Writing, sides: tuple[xla.NewRows, ...], slots: jax.Array
) -> tuple[formats.Quantized, ...]:
    """What `jattn.cpu.xla.writing.run` returns, to the bit; derivatives are that one's."""
    return _batched(writing)(sides, slots)


@run.defjvp
def _derivative(writing: xla.Writing, primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, moved = jax.jvp(functools.partial(xla.run, writing), primals, tangents)
    return run(writing, *primals), moved


@functools.cache
def _batched(writing: xla.Writing) -> Any:
    """The call for one batch; `vmap` takes XLA's scatter, which writes all of a batch in place."""
    one = jax.custom_batching.custom_vmap(functools.partial(_call, writing))

    @one.def_vmap
    def many(size: int, batched: Any, *given: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda each: 0 if each else None, batched)
        found = jax.vmap(functools.partial(xla.run, writing), in_axes=tuple(axes))(*given)
        return found, jax.tree.map(lambda _: True, found)

    return one


def _call(
    writing: xla.Writing, sides: tuple[xla.NewRows, ...], slots: jax.Array
) -> tuple[formats.Quantized, ...]:
    # In the order of src/ffi.cc; a call brings those it has, and gets the pools' arrays back.
    pools: list[jax.Array | None] = []
    for side in sides:
        pools += [side.pool.words, *side.pool.quant_params]
    pools += [None] * (8 - len(pools))
    pad = (None,) * (2 - len(sides))
    given = (
        *pools,
        *(*(side.rows for side in sides), *pad),
        *(*(side.scale for side in sides), *pad),
        slots,
    )
    kinds = (*writing.formats, writing.formats[0])[:2]
    attributes = {
        "present": sum(1 << i for i, x in enumerate(given) if x is not None),
        "key_format": launch.format_code(kinds[0]),
        "value_format": launch.format_code(kinds[1]),
        "key_per": launch.PER[kinds[0].per],
        "value_per": launch.PER[kinds[1].per],
        "nhd": writing.kv_layout == "NHD",
    }
    arrays = as_varying([x for x in given if x is not None], given)
    kept = [x for x in pools if x is not None]
    native = jax.ffi.ffi_call(
        library.UPDATE,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept],
        input_output_aliases={i: i for i in range(len(kept))},
    )
    found = iter(native(*arrays, **{name: np.int64(value) for name, value in attributes.items()}))
    results = []
    for side in sides:
        words = next(found)
        params = (None if x is None else next(found) for x in side.pool.quant_params)
        results.append(formats.Quantized(words, formats.QuantParams(*params)))
    return as_varying(tuple(results), given)
