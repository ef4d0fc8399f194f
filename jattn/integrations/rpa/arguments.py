"""Helpers that these functions share: checks of arguments, and numbers as arrays."""

from __future__ import annotations

import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn import checks
from jattn.call import arrays
from jattn.call.arguments import Number
from jattn.integers import round_up

VECTOR_SIZE = 128  # numbers in a vector: sizes in these caches are multiples of it
MASKS = -1e4  # a mask_value above it would give masked keys some weight


class Numbers(typing.NamedTuple):
    """The numbers of a call, as arrays so that none is static; None for an absent one."""

    scale: jax.Array | None
    q_scale: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sliding_window: jax.Array | None
    logits_soft_cap: jax.Array | None
    sinks: jax.Array | None  # [H]

    @classmethod
    def of(
        cls,
        *,
        scale: Number | None = None,
        q_scale: Number | None = None,
        k_scale: Number | None = None,
        v_scale: Number | None = None,
        sliding_window: int | jax.Array | None = None,
        logits_soft_cap: Number | None = None,
        sinks: jax.Array | None = None,
    ) -> Numbers:
        """Make arrays of the numbers that a caller gave."""

        def array(x: Number | None, dtype: DTypeLike = jnp.float32) -> jax.Array | None:
            return None if x is None else jnp.asarray(x, dtype)

        return cls(
            *(array(scale), array(q_scale), array(k_scale), array(v_scale)),
            *(array(sliding_window, jnp.int32), array(logits_soft_cap), array(sinks)),
        )


def up_to_vectors(size: int) -> int:
    """Round `size` up to whole vectors of a TPU."""
    return round_up(size, VECTOR_SIZE)


def packing(dtype: DTypeLike) -> int:
    """Return how many numbers 32 bits hold."""
    return 4 // np.dtype(dtype).itemsize


def product(*factors: Number | None) -> Number:
    """Multiply the factors that are not None, of which there is at least one."""
    return functools.reduce(lambda x, y: x * y, (x for x in factors if x is not None))


def check_common(
    problems: checks.Problems,
    sliding_window: int | jax.Array | None,
    soft_cap: Number | None,
    mask_value: float | None,
    debug_mode: bool,
) -> None:
    """Report meaningless numbers, and options that cannot have their effect here."""
    for name, x in (("sliding_window", sliding_window), ("soft_cap", soft_cap)):
        problems.require(
            x is None or isinstance(x, jax.Array) or bool(x > 0), name, f"{x}", "positive, or None"
        )
    problems.require(
        mask_value is None or mask_value <= MASKS,
        "mask_value",
        f"{mask_value}",
        f"None, or at most {MASKS:g}, so that masked keys have no weight",
    )
    problems.require(not debug_mode, "debug_mode", "True", "False: jattn prints nothing")


def check_step(
    problems: checks.Problems,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
) -> None:
    """Report queries, keys and values of a wrong shape, and keys and values of another dtype."""
    good = problems.expect(
        arrays.is_array(queries) and len(queries.shape) == 3, "queries", queries, "[T, H, D]"
    )
    tokens, heads, dim = queries.shape if good else (None, None, None)
    want: arrays.Shape = (tokens, None, dim)
    if not problems.expect(arrays.is_array(kv_cache), "kv_cache", kv_cache, "an array"):
        return  # the checks below need its dtype
    for name, x in (("keys", keys), ("values", values)):
        fits = problems.expect(
            arrays.matches(x, jnp.floating, want) and x.dtype == kv_cache.dtype,
            name,
            x,
            f"[T, K, D] of kv_cache's dtype, {np.dtype(kv_cache.dtype).name}"
            + arrays.axis_is("T", tokens)
            + arrays.axis_is("K", want[1])
            + arrays.axis_is("D", dim),
        )
        if fits and name == "keys":
            count = x.shape[1]
            want = (tokens, count, dim)
            problems.require(
                heads is None or (count > 0 and heads % count == 0),
                "queries",
                f"{heads} heads",
                f"a multiple of the {count} heads of keys",
            )


def check_batch(
    problems: checks.Problems,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array | None = None,
    *,
    flat: bool = True,
) -> None:
    """Report wrong integers of a step, by their names in these functions.

    Args:
      flat: whether the block tables may be flat, int32 [B * M]; else they must be int32 [B, M].
    """
    good = arrays.check_int32(problems, "kv_lens", kv_lens, (None,), ("B",))
    rows = kv_lens.shape[0] if good else None
    starts = None if rows is None else rows + 1
    arrays.check_int32(problems, "cu_q_lens", cu_q_lens, (starts,), ("B + 1",))
    shapes = ((rows, None), (None,)) if flat else ((rows, None),)
    problems.expect(
        arrays.matches(page_indices, np.int32, *shapes)
        and (not rows or math.prod(page_indices.shape) % rows == 0),
        "page_indices",
        page_indices,
        ("int32[B * M]" if flat else "int32[B, M]") + arrays.axis_is("B", rows),
    )
    if distribution is not None:
        arrays.check_int32(problems, "distribution", distribution, (3,), ("3",))


def check_cache(
    problems: checks.Problems, kv_cache: jax.Array, token: tuple[int, ...], text: str
) -> None:
    """Report a cache whose tokens do not have the shape `token`, described by `text`."""
    problems.expect(
        len(kv_cache.shape) == 2 + len(token) and tuple(kv_cache.shape[2:]) == token,
        "kv_cache",
        kv_cache,
        f"{text} = [N, S, {', '.join(map(str, token))}]",
    )


def widened(x: jax.Array) -> jax.Array:
    """Widen 8-bit floats, which the caller quantized, to bfloat16, which can hold each exactly.

    The native kernel takes queries, and keys and values to write, in bfloat16.
    """
    return x.astype(jnp.bfloat16) if x.dtype.itemsize == 1 else x
