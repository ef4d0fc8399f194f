"""Hashes of full blocks, each of all tokens up to the block's end.

    h_i = blake2b(h_(i-1), tokens of block i),    h_(-1) = the salt.

A block whose keys depend on more than tokens (on an image, say) has further bytes e hashed after
its tokens, by a blake2b with another personalization and followed by their number:

    h_i = blake2b_extra(h_(i-1), tokens of block i, e, len(e)).

So equal hashes mean equal prefixes. Groups whose blocks differ in size need only one chain, with
blocks of the greatest common divisor of their sizes (`LayerGroups.hash_block_size`): a larger block
has the hash of the last small block in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jattn.checks import Problems, checking
from jattn.integers import require_int, require_ints


def hash_blocks(
    tokens: Sequence[int] | np.ndarray,
    block_size: int,
    *,
    parent: bytes | None = None,
    extra: Sequence[bytes | None] | None = None,
) -> list[bytes]:
    """Return the hashes of all full blocks of a sequence, 16 bytes each. Host only.

    Args:
      tokens: integers up to 2^63 - 1, the tokens after `parent`. A last block that is not full has
        no hash.
      block_size: tokens in a block.
      parent: the hash of the block before, or a salt that keeps prefixes apart (the encoded name of
        an adapter or tenant). None: neither, as b"".
      extra: per full block, bytes for whatever else its keys depend on, such as the hash of an
        image whose placeholder tokens lie in the block, or None for nothing. Later blocks depend on
        it through their parents. None: nothing in any block.

    Returns: a list with one hash per full block.
    Raises: `ValueError` for a block size below 1, tokens that are not a flat list of integers or do
      not fit int64, a parent that is not bytes, or `extra` that is not one entry, bytes or None,
      per full block.

    >>> whole = hash_blocks([1, 2, 3, 4, 5], 2)
    >>> whole[1:] == hash_blocks([3, 4], 2, parent=whole[0]), len(whole)
    (True, 2)
    >>> first, second = hash_blocks([1, 2, 3, 4], 2, extra=[None, b"hash of an image"])
    >>> first == whole[0], second == whole[1]
    (True, False)
    """
    with checking("hash_blocks") as problems:
        sized = require_int(problems, "block_size", block_size, 1)
        words = _words(problems, tokens)
        problems.expect(
            parent is None or isinstance(parent, bytes), "parent", parent, "bytes or None"
        )
        if extra is not None and sized and not problems.found:
            full = len(words) // block_size
            problems.expect(
                isinstance(extra, Sequence)
                and not isinstance(extra, (bytes, str))
                and len(extra) == full
                and all(x is None or isinstance(x, bytes) for x in extra),
                "extra",
                extra,
                f"bytes or None for each of {full} full block(s)",
            )
    last, hashes = parent or b"", []
    for i, start in enumerate(range(0, len(words) - block_size + 1, block_size)):
        block = words[start : start + block_size].tobytes()
        more = None if extra is None else extra[i]
        if more is None:
            digest = hashlib.blake2b(last + block, digest_size=16)
        else:
            end = more + len(more).to_bytes(8, "little")
            digest = hashlib.blake2b(last + block + end, digest_size=16, person=b"extra")
        last = digest.digest()
        hashes.append(last)
    return hashes


def _words(problems: Problems, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return tokens as int64 [T], or note a problem."""
    must = "a list of integers of 64 bits, or an integer array of one dimension"
    try:
        given = np.asarray(tokens)
    except ValueError:  # lists of several lengths
        given = np.empty((), object)
    ok = given.ndim == 1 and (given.size == 0 or given.dtype.kind in "iu")
    if not problems.expect(ok, "tokens", tokens, must):
        return np.empty(0, np.int64)
    if given.size and given.dtype == np.uint64:
        most = int(given.max())
        problems.require(most < 2**63, "tokens", f"up to {most}", "at most 2^63 - 1")
    return given.astype(np.int64)


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
