"""Continue two texts with a small transformer whose keys and values live in paged caches.

    python examples/minimal.py

This is a whole decode loop on jattn: caches, block tables, prefill, and a jitted decode step that
updates both in place. `examples/engine` adds what a server needs (batches that change, prefix
caching, sampling, HTTP).

The weights are written down rather than trained. Layer 1 has 16 heads over one KV head; head h
attends to the token h + 1 positions back. Layer 2 has one head of 512 numbers, compares the present
context with every earlier one and copies the token that followed the best match (an induction
head). The model therefore continues a text by repeating what it has read.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jattn
import jattn.blocks as jb

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, NUM_NEW = 16, 32, 256, 96
SIZE, BACK = 32, 16  # numbers per token, and how many tokens back layer 1 reads
SCALE = 4.0  # of the logits: attention is close to one-hot
PROMPTS = (
    "She sells sea shells by the sea shore. The shells she sells are sea shells. She sells",
    "How much wood would a woodchuck chuck if a woodchuck could chuck wood? How much",
)

_rng = np.random.default_rng(0)
EMBEDDING = jnp.asarray(_rng.choice([-1.0, 1.0], (256, SIZE)) * SIZE**-0.5, jnp.float32)  # bytes
FREQUENCIES = jnp.asarray(_rng.uniform(0, np.pi, SIZE // 2), jnp.float32)
IMPORTANCE = jnp.linspace(6.0, 2.0, BACK)  # weight of each token in a context, newest first


def position_vectors(positions: jax.Array) -> jax.Array:
    """Return a vector [..., SIZE] per position, nearly orthogonal to that of any other position."""
    angles = jnp.multiply.outer(positions.astype(jnp.float32), FREQUENCIES)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def init_caches() -> list[tuple[jattn.KVArray, jattn.KVArray]]:
    """Make one pool of blocks per layer; layer 2's keys are larger than its values."""
    init = functools.partial(jattn.init_kv_cache, NUM_BLOCKS, 1, BLOCK_SIZE, value_dim=SIZE)
    return [init(dim, format=jattn.Dense("float32")) for dim in (SIZE, BACK * SIZE)]


def attend(cache, query, key, value, batch: jattn.AttentionMetadata):
    """Write this step's keys and values to the cache, then attend to all keys so far."""
    cache = jattn.update_kv_cache(*cache, key, value, batch.slot_mapping)
    return jattn.paged_attention(query, *cache, **batch.as_kwargs(), scale=SCALE), cache


def model(caches, tokens: jax.Array, positions: jax.Array, batch: jattn.AttentionMetadata):
    """Return logits [T, 256] after every token, and the written caches."""
    num_tokens, x = len(tokens), EMBEDDING[tokens][:, None]
    query = position_vectors(positions[:, None] - jnp.arange(1, BACK + 1)[None])
    key = position_vectors(positions)[:, None]
    before, first = attend(caches[0], query, key, x, batch)
    context = jnp.concatenate([x, before[:, :-1]], axis=1) * IMPORTANCE[None, :, None]
    query, key = (y.reshape(num_tokens, 1, -1) for y in (context, before))
    following, second = attend(caches[1], query, key, x, batch)
    return following[:, 0] @ EMBEDDING.T, [first, second]


@functools.partial(jax.jit, static_argnames="max_query_len", donate_argnames=("caches", "tables"))
def step(caches, tables, tokens, starts, seq_lens, block_ids, counts, *, max_query_len):
    """Run every sequence's new tokens: its prompt, or the token chosen last.

    Args:
      caches, tables: donated, and so updated in place.
      tokens: int32 [T], all of sequence 0's tokens first.
      starts: int32 [B + 1], where each sequence's tokens begin in `tokens`.
      seq_lens: int32 [B], each sequence's length, including these tokens.
      block_ids, counts: blocks to append to the sequences' tables, from `jb.pack_block_ids`.
      max_query_len: the most new tokens of any sequence.
    """
    rows = jnp.arange(len(seq_lens), dtype=jnp.int32)
    lengths = jnp.diff(starts)
    first = jnp.repeat(seq_lens - lengths - starts[:-1], lengths, total_repeat_length=len(tokens))
    positions = first + jnp.arange(len(tokens), dtype=jnp.int32)
    tables, _ = jb.append_block_ids(tables, rows, block_ids, counts)
    block_tables = jb.gather_block_tables(tables, rows, fill=-1)[0]
    slots = jb.compute_slot_mapping(tables, rows, starts, positions)[0]
    batch = jattn.AttentionMetadata(block_tables, seq_lens, starts, slots, max_query_len)
    logits, caches = model(caches, tokens, positions, batch)
    return caches, tables, jnp.argmax(logits[starts[1:] - 1], axis=-1).astype(jnp.int32)


def generate(prompts: list[bytes], num_new: int) -> list[bytes]:
    """Return the greedy continuation of every prompt."""
    caches, pool = init_caches(), jb.BlockPool(NUM_BLOCKS)  # the pool tracks which blocks are free
    tables = jb.init_block_tables([jb.BlockGroup(BLOCK_SIZE, MAX_LEN // BLOCK_SIZE)], len(prompts))
    held, seq_lens = [0] * len(prompts), np.zeros(len(prompts), np.int32)
    tokens = np.frombuffer(b"".join(prompts), np.uint8).astype(np.int32)
    lengths, chosen = np.array([len(prompt) for prompt in prompts]), []
    for _ in range(num_new):  # the first step is the prefill, all others decode
        seq_lens = seq_lens + lengths.astype(np.int32)
        missing = [-(-n // BLOCK_SIZE) - have for n, have in zip(seq_lens, held, strict=True)]
        new = [[pool.allocate(count)] for count in missing]
        held = [have + count for have, count in zip(held, missing, strict=True)]
        block_ids, counts = jb.pack_block_ids(new, widths=[max(1, *missing)])
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        longest = int(lengths.max())
        caches, tables, tokens = step(
            caches, tables, tokens, starts, seq_lens, block_ids, counts, max_query_len=longest
        )
        chosen.append(tokens)  # stays on the device: the next step reads it there
        lengths = np.ones_like(lengths)
    return [bytes(row) for row in np.stack(chosen, axis=1).astype(np.uint8)]


if __name__ == "__main__":
    for text, more in zip(PROMPTS, generate([p.encode() for p in PROMPTS], NUM_NEW), strict=True):
        print(f"{text}|{more.decode()}")
