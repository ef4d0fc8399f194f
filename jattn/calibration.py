"""Calibrate the scales that some formats take from the caller, from running maxima of numbers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn import call as calls
from jattn import checks, formats, pytrees
from jattn.call import arrays
from jattn.formats import rounding


@pytrees.register()
@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """The largest magnitudes seen so far, per KV head; they only grow. A pytree of arrays.

    Attributes:
      key_max, value_max: float32 [K].
      num_tokens: int32 [], tokens observed; a dozen are too few for a good scale.
    """

    key_max: jax.Array
    value_max: jax.Array
    num_tokens: jax.Array

    def scales(
        self,
        format: formats.Format | tuple[formats.Format, formats.Format],
        *,
        per_head: bool = True,
    ) -> tuple[jax.Array, jax.Array]:
        """Return `(k_scale, v_scale)`, which map the largest number seen to the format's largest.

        Args:
          format: the format of the caches, or a pair for keys and values.
          per_head: whether to return scales [K], or one scale [] for all heads.

        Returns:
          float32 arrays for `cache.replace(scale=...)`; 1 for a head that saw only zeros, or only
          numbers too small to divide by.

        Raises:
          ValueError: the format takes no scale from the caller.
        """
        pair = format if isinstance(format, tuple) else (format, format)
        with checks.checking("Calibration.scales") as problems:
            for one in pair if len(pair) == 2 else (format,):
                problems.expect(
                    isinstance(one, formats.Format) and one.takes_scale,
                    "format",
                    one,
                    "one that takes a scale per head, or a pair of them: jattn.Fp8 or jattn.Nvfp4",
                )

        def scale(most: jax.Array, one: formats.Format) -> jax.Array:
            most = most if per_head else most.max()
            return rounding.usable_scale(most / jnp.float32(one.largest))

        return scale(self.key_max, pair[0]), scale(self.value_max, pair[1])


def calibrate(
    key: calls.Array,
    value: calls.Array,
    slot_mapping: calls.Array,
    calibration: Calibration | None = None,
) -> Calibration:
    """Add one step's keys and values to the running maxima that determine scales.

        max[head] = max(max[head], |x[t, head, :]|)   over tokens t with slot_mapping[t] >= 0

    Padded rows, NaN and infinities are ignored, so that none of them spoils a scale. The maxima
    never shrink. A scale changes what stored words mean, so call `scales` before the first write,
    or write the cache again.

    Args:
      key: [T, K, D] floats.
      value: [T, K, V] floats; pass the key again if values are a part of it (MLA).
      slot_mapping: int32 [T], as in `update_kv_cache`; a negative slot is padding.
      calibration: the result of the step before; None for the first.

    Returns:
      A `Calibration`; its `scales(format)` are the scales for the caches.

    Raises:
      ValueError: arguments do not fit each other.

    Example:
      >>> import jax.numpy as jnp, jattn
      >>> key = jnp.asarray([[[3.0, -7.0]], [[jnp.nan, 99.0]]])
      >>> seen = jattn.calibrate(key, key / 2, jnp.asarray([5, -1], jnp.int32))
      >>> k_scale, v_scale = seen.scales(jattn.Fp8("e4m3"))
      >>> k_scale * 448, int(seen.num_tokens)
      (Array([7.], dtype=float32), 1)
    """
    given = {"key": key, "value": value, "slot_mapping": slot_mapping}
    arrays.check_given("calibrate", given)
    arrays.check_numbers("calibrate", given)
    with checks.checking("calibrate") as problems:
        tokens, heads = None, None
        if arrays.is_array(key) and len(key.shape) == 3:
            tokens, heads = key.shape[:2]
        for name, x, last in (("key", key, "D"), ("value", value, "V")):
            good = arrays.matches(x, jnp.floating, (tokens, heads, None))
            problems.expect(good, name, x, f"floating point of shape [T, K, {last}]")
        arrays.check_int32(problems, "slot_mapping", slot_mapping, (tokens,), ("T",))
        problems.expect(
            calibration is None
            or (isinstance(calibration, Calibration) and calibration.key_max.shape == (heads,)),
            "calibration",
            calibration,
            f"None or a jattn.Calibration of as many heads{arrays.axis_is('K', heads)}",
        )
    valid = jnp.asarray(slot_mapping) >= 0

    def most(x: calls.Array) -> jax.Array:
        size = jnp.abs(jnp.asarray(x).astype(jnp.float32))
        counts = valid[:, None, None] & jnp.isfinite(size)
        return jnp.where(counts, size, jnp.float32(0)).max(axis=(0, 2), initial=np.float32(0))

    key_max, value_max = most(key), most(value)
    num_tokens = valid.sum(dtype=jnp.int32)
    if calibration is None:
        return Calibration(key_max, value_max, num_tokens)
    return Calibration(
        jnp.maximum(calibration.key_max, key_max),
        jnp.maximum(calibration.value_max, value_max),
        calibration.num_tokens + num_tokens,
    )
