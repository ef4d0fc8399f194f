"""fp8 tiles for the prefill kernel of head sizes up to 256: copied unchanged, widened once.

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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import fp8
from jattn.pallas.mosaic_gpu.prefill import parts
from jattn.pallas.mosaic_gpu.prefill import tiles as tiling

KEYS, VALUES = 0, 1  # which warpgroup widens them
# Barriers of `handed`: a tile is there, a tile was read. In one array, because a warpgroup keeps a
# register of phases for each array.
WIDE, READ = 0, 2


class Widened(parts.Feed):
    """Tiles that come as fp8."""

    def _wide(self, name: str, step: jax.Array) -> Any:
        """The float16 tile."""
        return self.refs["wide_" + name].at[parts.recomputed(jnp.int32(0), step)]

    def _widen(self, which: int, step: jax.Array) -> None:
        """Widen a tile once it has arrived, and free its place in the ring."""
        name = "kv"[which]
        stage = lax.rem(step, self.tiles.stages)
        place = which * self.tiles.stages + stage
        wide = self._wide(name, step)
        _wait_for_copies(self.refs["ready"].at[place])
        columns = (self.tiles.head_dim, self.tiles.value_dim)[which]
        width = tiling.swizzle_of(columns) // 2
        fp8.widen(self.refs[name].at[stage], wide, width)
        mgpu.barrier_arrive(self.refs["free"].at[place])
        if which == VALUES:
            block_kv = self.tiles.block_kv
            owned = self.owned(step)

            @pl.when(owned < block_kv)
            def _() -> None:
                parts.clear_rows(wide, owned, block_kv, columns)

        mgpu.barrier_arrive(self.refs["handed"].at[WIDE + which])

    def begin(self) -> None:
        @pl.when((self.w == KEYS) & (self.steps > 0))
        def _() -> None:
            self._widen(KEYS, jnp.int32(0))

    def await_keys(self, step: jax.Array) -> None:
        pl.when(self.w == VALUES)(lambda: mgpu.barrier_wait(self.refs["handed"].at[WIDE + KEYS]))

    def keys(self, step: jax.Array) -> Any:
        return self._wide("k", step)

    def during_logits(self, step: jax.Array) -> None:
        @pl.when(self.w == VALUES)
        def _() -> None:
            @pl.when(step > 0)
            def _() -> None:
                mgpu.barrier_wait(self.refs["handed"].at[READ + VALUES])

            self._widen(VALUES, step)

    def keys_read(self, step: jax.Array) -> None:
        pl.when(self.w == VALUES)(lambda: mgpu.barrier_arrive(self.refs["handed"].at[READ + KEYS]))

    def await_values(self, step: jax.Array) -> None:
        pl.when(self.w == KEYS)(lambda: mgpu.barrier_wait(self.refs["handed"].at[WIDE + VALUES]))

    def values(self, step: jax.Array) -> Any:
        return self._wide("v", step)

    def during_values(self, step: jax.Array) -> None:
        @pl.when(self.w == KEYS)
        def _() -> None:
            mgpu.barrier_wait(self.refs["handed"].at[READ + KEYS])

            @pl.when(step + 1 < self.steps)
            def _() -> None:
                self._widen(KEYS, step + 1)

    def values_read(self, step: jax.Array) -> None:
        pl.when(self.w == KEYS)(lambda: mgpu.barrier_arrive(self.refs["handed"].at[READ + VALUES]))

    def end(self) -> None:
        @pl.when((self.w == VALUES) & (self.steps > 0))
        def _() -> None:
            mgpu.barrier_wait(self.refs["handed"].at[READ + VALUES])


def _wait_for_copies(ready: Any) -> None:
    """Wait. It is a function so that a test can leave it out and see the race detector notice."""
    mgpu.barrier_wait(ready)
