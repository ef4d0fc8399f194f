"""A model small enough to serve hundreds of requests in a second, with every kind of cache.

    layer 0  attention over a window of 10      layer 1  a recurrent state
    layer 2  attention over everything          layer 3  another recurrent state

and `dense_logits`, the same model in NumPy and float64 without a cache. With `mtp`, layer 4 guesses
the token after the next one, as `dense_guesses` does.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from examples.engine.caches import Caches
from examples.engine.model import AttentionCache, Batch, Model, Mtp, StateCache
from jattn.blocks import StateLayout

VOCAB, SIZE, HEADS, HEAD_DIM, WINDOW = 256, 24, 3, 8, 10
SCALE = 0.7
STATE = StateLayout(((SIZE,), (2,)), ("float32", "float32"))
LAYERS = {
    0: AttentionCache(1, HEAD_DIM, window=WINDOW),
    1: StateCache(STATE),
    2: AttentionCache(1, HEAD_DIM),
    3: StateCache(STATE),
}
GUESSING = 4


@functools.cache
def tiny_model(*, only_attends: bool = False, noise: float = 0.0, mtp: bool = False) -> Model:
    """Return the model with random parameters, to which `noise` is added.

    With `only_attends` it lacks layers 1 and 3; without `mtp` it lacks layer 4.
    """
    rng = np.random.default_rng(11)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return np.asarray(rng.normal(size=shape) * scale * shape[0] ** -0.5, np.float32)

    params = {"embed": normal(VOCAB, SIZE, scale=16.0), "head": normal(SIZE, VOCAB, scale=3.0)}
    for layer in range(4):
        params[f"q{layer}"] = normal(SIZE, HEADS * HEAD_DIM, scale=2.0)
        params[f"k{layer}"] = normal(SIZE, HEAD_DIM, scale=2.0)
        params[f"v{layer}"] = normal(SIZE, HEAD_DIM, scale=2.0)
        params[f"o{layer}"] = normal(HEADS * HEAD_DIM, SIZE, scale=2.0)
        params[f"x{layer}"] = normal(SIZE, SIZE, scale=2.0)
        params[f"g{layer}"] = normal(SIZE, SIZE)
    for name, values in params.items():
        params[name] = values * np.float32(1 + noise * rng.normal(size=values.shape))
    layers, kept = (0, 2) if only_attends else tuple(LAYERS), LAYERS
    if mtp:
        shapes = {"q4": HEADS * HEAD_DIM, "k4": HEAD_DIM, "v4": HEAD_DIM}
        params["fc"] = normal(2 * SIZE, SIZE, scale=2.0)
        params |= {name: normal(SIZE, size, scale=2.0) for name, size in shapes.items()}
        params["o4"] = normal(HEADS * HEAD_DIM, SIZE, scale=2.0)
        kept = {**LAYERS, GUESSING: AttentionCache(1, HEAD_DIM)}
    return Model(
        name="tiny",
        vocab_size=VOCAB,
        max_positions=512,
        dtype="float32",
        layers={layer: kept[layer] for layer in (*layers, *([GUESSING] if mtp else []))},
        params={name: jnp.asarray(values) for name, values in params.items()},
        step=functools.partial(step, layers=layers),
        mtp=Mtp(GUESSING, SIZE, step_with_hidden, guess) if mtp else None,
    )


def step(
    params: dict, caches: Caches, batch: Batch, layers: tuple[int, ...] = tuple(LAYERS)
) -> tuple[jax.Array, Caches]:
    """Run the model over paged caches."""
    logits, _, caches = step_with_hidden(params, caches, batch, layers)
    return logits, caches


def step_with_hidden(
    params: dict, caches: Caches, batch: Batch, layers: tuple[int, ...] = tuple(LAYERS)
) -> tuple[jax.Array, jax.Array, Caches]:
    """Like `step`, and return hidden states [T, SIZE] too."""
    num_tokens = batch.tokens.shape[0]
    x = params["embed"].at[batch.tokens].get(mode="clip") + _positions(jnp, batch.positions)
    for layer in layers:
        y = _norm(jnp, x)
        if layer in (1, 3):
            states = caches.read_states(layer, batch)
            recur = functools.partial(_recur, y, params, layer, states, batch)
            y, states = recur()
            caches = caches.write_states(layer, batch, states, lambda n, f=recur: f(n)[1])
            x = x + y
            continue
        key = (y @ params[f"k{layer}"])[:, None]
        value = (y @ params[f"v{layer}"])[:, None]
        query = (y @ params[f"q{layer}"]).reshape(num_tokens, HEADS, HEAD_DIM)
        out, caches = caches.attend(layer, query, batch, key=key, value=value, scale=SCALE)
        x = x + out.reshape(num_tokens, -1) @ params[f"o{layer}"]
    hidden = _norm(jnp, x)
    return hidden.at[batch.logit_tokens].get(mode="clip") @ params["head"], hidden, caches


def guess(
    params: dict, caches: Caches, batch: Batch, hidden: jax.Array
) -> tuple[jax.Array, jax.Array, Caches]:
    """Return logits of the tokens after `batch.tokens`, which follow those of `hidden`."""
    embedded = params["embed"].at[batch.tokens].get(mode="clip")
    embedded = _norm(jnp, embedded + _positions(jnp, batch.positions))
    x = jnp.concatenate([embedded, hidden], axis=-1) @ params["fc"]
    y = _norm(jnp, x)
    key, value = ((y @ params[name])[:, None] for name in ("k4", "v4"))
    query = (y @ params["q4"]).reshape(-1, HEADS, HEAD_DIM)
    out, caches = caches.attend(GUESSING, query, batch, key=key, value=value, scale=SCALE)
    hidden = _norm(jnp, x + out.reshape(len(x), -1) @ params["o4"])
    return hidden.at[batch.logit_tokens].get(mode="clip") @ params["head"], hidden, caches


def _recur(x, params, layer, states, batch: Batch, lengths: jax.Array | None = None):
    """Compute h <- g h + (1 - g) (x W) token by token, counting tokens in a second tensor.

    Covers all tokens of the step, or the first `lengths` of each sequence.
    """
    num_seqs = batch.query_start_loc.shape[0] - 1
    tokens = jnp.arange(x.shape[0], dtype=jnp.int32)
    ends = batch.query_start_loc[1:]
    sequence = jnp.searchsorted(ends, tokens, side="right").astype(jnp.int32)  # padding: num_seqs
    if lengths is not None:
        stop = (batch.query_start_loc[:-1] + lengths).at[sequence].get(mode="clip")
        sequence = jnp.where(tokens < stop, sequence, num_seqs)
    gate, new = jax.nn.sigmoid(x @ params[f"g{layer}"]), x @ params[f"x{layer}"]

    def token(carry, at):
        h, count = carry
        b, g, n = at
        h = h.at[b].set(g * h[b] + (1 - g) * n, mode="drop")
        count = count.at[b].add(1.0, mode="drop")
        return (h, count), jnp.where(b < num_seqs, h[b] * jnp.cos(count[b, :1]), 0.0)

    states, out = jax.lax.scan(token, states, (sequence, gate, new))
    return out, states


def dense_logits(params: dict, tokens: list[int]) -> np.ndarray:
    """Logits [vocabulary] after the last of some tokens."""
    params = {name: np.asarray(p, np.float64) for name, p in params.items()}
    return dense_hidden(params, tokens)[-1] @ params["head"]


def dense_guesses(params: dict, tokens: list[int], count: int) -> tuple[int, ...]:
    """The greedy guesses of layer 4 after some tokens."""
    params = {name: np.asarray(p, np.float64) for name, p in params.items()}
    hidden, guesses = dense_hidden(params, tokens[:-1]), []
    while len(guesses) < count:
        after = [*tokens, *guesses][1:]
        embedded = _norm(np, params["embed"][after] + _positions(np, np.arange(len(after))))
        x = np.concatenate([embedded, hidden], axis=-1) @ params["fc"]
        y = _norm(np, x)
        query = (y[-1] @ params["q4"]).reshape(HEADS, HEAD_DIM)
        logits = SCALE * query @ (y @ params["k4"]).T
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        last = x[-1] + (weights @ (y @ params["v4"])).reshape(-1) @ params["o4"]
        hidden = np.concatenate([hidden, _norm(np, last[None])])
        guesses.append(int((hidden[-1] @ params["head"]).argmax()))
    return tuple(guesses)


def dense_hidden(params: dict, tokens: list[int]) -> np.ndarray:
    """Hidden states of some tokens [T, SIZE]; parameters in float64."""
    x = params["embed"][tokens] + _positions(np, np.arange(len(tokens)))
    distance = np.subtract.outer(np.arange(len(tokens)), np.arange(len(tokens)))
    for layer in range(4):
        y = _norm(np, x)
        if layer in (1, 3):
            gates, h = 1 / (1 + np.exp(-(y @ params[f"g{layer}"]))), np.zeros(SIZE)
            for t, g in enumerate(gates):
                h = g * h + (1 - g) * (y[t] @ params[f"x{layer}"])
                x[t] += h * np.cos(t + 1)
            continue
        key, value = y @ params[f"k{layer}"], y @ params[f"v{layer}"]
        query = (y @ params[f"q{layer}"]).reshape(-1, HEADS, HEAD_DIM)
        visible = (distance >= 0) & (distance < (WINDOW if layer == 0 else len(tokens)))
        logits = np.where(visible, SCALE * np.einsum("thd,sd->hts", query, key), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,sd->thd", weights, value).reshape(len(x), -1) @ params[f"o{layer}"]
    return _norm(np, x)


def _positions(xp, positions):
    angles = (
        positions[:, None].astype(xp.float32)
        * xp.asarray(0.5 ** np.arange(SIZE), xp.float32)[None, :]
    )
    return xp.sin(angles)


def _norm(xp, x):
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
