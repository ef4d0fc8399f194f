"""`ragged_paged_attention` and its relatives, as TPU serving stacks call them, on jattn.

These functions have the signatures, cache layouts and results of existing TPU and GPU kernels, so
that code which calls those kernels by name can run wherever jattn runs:

| function | replaces |
|---|---|
| `ragged_paged_attention` | tpu-inference, `kernels/ragged_paged_attention/v3/kernel.py` |
| `ragged_paged_attention_hd64` | the same, `v3/kernel_hd64.py` |
| `mla_ragged_paged_attention` | tpu-inference, `kernels/mla/v2/kernel.py` |
| `mla_ragged_paged_attention_v1` | tpu-inference, `kernels/mla/v1/kernel.py` |
| `tpu_ragged_paged_attention` | `jax.experimental.pallas.ops.tpu.ragged_paged_attention` |
| `tpu_paged_attention` | `jax.experimental.pallas.ops.tpu.paged_attention` |
| `gpu_paged_attention` | `jax.experimental.pallas.ops.gpu.paged_attention`, deprecated |

Keys and values are stored side by side in one array (`jattn.KVRows`), which is written and read in
place. The cache is donated, as in the originals; if you jit a step around the call, donate it there
too. Arguments that tune the original kernels (block sizes, memory limits, splits) are accepted and
ignored. `mask_value` must be low enough to mask, but is then unused: rows that see nothing are
zeros. Unlike in the originals, padding rows are zeros, and a broken promise gives NaN
(`jattn.paged_attention`).

Axes: T tokens of the bucket, B rows of sequences, H query heads, K KV heads, D head size, N pages
of S tokens, M pages per row; L and R the latent and rope sizes of MLA.
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
