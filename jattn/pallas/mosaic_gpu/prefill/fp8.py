"""fp8 tiles for the prefill kernel of head sizes up to 256: copied as they are, widened once.

The copies bring fp8, half the bytes; both warpgroups multiply by one float16 tile of K and one of
V. Warpgroup 0 widens keys and warpgroup 1 values, each while its own products run on the tensor
cores, and each what the other will need first:

    warpgroup 0:  s = q k(i)^T | softmax                  | acc += p v(i), widens k(i + 1) | ...
    warpgroup 1:  softmax      | acc += p v(i - 1) | s = q k(i)^T, widens v(i) | softmax   | ...

| buffer | written by | read by | handed over by |
|---|---|---|---|
| k[stage], v[stage]: fp8 | producer's copies | warpgroup 0; 1 | ready; back by free |
| wide_k | warpgroup 0 | both | handed[WIDE + 0] to warpgroup 1; back by handed[READ + 0] |
| wide_v | warpgroup 1, zeros in its tail | both | handed[WIDE + 1], handed[READ + 1] |
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import fp8 as mosaic_fp8
from jattn.pallas.mosaic_gpu.prefill import parts, plan
from jattn.pallas.mosaic_gpu.prefill import tiles as tiling

KEYS, VALUES = 0, 1  # which warpgroup widens them
# Barriers of `handed`: a tile is there, a tile was read. In one array, because a warpgroup keeps a
# register of phases for each array.
WIDE, READ = 0, 2


class Widened:
    """What `mosaic_prefill` asks of tiles that come as fp8."""

    @staticmethod
    def scratch(call, tiles, dtype):
        """The tiles, and the barriers by which consumers hand them over."""
        stored = call.key_format.value_dtype
        k, v = (tiles.block_kv, tiles.head_dim), (tiles.block_kv, tiles.value_dim)
        d_swizzle, v_swizzle = tiling.swizzle_of(tiles.head_dim), tiling.value_swizzle(tiles)
        return {
            "k": mgpu.swizzled((tiles.stages, *k), stored, d_swizzle // 2),
            "v": mgpu.swizzled((tiles.stages, *v), stored, v_swizzle // 2),
            "wide_k": mgpu.swizzled((1, *k), dtype, d_swizzle),
            "wide_v": mgpu.swizzled((1, *v), dtype, v_swizzle),
            "free": mgpu.Barrier(num_barriers=2 * tiles.stages),
            "handed": mgpu.Barrier(num_barriers=4),
        }

    def __init__(self, tiles, work, w, scratch):
        self.tiles, self.work, self.w, self.scratch = tiles, work, w, scratch
        self.steps = work.steps(tiles)

    def _wide(self, name, step):
        """The float16 tile."""
        return self.scratch["wide_" + name].at[parts.anew(jnp.int32(0), step)]

    def _widen(self, side, step):
        """One tile, once it has arrived; its place in the ring is free again."""
        name = "kv"[side]
        stage = lax.rem(step, self.tiles.stages)
        place = side * self.tiles.stages + stage
        wide = self._wide(name, step)
        _wait_for_copies(self.scratch["ready"].at[place])
        columns = (self.tiles.head_dim, self.tiles.value_dim)[side]
        piece = tiling.swizzle_of(columns) // 2
        mosaic_fp8.widen(self.scratch[name].at[stage], wide, piece)
        mgpu.barrier_arrive(self.scratch["free"].at[place])
        if side == VALUES:
            block_kv = self.tiles.block_kv
            owned = self.work[plan.UNOWNED] - (self.work[plan.BASE] + step * block_kv)

            @pl.when(owned < block_kv)
            def _():
                parts.clear_rows(wide, owned, block_kv, columns)

        mgpu.barrier_arrive(self.scratch["handed"].at[WIDE + side])

    def begin(self):
        """Before the first step."""

        @pl.when((self.w == KEYS) & (self.steps > 0))
        def _():
            self._widen(KEYS, jnp.int32(0))

    def keys(self, step):
        """A tile's keys, once they are there."""
        pl.when(self.w == VALUES)(lambda: mgpu.barrier_wait(self.scratch["handed"].at[WIDE + KEYS]))
        return self._wide("k", step)

    def beside_logits(self, step):
        """While the tensor cores make logits."""

        @pl.when(self.w == VALUES)
        def _():
            @pl.when(step > 0)
            def _():
                mgpu.barrier_wait(self.scratch["handed"].at[READ + VALUES])

            self._widen(VALUES, step)

    def keys_read(self, step):
        """Hand the keys back."""
        pl.when(self.w == VALUES)(
            lambda: mgpu.barrier_arrive(self.scratch["handed"].at[READ + KEYS])
        )

    def await_values(self, step):
        """Until a tile's values are there."""
        pl.when(self.w == KEYS)(lambda: mgpu.barrier_wait(self.scratch["handed"].at[WIDE + VALUES]))

    def values(self, step):
        """A tile's values, zeros where nobody owns them."""
        return self._wide("v", step)

    def beside_values(self, step):
        """While the tensor cores weigh values."""

        @pl.when(self.w == KEYS)
        def _():
            mgpu.barrier_wait(self.scratch["handed"].at[READ + KEYS])

            @pl.when(step + 1 < self.steps)
            def _():
                self._widen(KEYS, step + 1)

    def values_read(self, step):
        """Hand the values back."""
        pl.when(self.w == KEYS)(
            lambda: mgpu.barrier_arrive(self.scratch["handed"].at[READ + VALUES])
        )

    def end(self):
        """After the last step."""

        @pl.when((self.w == VALUES) & (self.steps > 0))
        def _():
            mgpu.barrier_wait(self.scratch["handed"].at[READ + VALUES])


def _wait_for_copies(ready):
    """On its own so that a test can leave it out and see the race detector notice."""
    mgpu.barrier_wait(ready)
