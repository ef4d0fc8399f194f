"""A call and its operands as the buffers and attributes of the native kernel's FFI call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from jattn import call as calls
from jattn import formats
from jattn.cpu.native import library
from jattn.cpu.xla import gradient
from jattn.cpu.xla.varying import as_varying

# Numbers that the library knows formats by, and what a scale belongs to: src/problem.h.
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
    """The library's number of a format."""
    if isinstance(format, formats.Fp8):
        return FORMATS[format.kind]
    return FORMATS[format.name.removesuffix("_zero")]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`; gradients are the XLA path's."""
    assert library.load().library is not None, "the row refuses calls without a library"
    # In the order of src/ffi.cc; a call brings those it has.
    given = (
        *(operands.query, operands.key_cache, operands.value_cache),
        *(operands.block_tables, operands.seq_lens, operands.query_start_loc),
        *(operands.scale, operands.is_causal, operands.sliding_window, operands.logits_soft_cap),
        *(operands.sinks, operands.alibi_slopes, operands.k_scale, operands.v_scale),
        *(operands.attention_chunk_size, operands.visible_end, operands.tree_mask),
        *(operands.selected_blocks, operands.relative_bias),
        *operands.k_quant_params,
        *operands.v_quant_params,
    )
    results = (
        jax.ShapeDtypeStruct((call.num_tokens, call.num_heads, call.value_dim), call.out_dtype),
        jax.ShapeDtypeStruct((call.num_tokens, call.num_heads), np.float32),
    )
    attributes = {
        "present": sum(1 << i for i, x in enumerate(given) if x is not None),
        "key_format": format_code(call.key_format),
        "value_format": format_code(call.value_format),
        "key_per": PER[call.key_format.per],
        "value_per": PER[call.value_format.per],
        "nhd": call.kv_layout != "HND",
        "blocks": call.num_blocks,
        "block_size": call.block_size,
        "kv_heads": call.num_kv_heads,
        "stored_heads": call.num_kv_heads if call.rows is None else call.rows.count,
        "row_width": 0 if call.rows is None else call.rows.width,  # 0: keys and values apart
        "value_start": 0 if call.rows is None else call.rows.value_start,
        "causal": call.is_causal is not False,
        "value_dim": call.value_dim,
        "max_query_len": call.max_query_len,
    }
    native = jax.ffi.ffi_call(library.TARGET, results, vmap_method="sequential")
    # Under `jax.shard_map` operands vary alike, and results that do not vary would count as one for
    # all devices.
    found = native(
        *as_varying([x for x in given if x is not None], operands),
        **{name: np.int64(value) for name, value in attributes.items()},
    )
    out, lse = as_varying(tuple(found), operands)
    return out, lse


def _forward(call: calls.Call, operands: calls.Operands) -> tuple[Any, Any]:
    out, lse = run(call, operands)
    return (out, lse), (operands, out, lse)


def _backward(call: calls.Call, saved: Any, cotangents: Any) -> tuple[calls.Operands]:
    operands, out, lse = saved
    return (gradient.run(call, operands, out, lse, *cotangents),)


run.defvjp(_forward, _backward)
