"""`ragged_paged_attention` and its relatives, as TPU serving stacks call them, on jattn.

The signatures, cache layouts and results of kernels that others wrote for TPUs and GPUs, so that
code which calls them by name runs on every machine that jattn runs on:

| function | takes the place of |
|---|---|
| `ragged_paged_attention` | tpu-inference, `kernels/ragged_paged_attention/v3/kernel.py` |
| `ragged_paged_attention_hd64` | the same, `v3/kernel_hd64.py` |
| `mla_ragged_paged_attention` | tpu-inference, `kernels/mla/v2/kernel.py` |
| `mla_ragged_paged_attention_v1` | tpu-inference, `kernels/mla/v1/kernel.py` |
| `tpu_ragged_paged_attention` | `jax.experimental.pallas.ops.tpu.ragged_paged_attention` |
| `tpu_paged_attention` | `jax.experimental.pallas.ops.tpu.paged_attention` |
| `gpu_paged_attention` | `jax.experimental.pallas.ops.gpu.paged_attention`, deprecated |

Keys and values are stored side by side in one array (`jattn.KVRows`), which is written and read in
place. As in the originals the cache is donated; in a step of yours, donate it there. Arguments that
tune the originals (block sizes, limits of memory, splits) change nothing here and are taken.
`mask_value` must mask, and is then not needed: rows that see nothing are zeros. Differences: rows
of padding are zeros, and a broken promise gives NaN (`jattn.paged_attention`).

Axes: T tokens of the bucket, B rows of sequences, H query heads, K KV heads, D head size, N pages
of S tokens, M pages a row; L and R the latent and rope sizes of MLA.
"""

from jattn.integrations.rpa.decode import gpu_paged_attention, tpu_paged_attention
from jattn.integrations.rpa.latent import (
    mla_ragged_paged_attention,
    mla_ragged_paged_attention_v1,
)
from jattn.integrations.rpa.ragged import (
    ragged_paged_attention,
    ragged_paged_attention_hd64,
    tpu_ragged_paged_attention,
)

__all__ = [
    "gpu_paged_attention",
    "mla_ragged_paged_attention",
    "mla_ragged_paged_attention_v1",
    "ragged_paged_attention",
    "ragged_paged_attention_hd64",
    "tpu_paged_attention",
    "tpu_ragged_paged_attention",
]
