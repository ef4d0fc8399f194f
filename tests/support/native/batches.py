"""Sequences of several kinds in one call of the native kernel, and in separate calls.

`python -m tests.support.native.batches` prints a digest of the results.
"""

from __future__ import annotations

import dataclasses
import hashlib

import jax.numpy as jnp
import numpy as np

import jattn

BLOCK, HEADS, KV_HEADS, DIM = 16, 6, 2, 64
# Query tokens and keys: one token, a chunk of a prompt, a prompt, draft tokens.
SEQUENCES = ((1, 9000), (1, 40), (70, 5000), (300, 300), (1, 2500), (4, 9000))
# Many short sequences: a schedule that counted them all as work items would split prompts less.
SEQUENCES += ((1, 40),) * 32
SMALLER = ((0,), (1,), (2,), (3,), (5,), (4, 0), (2, 5, 3))


@dataclasses.dataclass(frozen=True)
class Result:
    """`found`: out and lse of a call that holds some of `SEQUENCES`."""

    sequences: tuple[int, ...]
    found: tuple[np.ndarray, np.ndarray]

    def rows(self, b: int) -> slice:
        """Return the rows of a sequence of `SEQUENCES`."""
        before = self.sequences[: self.sequences.index(b)]
        start = sum(SEQUENCES[i][0] for i in before)
        return slice(start, start + SEQUENCES[b][0])


def run(dtype: str) -> tuple[Result, list[Result]]:
    """Run all sequences in one call, and those of each entry of `SMALLER` in another."""
    rng = np.random.default_rng(5)
    owned = [-(-keys // BLOCK) for _, keys in SEQUENCES]
    ends = np.cumsum(owned)
    ids = rng.permutation(ends[-1])
    tables = [ids[end - n : end] for end, n in zip(ends, owned, strict=True)]
    queries = [jnp.asarray(rng.normal(size=(count, HEADS, DIM)), dtype) for count, _ in SEQUENCES]
    shape = (2, int(ends[-1]), KV_HEADS, BLOCK, DIM)
    caches = [jnp.asarray(x, dtype) for x in rng.normal(size=shape).astype(np.float32)]

    def call(chosen: tuple[int, ...]) -> Result:
        batch = jattn.AttentionMetadata.from_lengths(
            [SEQUENCES[b][0] for b in chosen],
            [SEQUENCES[b][1] for b in chosen],
            block_tables=[tables[b] for b in chosen],
            block_size=BLOCK,
        )
        out, lse = jattn.paged_attention(
            jnp.concatenate([queries[b] for b in chosen]),
            *caches,
            **batch.as_kwargs(),
            return_lse=True,
            implementation="native",
        )
        return Result(chosen, (np.asarray(out, np.float32), np.asarray(lse)))

    return call(tuple(reversed(range(len(SEQUENCES))))), [call(chosen) for chosen in SMALLER]


if __name__ == "__main__":
    digest = hashlib.sha256()
    for dtype in ("float32", "bfloat16"):
        whole, parts = run(dtype)
        for result in (whole, *parts):
            for array in result.found:
                digest.update(array.tobytes())
    print(digest.hexdigest())
