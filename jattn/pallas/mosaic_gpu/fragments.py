"""The meaning of attention, on arrays in registers: `jattn.spec` with layouts.

A fragment is an array spread over the registers of a warpgroup, and an operation on two of them
needs both in the same layout: a number per row or per column is broadcast by hand, and positions
are made in the layout of what they are compared with. This file adds that and the online softmax.
Visibility and logits come from `spec`'s functions, traced into the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.integers import NO_LIMIT
from jattn.pallas.mosaic_gpu import compat as mgpu

Shape: TypeAlias = tuple[int, ...]


def positions(shape: Shape, axis: int, first: jax.Array, layout: Any = None) -> jax.Array:
    """int32 `shape`: `first` plus the index along `axis`."""
    layout = mgpu.WGMMA if layout is None else layout
    return mgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) + first


def along(vector: jax.Array, shape: Shape, axis: int) -> jax.Array:
    """`vector`, a number for every index along `axis`, broadcast to `shape`."""
    return lax.broadcast_in_dim(vector, shape, (axis,))


def vector(ref: Any, axis: int) -> jax.Array:
    """A number for every index along `axis` of a `wgmma` result, from a 1-d ref."""
    return mgpu.load(ref, mgpu.WGMMA.reduce(1 - axis), optimized=False)


def filled(shape: Shape, value: float, layout: Any) -> jax.Array:
    """float32 `shape`, filled with one number, in `layout`."""
    return mgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def nan_where(condition: jax.Array) -> jax.Array:
    """float32 []: NaN if the condition holds, else 0; adding it makes results NaN."""
    return jnp.where(condition, jnp.float32(jnp.nan), jnp.float32(0))


def sight_inputs(call: calls.Call, operands: calls.Operands) -> spec.Sight:
    """The call's sight as a kernel takes it: its numbers as arrays [1], without `is_causal`.

    If that differs between sequences, the plan has it.
    """
    sight = operands.sight(call)._replace(is_causal=None)
    return jax.tree.map(lambda number: number.reshape(1), sight)


def sight(inputs: spec.Sight, is_causal: bool | jax.Array) -> spec.Sight:
    """The sight in a kernel: the numbers of `sight_inputs`, read here."""
    numbers = jax.tree.map(lambda ref: ref[0], inputs)
    return numbers._replace(is_causal=is_causal)


def visible(q_pos: jax.Array, k_pos: jax.Array, seq_len: jax.Array, sight: spec.Sight) -> jax.Array:
    """`spec.visible` of two fragments of one layout.

    The sight's `is_causal` is a bool, or int32 [], 0 or 1 (a bool scalar does not lower next to
    fragments).
    """
    causal = sight.is_causal
    if isinstance(causal, bool):
        return spec.visible(q_pos, k_pos, seq_len, sight)
    # To the causal rule, a query that is not causal is one that stands past every key.
    ahead_ok = k_pos <= q_pos + (1 - causal) * NO_LIMIT
    return ahead_ok & spec.visible(q_pos, k_pos, seq_len, sight._replace(is_causal=False))


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x for x of at least 1, within 2^-21; 0 for infinity.

    A float32 division calls a subroutine and spills registers around the call.
    """
    root = lax.rsqrt(x)
    return root * root


def tanh(x: jax.Array) -> jax.Array:
    """tanh from exp2, within `spec.TANH_ERROR`."""
    return 1.0 - 2.0 * reciprocal(1.0 + jnp.exp2(x * (2 * softmax.LOG2E)))


@dataclasses.dataclass(frozen=True)
class Online:
    """The online softmax of rows along one axis of the logits.

    Logits may come as `x` and a positive factor of each row, [rows] or one for all: they are
    `x * factor`, largest where x is. A product and a difference are then one instruction, which
    rounds once although the maximum was rounded too: weights of logits beyond 2^31 may be infinite.

    Attributes:
      axis: of the rows: 0 or, where logits are transposed, 1.
      exp: of the logits' base.
      floor: where maxima start. A finite one is below every logit, and no difference is ever NaN.
    """

    axis: int
    exp: Callable[[jax.Array], jax.Array]
    floor: float

    @property
    def layout(self) -> Any:
        """The layout of a number for each row."""
        return mgpu.WGMMA.reduce(1 - self.axis)

    def empty(self, rows: int, *accumulated: Shape) -> tuple[jax.Array, ...]:
        """`(m, l, *acc)` of rows that have seen nothing, l a number for each row."""
        return (
            filled((rows,), self.floor, self.layout),
            filled((rows,), 0.0, self.layout),
            *(filled(shape, 0.0, mgpu.WGMMA) for shape in accumulated),
        )

    def maxima(self, m: jax.Array, x: jax.Array, factor: jax.Array | None = None) -> jax.Array:
        """The rows' maxima, over more logits than before."""
        top = x.max(axis=1 - self.axis)
        return jnp.maximum(m, top if factor is None else top * factor)

    def weights(self, x: jax.Array, m: jax.Array, factor: jax.Array | None = None) -> jax.Array:
        """The weights of the keys' values, at the maxima m."""
        if factor is not None:
            x = x * (along(factor, x.shape, self.axis) if factor.ndim else factor)
        return self.exp(x - along(self._base(m), x.shape, self.axis))

    def shrink(self, m: jax.Array, m_new: jax.Array) -> jax.Array:
        """The factor that rescales sums accumulated at the maxima m."""
        return self.exp(m - self._base(m_new))

    def update(
        self, m: jax.Array, x: jax.Array, factor: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Add logits: `(m, weights, shrink)`; the caller then uses `sums` and `rescale`."""
        m_new = self.maxima(m, x, factor)
        shrink = self.shrink(m, m_new)
        return m_new, self.weights(x, m_new, factor), shrink

    def sums(self, l: jax.Array, weights: jax.Array, shrink: jax.Array) -> jax.Array:
        """The rows' sums of weights, over more keys than before."""
        return l * shrink + weights.sum(axis=1 - self.axis)

    def rescale(self, acc: jax.Array, shrink: jax.Array) -> jax.Array:
        """The accumulated sums times a factor for each row."""
        return acc * along(shrink, acc.shape, self.axis)

    def merge(
        self, a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The partial result `(m, l, acc)` over the keys of both."""
        m = jnp.maximum(a[0], b[0])
        keep, gain = self.shrink(a[0], m), self.shrink(b[0], m)
        acc = self.rescale(a[2], keep) + self.rescale(b[2], gain)
        return m, a[1] * keep + b[1] * gain, acc

    def _base(self, m: jax.Array) -> jax.Array:
        return m if np.isfinite(self.floor) else softmax.finite_max(m)


def finish(m: jax.Array, l: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`(factor, lse)` of rows in base 2: `out = acc * factor`, the lse natural.

    Zeros and -inf, or the sink, for rows that have seen nothing.
    """
    rescale = None
    if sink is not None:
        top = jnp.maximum(m, sink)
        base = softmax.finite_max(top)  # also for an empty row with a sink of -inf
        rescale = jnp.exp2(m - base)
        m, l = top, l * rescale + jnp.exp2(sink - base)
    seen = l != 0.0  # NaN counts as seen: a row of NaN must not pass for an empty one
    safe = jnp.where(seen, l, jnp.ones_like(l))
    factor = reciprocal(safe)
    if rescale is not None:
        factor = factor * rescale
    lse = (m + jnp.log(safe) * softmax.LOG2E) * (1 / softmax.LOG2E)
    return factor, jnp.where(seen, lse, jnp.full_like(lse, -jnp.inf))
