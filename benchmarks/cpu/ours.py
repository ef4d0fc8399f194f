"""jattn's side: `jattn.paged_attention` as a user calls it, jitted, on `KVArray` caches."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.timing import seconds_of
from benchmarks.workloads import Workload, make_pool, make_queries


def device_array(stored: np.ndarray) -> jax.Array:
    """A stored array as a JAX array of the dtype that it means."""
    return jnp.asarray(stored.view(jnp.bfloat16) if stored.dtype == np.uint16 else stored)


def cache_array(stored: np.ndarray, dtype: str) -> jattn.KVArray:
    """A stored pool as jattn's cache: its words are what the cache holds."""
    return jattn.KVArray(jnp.asarray(stored), None, jattn.Dense(dtype))


class Attention:
    """One workload with its data on the device, compiled at the first call."""

    def __init__(self, w: Workload, copies: int, implementation: str | None = None):
        pool = make_pool(w, copies)
        decode = w.max_query_len == 1
        self._caches = tuple(
            cache_array(cache, w.dtype) for cache in (pool.key_cache, pool.value_cache)
        )
        self._query = device_array(make_queries(w))
        tables = [jnp.asarray(table) for table in pool.block_tables]
        self._block_tables = itertools.cycle(tables)
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
        self._call = jax.jit(functools.partial(jattn.paged_attention, **static))

    def attend(self) -> jax.Array:
        """One call, on the next copy of the keys."""
        return self._call(
            self._query, *self._caches, block_tables=next(self._block_tables), **self._lengths
        )

    def run(self, count: int) -> list[float]:
        return seconds_of(lambda: self.attend().block_until_ready(), count)

    def result(self) -> np.ndarray:
        """[T, H, V] as stored: float32, or uint16 words."""
        out = np.asarray(self.attend())
        return out.view(np.uint16) if out.dtype == jnp.bfloat16 else out
