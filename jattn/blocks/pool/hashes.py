"""Hashes of full blocks, each of all tokens up to the block's end.

    h_i = blake2b(h_(i-1), tokens of block i),    h_(-1) = the salt.

So equal hashes mean equal prefixes. Groups whose blocks differ in size need only one chain, with
blocks of the greatest common divisor of their sizes (`LayerGroups.hash_block_size`): a larger block
has the hash of the last small block in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jattn.checks import checking
from jattn.integers import require_int, require_ints


def hash_blocks(
    tokens: Sequence[int] | np.ndarray, block_size: int, *, parent: bytes = b""
) -> list[bytes]:
    """Return the hashes of all full blocks of a sequence, 16 bytes each. Host only.

    Args:
      tokens: integers, the tokens after `parent`. A last block that is not full has no hash.
      block_size: tokens in a block.
      parent: the hash of the block before, or a salt that keeps prefixes apart (an adapter's name,
        a tenant's id).

    Returns: a list with one hash per full block.
    Raises: `ValueError` for a block size below 1, or tokens that are not a flat list of integers.

    >>> whole = hash_blocks([1, 2, 3, 4, 5], 2)
    >>> whole[1:] == hash_blocks([3, 4], 2, parent=whole[0]), len(whole)
    (True, 2)
    """
    with checking("hash_blocks") as problems:
        require_int(problems, "block_size", block_size, 1)
        given = np.asarray(tokens)
        problems.expect(
            given.ndim == 1 and (given.size == 0 or given.dtype.kind in "iu"),
            "tokens",
            tokens,
            "a list of integers of 64 bits, or an integer array of one dimension",
        )
    words = given.astype(np.int64)
    hashes: list[bytes] = []
    for end in range(block_size, len(words) + 1, block_size):
        digest = hashlib.blake2b(hashes[-1] if hashes else parent, digest_size=16)
        digest.update(words[end - block_size : end].tobytes())
        hashes.append(digest.digest())
    return hashes


def block_hashes(hashes: Sequence[bytes], hash_block_size: int, block_size: int) -> list[bytes]:
    """Return the hashes of blocks of `block_size` tokens, given those of smaller blocks.

    Args:
      hashes: the hashes of a sequence's blocks of `hash_block_size` tokens (`hash_blocks`).
      hash_block_size: tokens in a small block (`LayerGroups.hash_block_size`).
      block_size: tokens in a block of the group.

    Returns: a list with one hash per full block of the group.
    Raises: `ValueError` for a size below 1, or if `hash_block_size` does not divide `block_size`.

    >>> block_hashes([b"a", b"b", b"c"], 16, 32)
    [b'b']
    """
    with checking("block_hashes") as problems:
        sizes = {"hash_block_size": hash_block_size, "block_size": block_size}
        if require_ints(problems, 1, **sizes):
            problems.require(
                block_size % hash_block_size == 0,
                "hash_block_size",
                f"{hash_block_size}",
                f"a divisor of block_size={block_size}",
            )
    per_block = block_size // hash_block_size
    return list(hashes[per_block - 1 :: per_block])
