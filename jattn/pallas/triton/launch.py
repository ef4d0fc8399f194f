"""The Triton kernels of a call: which are launched, on which buffers, in which order.

`launches` describes them without importing Triton: names of buffers, sizes, static constants. `run`
hands the description to jax-triton; a test hands the same one to an interpreter.

    few query tokens in every sequence, or few in total:     decode, merge_splits
    otherwise:                                               decode, merge_splits, prefill

`decode` writes the rows of sequences whose keys one program reads entirely, `merge_splits` those of
split sequences, and `prefill` those of sequences with more query tokens and of padding. They write
different rows of one buffer, one after the other: it is passed on as an aliased operand.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import call as calls
from jattn import formats, softmax, spec
from jattn.integers import power_of_two
from jattn.pallas import machine, promises
from jattn.pallas.triton import needs, packed
from jattn.pallas.triton import tiles as tiling
from jattn.pallas.triton.tiles import Tiles

OPERANDS = (
    *("query", "key_cache", "value_cache", "block_tables", "sequences"),
    *("scale", "is_causal", "sliding_window", "attention_chunk_size", "logits_soft_cap"),
    *("sinks", "alibi_slopes", "relative_bias", "visible_end", "tree_mask", "selected_columns"),
    *("selected_tokens", "k_scale", "v_scale"),
    *("key_groups", "value_groups", "key_scales", "value_scales", "key_zeros", "value_zeros"),
)


class Kernels(typing.NamedTuple):
    """The kernels, by the names that launches use."""

    decode: Any
    merge_splits: Any
    prefill: Any


def kernels() -> Kernels:
    """Return the kernels. This imports Triton, so only code that launches them calls it."""
    from jattn.pallas.triton.decode import decode, merge_splits
    from jattn.pallas.triton.prefill import prefill

    return Kernels(decode, merge_splits, prefill)


@dataclasses.dataclass(frozen=True)
class Static:
    """The constants that a kernel is compiled with: `C` in the kernels.

    Strides are in elements. Dtypes are names in the Triton language until `in_language`.
    """

    CAUSAL: int  # 0 no, 1 yes, 2 as an array says for each sequence
    HAS_WINDOW: bool
    HAS_CHUNK: bool
    HAS_CAP: bool
    HAS_SINKS: bool
    SINKS_PER_TOKEN: bool
    HAS_SLOPES: bool
    HAS_END: bool
    BIAS_COLUMNS: int  # of each head's table of relative positions; 0 for none
    TREE_WORDS: int  # of each query token's mask; 0 for none
    SELECTED: bool  # tables hold only the selected blocks
    HAS_K_SCALE: bool
    HAS_V_SCALE: bool
    GROUP: int
    BLOCK_SIZE: int
    D: int
    D0: int  # D in one or two parts that are powers of two
    D1: int
    V: int
    V0: int
    V1: int
    V_ALL: int  # V in one part, rounded up to a power of two
    K_BLOCK_STRIDE: int
    K_HEAD_STRIDE: int
    K_TOKEN_STRIDE: int
    V_BLOCK_STRIDE: int
    V_HEAD_STRIDE: int
    V_TOKEN_STRIDE: int
    V_START: int  # where in a row of keys and values the value begins; 0 if they are separate
    K_STORED: Any
    V_STORED: Any
    GROUPS_STORED: Any  # scales of groups
    K_CODES: str  # how words encode numbers; "" if words are numbers
    V_CODES: str
    K_PER_WORD: int  # numbers in a word
    V_PER_WORD: int
    K_SCALED: bool  # each token or block has a scale
    V_SCALED: bool
    K_ZERO: bool  # each token also has a zero point
    V_ZERO: bool
    K_SCALE_BLOCK_STRIDE: int
    K_SCALE_HEAD_STRIDE: int
    K_SCALE_TOKEN_STRIDE: int
    V_SCALE_BLOCK_STRIDE: int
    V_SCALE_HEAD_STRIDE: int
    V_SCALE_TOKEN_STRIDE: int
    QK_DTYPE: Any  # operands of q k^T
    PV_DTYPE: Any  # operands of p v
    NORMALIZE: bool  # rows of queries are scaled to fit float16
    MAX_QUERIES: int  # the most query tokens of a sequence that is decoded
    ALONE: bool  # no prefill is launched: decode has every sequence
    ROWS: int
    MERGE_ROWS: int  # rows whose splits one program merges
    TILE: int
    LOOP_STAGES: int
    PLAN: int  # sequences that are read together
    MIN_SHARE: int  # the fewest tiles that a program takes, unless no more are left
    REGISTERS: int  # a limit for each thread; 0 for none
    EDGES: bool  # keys that every row sees have a separate loop

    def in_language(self, language: Any) -> Static:
        """Return the same as constants of `language`: `triton.language` or a stand-in for it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("K_STORED", "V_STORED", "GROUPS_STORED", "QK_DTYPE", "PV_DTYPE"):
            fields[name] = getattr(language, fields[name])
        return Static(**{name: language.constexpr(value) for name, value in fields.items()})


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel of a call.

    Attributes:
      kernel: a name in `Kernels`.
      inputs: names of buffers: operands of the call, or outputs of earlier launches. An operand
        that the call does not have is replaced by another, which the kernel does not read.
        Arguments bind by position: a test compares these names with the kernel's parameters.
      numbers: integers, after the inputs.
      outputs: `(name, shape, dtype)`, after the numbers.
      aliases: outputs that are written over an input, as indices.
      grid: programs.
      constants: static arguments.
      tiles: sizes.
    """

    kernel: str
    inputs: tuple[str, ...]
    numbers: dict[str, int]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    aliases: dict[int, int]
    grid: tuple[int, ...]
    constants: Static
    tiles: Tiles


def _strides(call: calls.Call, dim: int) -> tuple[int, int, int]:
    """Elements from one block, KV head and token to the next, where a token has `dim` of a head."""
    heads, tokens = call.num_kv_heads, call.block_size
    if call.rows is not None:
        count, width = call.rows.count, call.rows.width
        return tokens * count * width, width, count * width
    if call.kv_layout == "NHD":
        return tokens * heads * dim, dim, heads * dim
    return tokens * heads * dim, tokens * dim, dim


def _scale_strides(call: calls.Call, format: formats.Format) -> tuple[int, int, int]:
    """The strides of scales per block or token, and of zero points."""
    if format.per == "block":
        return call.num_kv_heads, 1, 0
    return _strides(call, 1) if format.per == "token" else (0, 0, 0)


def stored_as(format: formats.Format, gpu: machine.Machine) -> tuple[str, str, int]:
    """Return how kernels load words: as which dtype and which CODES, and how many numbers of each.

    CODES are those of `pools.numbers_of`.
    """
    codes = needs.codes_of(format, gpu.sm)
    if codes in needs.UNPACKED:
        return "uint32", codes, needs.numbers_of_four_bytes(format)
    return format.triton_dtype, codes, 1


def _static(call: calls.Call, gpu: machine.Machine, tiles: Tiles, limit: int) -> Static:
    """Return a kernel's constants with these tiles, if up to `limit` query tokens are decoded."""
    d0, d1 = tiling.parts_of(call, gpu, call.head_dim)
    v0, v1 = tiling.parts_of(call, gpu, call.value_dim)
    key, value = call.key_format, call.value_format
    k_stored, k_codes, k_per_word = stored_as(key, gpu)
    v_stored, v_codes, v_per_word = stored_as(value, gpu)
    k_block, k_head, k_token = _strides(call, call.head_dim // k_per_word)
    of_values = call.head_dim if call.values_in_keys else call.value_dim
    v_block, v_head, v_token = _strides(call, of_values // v_per_word)
    ks_block, ks_head, ks_token = _scale_strides(call, key)
    vs_block, vs_head, vs_token = _scale_strides(call, value)
    qk, pv = tiling.dot_dtypes(call)
    return Static(
        CAUSAL={True: 1, False: 0, None: 2}[call.is_causal],
        HAS_WINDOW="sliding_window" in call.options,
        HAS_CHUNK="attention_chunk_size" in call.options,
        HAS_CAP="logits_soft_cap" in call.options,
        HAS_SINKS="sinks" in call.options or call.sinks_per_token,
        SINKS_PER_TOKEN=call.sinks_per_token,
        HAS_SLOPES="alibi_slopes" in call.options,
        HAS_END="visible_end" in call.options,
        BIAS_COLUMNS=call.bias_columns,
        TREE_WORDS=call.tree_words,
        SELECTED=call.num_selected > 0,
        HAS_K_SCALE="k_scale" in call.options,
        HAS_V_SCALE="v_scale" in call.options,
        GROUP=call.group,
        BLOCK_SIZE=call.block_size,
        D=call.head_dim,
        D0=d0,
        D1=d1,
        V=call.value_dim,
        V0=v0,
        V1=v1,
        V_ALL=power_of_two(call.value_dim),
        K_BLOCK_STRIDE=k_block,
        K_HEAD_STRIDE=k_head,
        K_TOKEN_STRIDE=k_token,
        V_BLOCK_STRIDE=v_block,
        V_HEAD_STRIDE=v_head,
        V_TOKEN_STRIDE=v_token,
        V_START=0 if call.rows is None else call.rows.value_start,
        K_STORED=k_stored,
        V_STORED=v_stored,
        GROUPS_STORED="uint8" if gpu.sm < needs.E4M3_SM else "float8e4nv",
        K_CODES=k_codes,
        V_CODES=v_codes,
        K_PER_WORD=k_per_word,
        V_PER_WORD=v_per_word,
        K_SCALED=key.per in ("block", "token"),
        V_SCALED=value.per in ("block", "token"),
        K_ZERO=key.zero_point,
        V_ZERO=value.zero_point,
        K_SCALE_BLOCK_STRIDE=ks_block,
        K_SCALE_HEAD_STRIDE=ks_head,
        K_SCALE_TOKEN_STRIDE=ks_token,
        V_SCALE_BLOCK_STRIDE=vs_block,
        V_SCALE_HEAD_STRIDE=vs_head,
        V_SCALE_TOKEN_STRIDE=vs_token,
        QK_DTYPE=qk,
        PV_DTYPE=pv,
        # A bfloat16 query has a larger range than the float16 it is multiplied in.
        NORMALIZE=qk == "float16" and call.query_dtype == "bfloat16",
        MAX_QUERIES=min(call.max_query_len, limit),
        ALONE=call.max_query_len <= limit,
        ROWS=tiles.rows,
        # 8 splits of this many rows are 4096 numbers, 32 for each of 128 threads.
        MERGE_ROWS=min(tiles.rows, max(1, 512 // power_of_two(call.value_dim))),
        TILE=tiles.keys,
        LOOP_STAGES=tiles.stages,
        PLAN=128 if call.num_seqs <= 128 else 1024,
        # Fewer keys than this are not worth a program.
        MIN_SHARE=max(1, 128 // tiles.keys),
        REGISTERS=tiling.registers(call, gpu, tiles),
        EDGES=tiling.masks_edges_only(call, gpu),
    )


def launches(call: calls.Call, gpu: machine.Machine) -> tuple[Launch, ...]:
    """Return the kernels of a call, in order; the last outputs "out" and "lse" are its result."""
    tiles = tiling.decode_tiles(call, gpu)
    limit = tiling.decode_limit(call, gpu)
    programs = gpu.cores * tiles.per_core
    static = _static(call, gpu, tiles, limit)
    numbers = {
        "num_tokens": call.num_tokens,
        "num_seqs": call.num_seqs,
        "width": call.num_selected or call.table_width,
        "num_blocks": call.num_blocks,
        "kv_heads": call.num_kv_heads,
    }
    result = (
        ("out", (call.num_tokens, call.num_heads, call.value_dim), call.out_dtype),
        ("lse", (call.num_tokens, call.num_heads), "float32"),
    )
    decode = Launch(
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
        static,
        tiles,
    )
    merge_inputs = (
        *("sequences", "is_causal", "sliding_window", "attention_chunk_size", "sinks"),
        *("selected_tokens", "v_scale", "acc", "ml", "out", "lse"),
    )
    merge = Launch(
        "merge_splits",
        merge_inputs,
        {
            "num_seqs": call.num_seqs,
            "kv_heads": call.num_kv_heads,
            "num_programs": programs,
        },
        result,
        {len(merge_inputs) - 2: 0, len(merge_inputs) - 1: 1},
        (max(programs - 1, 1), tiles.rows // static.MERGE_ROWS),
        static,
        dataclasses.replace(tiles, warps=4, stages=1),
    )
    if static.ALONE:
        return decode, merge
    tiles = tiling.prefill_tiles(call, gpu)
    rows = call.num_tokens * call.group
    prefill = Launch(
        "prefill",
        (*OPERANDS, "out", "lse"),
        numbers,
        result,
        {len(OPERANDS): 0, len(OPERANDS) + 1: 1},
        (rows // tiles.rows + call.num_seqs + 2, call.num_kv_heads),
        _static(call, gpu, tiles, limit),
        tiles,
    )
    return decode, merge, prefill


def _execute(gpu: machine.Machine, launch: Launch, buffers: dict[str, jax.Array]) -> None:
    """Launch a kernel and add its outputs to the buffers."""
    import triton.language as tl

    found = packed.call(
        getattr(kernels(), launch.kernel),
        [buffers[name] for name in launch.inputs],
        list(launch.numbers.values()),
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for _, shape, dtype in launch.outputs],
        name=f"jattn_{launch.kernel}",
        grid=launch.grid,
        num_warps=launch.tiles.warps,
        num_stages=launch.tiles.stages,
        compute_capability=gpu.sm,
        aliases=launch.aliases,
        constants={"C": launch.constants.in_language(tl)},
    )
    buffers.update(zip((name for name, _, _ in launch.outputs), found, strict=True))


def _selected(call: calls.Call, operands: calls.Operands, xp: Any) -> dict[str, Any]:
    """Return tables of only the selected blocks, their columns in whole tables, and their tokens.

    A sequence's last block counts only the tokens that it has.
    """
    if operands.selected_blocks is None:
        return {"selected_columns": None, "selected_tokens": None}
    starts, lens = operands.query_start_loc, operands.seq_lens
    first = spec.first_query_position(lens, starts[1:] - starts[:-1])
    # The last query sits at the last key, so visible ends reach no further.
    sight = operands.sight(call)._replace(visible_end=None)
    start, end = spec.key_range(first, lens - 1, lens, sight, xp)
    size, width = call.block_size, call.table_width
    columns, count = spec.selected_columns(operands.selected_blocks, start, end, size, width, xp)
    known = xp.minimum(columns, np.int32(width - 1))
    last = xp.where(columns < width, columns, np.int32(0)).max(axis=1)
    return {
        "block_tables": xp.take_along_axis(operands.block_tables, known, axis=1),
        "selected_columns": columns,
        "selected_tokens": xp.maximum((count - 1) * size + xp.minimum(lens - last * size, size), 0),
    }


def buffers_of(call: calls.Call, operands: calls.Operands, xp: Any = jnp) -> dict[str, jax.Array]:
    """Return the operands by name, as the kernels take them: `promises.marked`, except for ids.

    Another operand replaces one that is absent, and no kernel reads it. Lengths and starts are one
    array, "sequences", so that one launch makes both: int32 [B], padded to a multiple of 4, then
    [B + 1].
    """
    marked = promises.marked(call, operands, xp, ids=False)
    given: dict[str, Any] = marked._asdict()
    lens = xp.pad(marked.seq_lens, (0, -call.num_seqs % 4))
    given["sequences"] = xp.concatenate([lens, marked.query_start_loc])
    if operands.relative_bias is not None:
        # In base 2. Finite numbers stay finite: many callers hide keys with the lowest float32.
        bias, largest = operands.relative_bias, np.finfo(np.float32).max / np.float32(softmax.LOG2E)
        finite = xp.clip(bias, -largest, largest) * np.float32(softmax.LOG2E)
        given["relative_bias"] = xp.where(xp.isinf(bias), bias, finite)
    given |= _selected(call, marked, xp)
    of_keys, of_values = operands.k_quant_params, operands.v_quant_params
    if marked.value_cache is None:
        given["value_cache"], of_values = given["key_cache"], of_keys
    for name, params in (("key", of_keys), ("value", of_values)):
        given[f"{name}_groups"] = params.group_scale
        given[f"{name}_scales"], given[f"{name}_zeros"] = params.scale, params.zero
    return {name: operands.scale if given[name] is None else given[name] for name in OPERANDS}


def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """Return `(out [T, H, V] in the output dtype, lse [T, H] float32)`."""
    gpu = machine.here()
    assert gpu is not None, "the row refuses calls without a GPU"
    buffers = buffers_of(call, operands)
    for launch in launches(call, gpu):
        _execute(gpu, launch, buffers)
    return buffers["out"], buffers["lse"]
