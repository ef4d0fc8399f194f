"""From a call to its Triton kernels: which are launched, on what, in which order.

`launches` describes them without importing Triton: names of buffers, sizes, static constants. `run`
hands the description to jax-triton; a test hands the same one to an interpreter.

    few query tokens in every sequence, or in all of them:   decode, merge
    otherwise:                                               decode, merge, prefill

`decode` writes the rows of sequences whose keys one program sees whole, `merge` those of split ones
and `prefill` those of sequences with more query tokens and of padding. They write one buffer, each
rows of its own, one after the other: the buffer is passed on as an aliased operand.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn import capability
from jattn.pallas import machine
from jattn.pallas.triton import tiles as triton_tiles
from jattn.pallas.triton.tiles import Tiles

OPERANDS = (
    *("query", "key_cache", "value_cache", "block_tables", "seq_lens", "query_start_loc"),
    *("scale", "is_causal", "sliding_window", "logits_soft_cap", "sinks", "alibi_slopes"),
    *("k_scale", "v_scale"),
)


@dataclasses.dataclass(frozen=True)
class DType:
    """A constant of a kernel that is a dtype, by its name in the Triton language."""

    name: str


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel of a call.

    Attributes:
      kernel: its name, in the module `module`.
      inputs: names of buffers: operands of the call, or outputs of earlier launches. An operand
        that the call does not have is replaced by another one, which the kernel does not read.
      numbers: integers, after the inputs.
      outputs: `(name, shape, dtype)`, after the numbers.
      aliases: which input each output continues, as indices.
      grid: programs.
      constants: static arguments, by name.
      tiles: sizes.
    """

    kernel: str
    module: str
    inputs: tuple[str, ...]
    numbers: dict[str, int]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    aliases: dict[int, int]
    grid: tuple[int, ...]
    constants: dict[str, Any]
    tiles: Tiles


def _strides(call: calls.Call, dim: int) -> tuple[int, int, int]:
    """Elements from one block, KV head and token to the next."""
    heads, tokens = call.num_kv_heads, call.block_size
    if call.kv_layout == "NHD":
        return tokens * heads * dim, dim, heads * dim
    return tokens * heads * dim, tokens * dim, dim


def _options(call: calls.Call) -> dict[str, Any]:
    return {
        "CAUSAL": {True: 1, False: 0, None: 2}[call.is_causal],
        "HAS_WINDOW": "sliding_window" in call.options,
        "HAS_CAP": "logits_soft_cap" in call.options,
        "HAS_SINKS": "sinks" in call.options,
        "HAS_SLOPES": "alibi_slopes" in call.options,
        "HAS_K_SCALE": "k_scale" in call.options,
        "HAS_V_SCALE": "v_scale" in call.options,
    }


def _sizes(call: calls.Call, tiles: Tiles) -> dict[str, Any]:
    d0, d1 = triton_tiles.parts(call.head_dim)
    v0, v1 = triton_tiles.parts(call.value_dim)
    k_strides, v_strides = _strides(call, call.head_dim), _strides(call, call.value_dim)
    qk, pv = triton_tiles.dot_dtypes(call)
    return {
        "GROUP": call.group,
        "BLOCK_SIZE": call.block_size,
        "D": call.head_dim,
        "D0": d0,
        "D1": d1,
        "V": call.value_dim,
        "V0": v0,
        "V1": v1,
        **dict(zip(("K_BLOCK_STRIDE", "K_HEAD_STRIDE", "K_TOKEN_STRIDE"), k_strides, strict=True)),
        **dict(zip(("V_BLOCK_STRIDE", "V_HEAD_STRIDE", "V_TOKEN_STRIDE"), v_strides, strict=True)),
        "K_STORED": DType(call.key_format.triton_dtype),
        "V_STORED": DType(call.value_format.triton_dtype),
        "QK_DTYPE": DType(qk),
        "PV_DTYPE": DType(pv),
        # A bfloat16 query reaches further than the float16 it is multiplied in.
        "NORMALIZE": qk == "float16" and call.query_dtype == "bfloat16",
        "LOOP_STAGES": tiles.stages,
    }


def launches(call: calls.Call, gpu: machine.Machine) -> tuple[Launch, ...]:
    """The kernels of a call on a GPU, in order; the last outputs named "out" and "lse" are its
    result."""
    tiles = triton_tiles.decode_tiles(call, gpu)
    # In a pipeline with products in float32 ptxas takes what it is given, and spills.
    free = tiles.stages > 1 and "float32" in triton_tiles.dot_dtypes(call)
    limit = triton_tiles.decode_limit(call, gpu)
    alone = call.max_query_len <= limit
    programs = gpu.cores * tiles.per_core
    plan = {
        "MAX_QUERIES": min(call.max_query_len, limit),
        "ALONE": alone,
        "ROWS": tiles.rows,
        "TILE": tiles.keys,
        "PLAN": 128 if call.num_seqs <= 128 else 1024,
        # Fewer keys than this are not worth a program of their own.
        "MIN_SHARE": max(1, 128 // tiles.keys),
    }
    options, sizes = _options(call), _sizes(call, tiles)
    capacity = min(call.table_width * call.block_size, 2**31 - 1)
    numbers = {
        "num_tokens": call.num_tokens,
        "num_seqs": call.num_seqs,
        "width": call.table_width,
        "capacity": capacity,
        "num_blocks": call.num_blocks,
        "kv_heads": call.num_kv_heads,
        "max_query_len": call.max_query_len,
    }
    result = (
        ("out", (call.num_tokens, call.num_heads, call.value_dim), call.out_dtype),
        ("lse", (call.num_tokens, call.num_heads), "float32"),
    )
    decode = Launch(
        "decode",
        "decode",
        OPERANDS,
        numbers,
        (
            *result,
            ("acc", (2 * programs, tiles.rows, call.value_dim), "float32"),
            ("ml", (2 * programs, 2, tiles.rows), "float32"),
        ),
        {},
        (programs,),
        {**options, **sizes, **plan, "REGISTERS": 0 if free else tiles.registers},
        tiles,
    )
    merge_inputs = (
        *("seq_lens", "query_start_loc", "is_causal", "sliding_window", "sinks", "v_scale"),
        *("acc", "ml", "out", "lse"),
    )
    some = ("num_seqs", "capacity", "kv_heads", "max_query_len")
    merge = Launch(
        "merge",
        "decode",
        merge_inputs,
        {**{name: numbers[name] for name in some}, "num_programs": programs},
        result,
        {8: 0, 9: 1},
        (max(programs - 1, 1), tiles.rows),
        {
            **{name: options[name] for name in ("CAUSAL", "HAS_WINDOW", "HAS_SINKS")},
            "HAS_V_SCALE": options["HAS_V_SCALE"],
            "GROUP": call.group,
            "V": call.value_dim,
            "V_ALL": triton_tiles.power_of_two(call.value_dim),
            **plan,
            "PARTS": 8,
        },
        dataclasses.replace(tiles, warps=4, stages=1),
    )
    if alone:
        return decode, merge
    tiles = triton_tiles.prefill_tiles(call, gpu)
    rows = call.num_tokens * call.group
    prefill = Launch(
        "prefill",
        "prefill",
        (*OPERANDS, "out", "lse"),
        numbers,
        result,
        {len(OPERANDS): 0, len(OPERANDS) + 1: 1},
        (rows // tiles.rows + call.num_seqs + 2, call.num_kv_heads),
        {
            **options,
            **_sizes(call, tiles),
            "MAX_QUERIES": limit,
            "ROWS": tiles.rows,
            "TILE": tiles.keys,
            "PLAN": plan["PLAN"],
            "EDGES": triton_tiles.masks_edges_only(call),
        },
        tiles,
    )
    return decode, merge, prefill


def _execute(gpu: machine.Machine, launch: Launch, buffers: dict[str, jax.Array]) -> None:
    """Add a launch's outputs to the buffers."""
    import importlib

    import jax_triton
    import triton.language as tl

    kernel = getattr(importlib.import_module(f"jattn.pallas.triton.{launch.module}"), launch.kernel)
    constants = {
        name: getattr(tl, value.name) if isinstance(value, DType) else value
        for name, value in launch.constants.items()
    }
    found = jax_triton.triton_call(
        *(buffers[name] for name in launch.inputs),
        *launch.numbers.values(),
        kernel=kernel,
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for _, shape, dtype in launch.outputs
        ],
        grid=launch.grid,
        name=f"jattn_{launch.kernel}",
        num_warps=launch.tiles.warps,
        num_stages=launch.tiles.stages,
        compute_capability=gpu.sm,
        input_output_aliases=launch.aliases,
        **constants,
    )
    buffers.update(zip((name for name, _, _ in launch.outputs), found, strict=True))


def buffers_of(operands: calls.Operands) -> dict[str, jax.Array]:
    """The operands by name; for one that is absent, another, which no kernel then reads."""
    given = operands._asdict()
    return {name: operands.scale if given[name] is None else given[name] for name in OPERANDS}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`.

    Under `jax.vmap` the batch is taken one by one.
    """
    gpu = machine.here()
    assert gpu is not None, "the row refuses calls that are for no GPU"

    @jax.custom_batching.sequential_vmap
    def one(operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
        buffers = buffers_of(operands)
        for launch in launches(call, gpu):
            _execute(gpu, launch, buffers)
        return buffers["out"], buffers["lse"]

    return one(operands)


@run.defjvp
def _no_gradients(call: calls.Call, primals: Any, tangents: Any) -> Any:
    raise capability.UnsupportedError(
        "paged_attention: implementation 'triton' has no gradients; implementation='xla' has"
    )
