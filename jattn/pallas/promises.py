"""Promises that a call's numbers break, for kernels that read no number they cannot trust.

A kernel gets lengths and starts that never lead it outside its buffers, and one mark: the length of
a sequence whose rows are NaN is -1. Such a sequence sees no key, so nothing is read for it, and the
kernel that writes its rows writes NaN.

The cost: lengths and caller-provided starts take one small kernel ahead of the others; checking
ids as well, which reads the table [B, M] once, takes two more, one after the other. A kernel that
meets every id that its sequences use checks them itself. Nothing runs after the kernels, and `out`
is written once.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn import call as calls


def marked(
    call: calls.Call, operands: calls.Operands, xp: Any = jnp, *, ids: bool = True
) -> calls.Operands:
    """Return the operands, with length -1 for every sequence that `spec.broken_promises` names.

    Without `ids`, the kernel must notice ids outside the pool itself. Other lengths are at least 0.
    If the starts do not say which tokens are whose, all tokens belong to the first sequence, which
    is marked.
    """
    starts = operands.query_start_loc
    # Without caller-provided starts, nothing about them needs to be computed on the device.
    known: Any = starts if call.ragged else np.arange(call.num_seqs + 1, dtype=np.int32)
    checked = operands._replace(query_start_loc=known)
    broken, all_broken = calls.broken_promises(call, checked, xp, ids=ids)
    seq_lens = xp.where(broken, np.int32(-1), xp.maximum(operands.seq_lens, 0))
    if call.ragged:
        whole = np.full(call.num_seqs + 1, call.num_tokens, np.int32)
        whole[0] = 0
        starts = xp.where(all_broken, whole, starts)
    return operands._replace(seq_lens=seq_lens, query_start_loc=starts)
