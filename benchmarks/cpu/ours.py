"""jattn as a contender: `jattn.paged_attention` as a user calls it, jitted, on `KVArray` caches."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.timing import seconds_of
from benchmarks.workloads import Workload, kv_bytes, make_pool, make_queries

# Decode of less than some three milliseconds is timed in a jitted step, as a model's layers run it:
# otherwise starting a program from Python would be a tenth of its time or more. For calls of tens
# of microseconds the step has as many layers as models of tens of billions of parameters: its first
# call wakes XLA's threads, and takes several times as long as the others.
STEP_BYTES, SHORT_BYTES = 64 << 20, 8 << 20
LAYERS, SHORT_LAYERS = 16, 64

PART_BLOCKS = 1024


def device_array(stored: np.ndarray) -> jax.Array:
    """Return a stored array as a JAX array of its real dtype."""
    return jnp.asarray(stored.view(jnp.bfloat16) if stored.dtype == np.uint16 else stored)


@functools.partial(jax.jit, donate_argnums=0)
def _put(pool: jattn.KVArray, blocks: jax.Array, at: jax.Array) -> jattn.KVArray:
    start = (at, *(jnp.zeros_like(at),) * (blocks.ndim - 1))
    return pool.replace(data=jax.lax.dynamic_update_slice(pool.data, blocks, start))


def caches(keys: np.ndarray, values: np.ndarray, dtype: str) -> tuple[jattn.KVArray, jattn.KVArray]:
    """Make jattn's caches, as a user does, and fill them with stored pools [N, K, S, D]."""
    num_blocks, heads, block_size, head_dim = keys.shape
    made = jattn.init_kv_cache(
        num_blocks,
        heads,
        block_size,
        head_dim,
        value_dim=values.shape[-1],
        format=jattn.Dense(dtype),
    )
    filled = []
    for pool, stored in zip(made, (keys, values), strict=True):
        for at in range(0, num_blocks, PART_BLOCKS):
            pool = _put(pool, jnp.asarray(stored[at : at + PART_BLOCKS]), jnp.int32(at))
        filled.append(pool)
    return tuple(filled)


def step_of_layers(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Jit a step: `attend` with each of the block tables, on the result of the layer before."""

    @jax.jit
    def step(query, caches, block_tables, lengths):
        def layer(query, table):
            return attend(query, *caches, block_tables=table, **lengths), None

        return jax.lax.scan(layer, query, block_tables)[0]

    return step


class Attention:
    """One workload with its data on the device, compiled at the first call."""

    def __init__(self, w: Workload, copies: int, implementation: str | None = None):
        pool = make_pool(w, copies)
        decode = w.max_query_len == 1
        self._caches = caches(pool.key_cache, pool.value_cache, w.dtype)
        self._query = device_array(make_queries(w))
        tables = [jnp.asarray(table) for table in pool.block_tables]
        self._block_tables = itertools.cycle(tables)
        layers = SHORT_LAYERS if kv_bytes(w) <= SHORT_BYTES else LAYERS
        in_steps = decode and kv_bytes(w) <= STEP_BYTES and w.value_dim == w.head_dim
        self.layers = layers if in_steps else 1
        steps = range(0, max(len(tables) - layers, 0) + 1, layers)
        tables_of_steps = [
            [tables[(i + n) % len(tables)] for n in range(self.layers)] for i in steps
        ]
        self._step_tables = itertools.cycle([jnp.stack(some) for some in tables_of_steps])
        self._lengths = {"seq_lens": jnp.asarray(w.seq_lens, jnp.int32)}
        if not decode:
            self._lengths["query_start_loc"] = jnp.asarray(w.query_start())
        static = {
            "max_query_len": w.max_query_len,
            "scale": w.scale,
            "sliding_window": w.sliding_window,
            "implementation": implementation,
        }
        self.implementation = jattn.explain(
            self._query,
            *self._caches,
            block_tables=tables[0],
            **self._lengths,
            **static,
        ).taken
        attend = functools.partial(jattn.paged_attention, **static)
        self._call, self._step = jax.jit(attend), step_of_layers(attend)

    def attend(self) -> jax.Array:
        """Run one call, on the next copy of the keys."""
        return self._call(
            self._query, *self._caches, block_tables=next(self._block_tables), **self._lengths
        )

    def step(self) -> jax.Array:
        """Run a call per layer in one program, each on the next copy and the previous result."""
        return self._step(self._query, self._caches, next(self._step_tables), self._lengths)

    def run(self, count: int) -> list[float]:
        """Return the seconds of each of `count` runs: of a call, or of a step of `layers` calls."""
        run = self.attend if self.layers == 1 else self.step
        return seconds_of(lambda: run().block_until_ready(), count)

    def result(self) -> np.ndarray:
        """Return the result [T, H, V] as stored: float32, or uint16 words."""
        out = np.asarray(self.attend())
        return out.view(np.uint16) if out.dtype == jnp.bfloat16 else out
