"""The arguments that say who sees whom beyond lengths and a window: checks, and their operands."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks
from jattn.call import arguments

# Options of `call.OPTIONS` by the name of their argument.
NAMES = (
    "attention_chunk_size",
    "visible_end",
    "tree_mask",
    "selected_blocks",
    "relative_bias",
)


def check(
    problems: checks.Problems,
    given: dict[str, Any],
    *,
    tokens: int | None,
    seqs: int | None,
    heads: int | None,
) -> None:
    """Check every mask on its own and what they mean together; None for sizes nobody knows."""
    chunk = given["attention_chunk_size"]
    if chunk is not None:
        if isinstance(chunk, numbers.Integral) and not isinstance(chunk, bool):
            ok = 1 <= chunk < 2**31
        else:
            ok = (
                arguments.is_array(chunk)
                and arguments.shape_of(chunk) == ()
                and arguments.dtype_of(chunk) == np.int32
            )
        problems.require(
            ok,
            "attention_chunk_size",
            checks.describe(chunk),
            "an integer of at least 1 or a 0-d int32",
        )
    if given["visible_end"] is not None:
        arguments.check_int32(problems, "visible_end", given["visible_end"], (tokens,), ("T",))
    if given["selected_blocks"] is not None:
        selected = given["selected_blocks"]
        good = arguments.check_int32(
            problems, "selected_blocks", selected, (seqs, None), ("B", "M'")
        )
        if good:
            problems.require(
                selected.shape[1] > 0,
                "selected_blocks",
                checks.describe(selected),
                "[B, M'] with no empty axis",
            )
    tree = given["tree_mask"]
    if tree is not None:
        problems.require(
            arguments.is_array(tree)
            and arguments.fits(tree.shape, (tokens, None))
            and tree.shape[1] > 0
            and np.dtype(tree.dtype) in (np.dtype(np.bool_), np.dtype(np.uint32)),
            "tree_mask",
            checks.describe(tree),
            "bool[T, Q], or uint32[T, W] with 32 query tokens a word"
            + arguments.axis_is("T", tokens),
        )
    bias = given["relative_bias"]
    if bias is not None:
        problems.require(
            arguments.is_array(bias)
            and arguments.fits(bias.shape, (heads, None))
            and bias.shape[1] % 2 == 1
            and jnp.issubdtype(bias.dtype, jnp.floating),
            "relative_bias",
            checks.describe(bias),
            "floating point of shape [H, 2 E + 1], distances -E to E"
            + arguments.axis_is("H", heads),
        )
    _check_together(problems, given)


def _check_together(problems: checks.Problems, given: dict[str, Any]) -> None:
    """What means nothing together."""
    causal = given["is_causal"]
    never_causal = isinstance(causal, bool | np.bool_) and not causal
    if given["visible_end"] is not None:
        problems.require(
            not never_causal,
            "visible_end",
            "given with is_causal=False",
            "None: it reaches ahead of the causal edge, and there is none",
        )
    if given["tree_mask"] is not None:
        problems.require(
            isinstance(causal, bool | np.bool_) and bool(causal),
            "tree_mask",
            f"given with is_causal = {checks.describe(causal)}",
            "None unless is_causal is True: the tokens of a path come one after another",
        )
        problems.require(
            given["visible_end"] is None,
            "tree_mask",
            "given with visible_end",
            "None: a tree says itself what a query token sees of the others",
        )
    if given["relative_bias"] is not None:
        problems.require(
            given["alibi_slopes"] is None,
            "relative_bias",
            "given with alibi_slopes",
            "None: add slope * distance to the table, or leave the slopes out",
        )


def operands(given: dict[str, Any]) -> dict[str, jax.Array | None]:
    """The arrays of checked masks, by name: every number an array, trees as packed bits."""
    found: dict[str, jax.Array | None] = dict.fromkeys(NAMES)
    for name, dtype in (
        ("attention_chunk_size", jnp.int32),
        ("visible_end", jnp.int32),
        ("selected_blocks", jnp.int32),
        ("relative_bias", jnp.float32),
    ):
        if given[name] is not None:
            found[name] = jnp.asarray(given[name], dtype)
    if given["tree_mask"] is not None:
        found["tree_mask"] = pack_bits(jnp.asarray(given["tree_mask"]))
    return found


@jax.jit
def pack_bits(mask: jax.Array) -> jax.Array:
    """bool [T, Q] as uint32 [T, W], bit `j % 32` of word `j // 32`; uint32 as it is.

    Bits past Q are set: tokens the mask has no column for are seen by all that come after them.
    """
    if mask.dtype != np.bool_:
        return mask
    tokens, columns = mask.shape
    words = -(-columns // 32)
    padded = jnp.pad(mask, ((0, 0), (0, 32 * words - columns)), constant_values=True)
    bits = padded.reshape(tokens, words, 32).astype(jnp.uint32)
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None]
    return (bits << shifts).sum(axis=-1, dtype=jnp.uint32)
