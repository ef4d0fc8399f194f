"""The arguments that limit visibility beyond lengths and a window, and their checks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks
from jattn.call import arrays
from jattn.call.arguments import Arguments, ArrayOrStruct
from jattn.integers import ceil_div


def check(
    problems: checks.Problems,
    given: Arguments[ArrayOrStruct],
    *,
    tokens: int | None,
    seqs: int | None,
    heads: int | None,
) -> None:
    """Check mask arrays, and that they make sense together; sizes are None if unknown."""
    if given.visible_end is not None:
        arrays.check_int32(problems, "visible_end", given.visible_end, (tokens,), ("T",))
    selected = given.selected_blocks
    if selected is not None and arrays.check_int32(
        problems, "selected_blocks", selected, (seqs, None), ("B", "M'")
    ):
        problems.expect(
            arrays.shape_of(selected)[1] > 0,
            "selected_blocks",
            selected,
            "[B, M'] with no empty axis",
        )
    tree = given.tree_mask
    if tree is not None:
        problems.expect(
            arrays.is_array(tree)
            and arrays.fits(tree.shape, (tokens, None))
            and tree.shape[1] > 0
            and np.dtype(tree.dtype) in (np.dtype(np.bool_), np.dtype(np.uint32)),
            "tree_mask",
            tree,
            "bool[T, Q], or uint32[T, W] with 32 query tokens a word" + arrays.axis_is("T", tokens),
        )
    bias = given.relative_bias
    if bias is not None:
        problems.expect(
            arrays.matches(bias, jnp.floating, (heads, None)) and bias.shape[1] % 2 == 1,
            "relative_bias",
            bias,
            "floating point of shape [H, 2 E + 1], distances -E to E" + arrays.axis_is("H", heads),
        )
    _check_together(problems, given)


def _check_together(problems: checks.Problems, given: Arguments[ArrayOrStruct]) -> None:
    """Refuse combinations of masks that have no meaning."""
    if given.visible_end is not None:
        problems.require(
            given.static_causal is not False,
            "visible_end",
            "given with is_causal=False",
            "None: it reaches ahead of the causal edge, and there is none",
        )
    if given.tree_mask is not None:
        problems.require(
            given.static_causal is True,
            "tree_mask",
            f"given with is_causal = {checks.describe(given.is_causal)}",
            "None unless is_causal is True: the tokens of a path follow each other",
        )
        problems.require(
            given.visible_end is None,
            "tree_mask",
            "given with visible_end",
            "None: tree_mask already defines which draft tokens a query sees",
        )
    if given.relative_bias is not None:
        problems.require(
            given.alibi_slopes is None,
            "relative_bias",
            "given with alibi_slopes",
            "None: add slope * distance to the table, or leave the slopes out",
        )


def sizes(given: Arguments[ArrayOrStruct]) -> dict[str, int]:
    """Return the sizes of checked masks that a `Call` records."""
    found = dict[str, int]()
    if given.tree_mask is not None:
        columns = arrays.shape_of(given.tree_mask)[1]
        packed = arrays.dtype_of(given.tree_mask) == np.uint32
        found["tree_words"] = columns if packed else ceil_div(columns, 32)
    if given.relative_bias is not None:
        found["bias_columns"] = arrays.shape_of(given.relative_bias)[1]
    if given.selected_blocks is not None:
        found["num_selected"] = arrays.shape_of(given.selected_blocks)[1]
    return found


@jax.jit
def pack_bits(mask: jax.Array) -> jax.Array:
    """Pack bool [T, Q] into uint32 [T, W], bit `j % 32` of word `j // 32`; return uint32 unchanged.

    Bits past Q are set: tokens without a column in the mask are seen by all later ones.
    """
    if mask.dtype != np.bool_:
        return mask
    tokens, columns = mask.shape
    words = ceil_div(columns, 32)
    padded = jnp.pad(mask, ((0, 0), (0, 32 * words - columns)), constant_values=True)
    bits = padded.reshape(tokens, words, 32).astype(jnp.uint32)
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None]
    return (bits << shifts).sum(axis=-1, dtype=jnp.uint32)
