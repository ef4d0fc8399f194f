"""Gemma 4 over dense rows of tokens, without pages: the same model, for training and comparison.

`examples/models/gemma4.py` asks its caches to attend. `DenseCaches` attends to the rows' own keys
instead: gradients can flow through them, and they are cheap in short rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from examples.engine.model import Batch
from examples.models.gemma4 import Gemma4


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int | None,
    product: Callable[[jax.Array, jax.Array], jax.Array] = jnp.matmul,
) -> jax.Array:
    """Compute causal attention of rows [R, n, heads, D] over their own keys, in bands if possible.

    With a window W the queries c W ... c W + W - 1 see nothing before key (c - 1) W: if W divides
    n, each band of W queries gets 2 W keys instead of n.
    """
    num_rows, n, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    band = n if window is None or n % window else window
    past = 0 if band == n else band
    count, group = n // band, num_heads // num_kv_heads

    def keys(x: jax.Array) -> jax.Array:  # [R, bands, K, past + band, D]
        x = x.reshape(num_rows, count, band, num_kv_heads, head_dim)
        if past:
            before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
            x = jnp.concatenate([before, x], axis=2)
        return x.swapaxes(2, 3)

    query = query.reshape(num_rows, count, band, num_kv_heads, group, head_dim)
    query = query.transpose(0, 1, 3, 4, 2, 5).reshape(num_rows, count, num_kv_heads, -1, head_dim)
    logits = product(query, keys(key).swapaxes(-1, -2))
    starts = jnp.arange(count)[:, None, None] * band
    i = starts + jnp.arange(band)[None, :, None]
    j = starts + jnp.arange(-past, band)[None, None, :]
    visible = (j >= 0) & (j <= i) & (i - j < (window or n))
    visible = jnp.tile(visible, (1, group, 1))[None, :, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    out = product(weights, keys(value)).reshape(
        num_rows, count, num_kv_heads, group, band, head_dim
    )
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(num_rows, n, num_heads, head_dim)


@dataclasses.dataclass(frozen=True)
class DenseCaches:
    """Replaces the pages (`examples/engine/caches.py`) for rows that hold all their keys.

    It lives inside a traced function: it keeps keys and values for layers that share them.
    """

    windows: Mapping[int, int | None]  # by layer
    product: Callable[[jax.Array, jax.Array], jax.Array] = jnp.matmul  # of batches of matrices
    kept: Mapping[int, tuple[jax.Array, jax.Array]] = dataclasses.field(default_factory=dict)

    def attend(self, layer, query, batch, *, key=None, value=None, scale):
        """Attend with tokens [T, heads, D] in rows of `batch.max_query_len`, causally in a row."""

        def rows(x: jax.Array) -> jax.Array:
            return x.reshape(-1, batch.max_query_len, *x.shape[1:])

        caches = self
        if key is not None:
            kept = {**self.kept, layer: (rows(key), rows(value))}
            caches = dataclasses.replace(self, kept=kept)
        keys_values = caches.kept[layer]
        attended = attend(scale * rows(query), *keys_values, self.windows[layer], self.product)
        return attended.reshape(query.shape), caches


def dense_logits(model: Gemma4, tokens: jax.Array, product=jnp.matmul) -> jax.Array:
    """Return logits [R, n, 256] after every token of independent rows [R, n]."""
    num_rows, n = tokens.shape
    batch = Batch(
        tokens=tokens.reshape(-1),
        positions=jnp.tile(jnp.arange(n), num_rows),
        query_start_loc=jnp.arange(num_rows + 1) * n,
        logit_tokens=jnp.arange(tokens.size),  # after every token
        attention={},
        states={},
        max_query_len=n,
    )
    windows = {index: layer.heads.window for index, layer in enumerate(model.config.layers)}
    logits, _ = model(batch, DenseCaches(windows, product))
    return logits.reshape(num_rows, n, -1)
