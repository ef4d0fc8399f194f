"""The online softmax: partial results of one row, and the one operator that merges them.

A partial result over some of a row's keys is `(m, l, acc)` with

    m = max_j s_j      l = sum_j exp(s_j - m)      acc = sum_j exp(s_j - m) v_j

    init -> update for each tile of keys -> merge with other partial results -> finish

Partial results over disjoint keys merge in any order. So do finished ones, `lse = m + log l` and
`out = acc / l`: split KV, shared prefixes, context parallelism and sinks are all this operator.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import checks

# The GPU kernels keep logits in base 2: exp2 is what the hardware has.
LOG2E = math.log2(math.e)


class Partial(typing.NamedTuple):
    """Softmax state of rows `[...]`: `m`, `l` [...], `acc` [..., V], float32."""

    m: jax.Array
    l: jax.Array
    acc: jax.Array


def init(rows: tuple[int, ...], value_dim: int) -> Partial:
    """The state of rows that have seen nothing."""
    return Partial(
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, value_dim), jnp.float32),
    )


def update(
    state: Partial, logits: jax.Array, weigh_values: Callable[[jax.Array], jax.Array]
) -> Partial:
    """Return the state after more keys.

    Args:
      state: of rows [...].
      logits: float32 [..., C], -inf for keys that are not seen.
      weigh_values: takes the weights `p = exp(logits - m)` and returns `sum_j p_j v_j`, [..., V].
    """
    m = jnp.maximum(state.m, logits.max(axis=-1))
    p = jnp.exp(logits - finite_max(m)[..., None])
    rescale = jnp.exp(state.m - finite_max(m))
    acc = state.acc * rescale[..., None] + weigh_values(p)
    return Partial(m, state.l * rescale + p.sum(axis=-1), acc)


def merge(a: Partial, b: Partial) -> Partial:
    """The state over both sets of keys."""
    m = jnp.maximum(a.m, b.m)
    keep_a = jnp.exp(a.m - finite_max(m))
    keep_b = jnp.exp(b.m - finite_max(m))
    return Partial(
        m,
        a.l * keep_a + b.l * keep_b,
        a.acc * keep_a[..., None] + b.acc * keep_b[..., None],
    )


def finite_max(m: jax.Array) -> jax.Array:
    """`m`, or 0 where it is -inf: subtracting it then gives exp(-inf) = 0 and never NaN."""
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def finish(state: Partial, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return `(out [..., V], lse [...])`, adding the sink [...] to the denominator only.

    A row that has seen nothing returns zeros and -inf, or zeros and its sink.
    """
    m, l, acc = state
    if sink is not None:
        m_new = jnp.maximum(m, sink)
        base = finite_max(m_new)
        rescale = jnp.exp(m - base)
        m, l, acc = m_new, l * rescale + jnp.exp(sink - base), acc * rescale[..., None]
    seen = l != 0  # NaN counts as seen: a row of NaN must not pass for an empty row
    safe_l = jnp.where(seen, l, jnp.ones_like(l))
    out = acc * (1 / safe_l)[..., None]
    lse = jnp.where(seen, m + jnp.log(safe_l), jnp.full_like(m, -jnp.inf))
    return out, lse


def merge_attention_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    r"""Merge two attention results over disjoint keys into the result over all of them.

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Associative and commutative, with `(zeros, -inf)` as its neutral element; a sink joins as the
    result `(zeros, sink)`.

    Args:
      out_a, out_b: [..., V], any float dtype; computed in float32, returned in `out_a`'s dtype.
      lse_a, lse_b: [...] float32, natural logarithm.

    Returns:
      `(out [..., V], lse [...])`. Rows that saw nothing in either are zeros and -inf. Numbers of
      `out_a` and `out_b` where the lse is -inf reach neither the result nor its gradients.

    Raises:
      ValueError: an argument is not an array, or shapes or dtypes do not fit together.

    Example:
      >>> import jax.numpy as jnp
      >>> out, lse = merge_attention_states(
      ...     jnp.ones((2, 4)), jnp.zeros(2), jnp.zeros((2, 4)), jnp.full(2, -jnp.inf))
      >>> float(out[0, 0]), float(lse[0])
      (1.0, 0.0)
    """
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    with checks.checking("merge_attention_states") as problems:
        for name, x in given.items():
            is_array = isinstance(x, jax.Array | np.ndarray)
            is_struct = isinstance(x, jax.ShapeDtypeStruct)
            what = repr(x) if is_struct else checks.describe(x)
            problems.require(is_array, name, what, "an array")
        if isinstance(out_a, jax.Array | np.ndarray):
            problems.expect(out_a.ndim > 0, "out_a", out_a, "of shape [..., V]")
    with checks.checking("merge_attention_states") as problems:
        for name, x, shape in (
            ("out_b", out_b, out_a.shape),
            ("lse_a", lse_a, out_a.shape[:-1]),
            ("lse_b", lse_b, out_a.shape[:-1]),
        ):
            problems.expect(x.shape == shape, name, x, f"of shape {list(shape)}, to match out_a")
        for name, x in given.items():
            problems.expect(jnp.issubdtype(x.dtype, jnp.floating), name, x, "floating point")
    return merge_results([(out_a, lse_a), (out_b, lse_b)])


def merge_results(
    parts: Sequence[tuple[jax.Array, jax.Array]], axis_name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Merge all `parts` into `(out, lse)`; with an axis, those of every device along it.

        m = max_i lse_i      l = sum_i exp(lse_i - m)
        lse = m + log l      out = sum_i exp(lse_i - m) out_i / l

    The dtype is that of the first part.
    """
    lses = [lse.astype(jnp.float32) for _, lse in parts]
    # The result does not depend on `m`, and `pmax` has no gradient.
    m = lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    m = finite_max(m if axis_name is None else lax.pmax(m, axis_name))
    weights = [jnp.exp(lse - m) for lse in lses]

    def share(part: tuple[jax.Array, jax.Array], weight: jax.Array) -> jax.Array:
        out, weight = part[0].astype(jnp.float32), weight[..., None]
        # Select before multiplying: 0 * NaN is not 0, in a gradient either.
        return jnp.where(weight > 0, out, jnp.zeros((), jnp.float32)) * weight

    l = functools.reduce(jnp.add, weights)
    acc = functools.reduce(jnp.add, map(share, parts, weights))
    if axis_name is not None:
        l, acc = lax.psum((l, acc), axis_name)
    out, lse = finish(Partial(m, l, acc), None)
    return out.astype(parts[0][0].dtype), lse
