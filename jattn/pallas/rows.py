"""What the GPU kernels take. Both rows refuse every call until their kernels are in."""

from __future__ import annotations

from jattn import arguments, capability, device
from jattn import call as calls

_SIZES = (64, 80, 96, 128, 192, 256, 512)
# What these kernels are to take; a new option of `call.OPTIONS` is not claimed by itself.
_OPTIONS = (
    "not_causal",
    "is_causal_per_sequence",
    "sliding_window",
    "logits_soft_cap",
    "sinks",
    "alibi_slopes",
    "k_scale",
    "v_scale",
    "return_lse",
)
_NOT_BUILT = "its kernels are not part of this release"


def _missing() -> tuple[str, ...]:
    """What this machine lacks; asked when a call is judged."""
    here = device.platform()
    return (_NOT_BUILT,) if here == "gpu" else (_NOT_BUILT, f"it runs on gpu, and this is {here}")


TRITON = capability.Row(
    implementation="triton",
    summary="Triton kernels through jax-triton, the portable GPU path",
    devices=("gpu",),
    head_dims=capability.Sizes(16, 576, 1, tested=(*_SIZES, 576)),
    value_dims=capability.Sizes(16, 512, 1, tested=_SIZES),
    block_sizes=capability.Sizes(8, 2**20, 8, tested=(16, 32, 64, 128, 528)),
    query_dtypes=calls.QUERY_DTYPES,
    formats=("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"),
    layouts=arguments.LAYOUTS,
    options=_OPTIONS,
    automatic=True,
    differentiable=False,
    batch_invariant=False,
    needs=f"sm_80 and up, jax-triton; {_NOT_BUILT}",
    missing=_missing,
)

MOSAIC_GPU = capability.Row(
    implementation="mosaic_gpu",
    summary="Pallas on Mosaic GPU, for Hopper",
    devices=("gpu",),
    head_dims=capability.Sizes(64, 576, 8, tested=(*_SIZES, 576)),
    value_dims=capability.Sizes(64, 512, 8, tested=_SIZES),
    block_sizes=capability.Sizes(8, 2**20, 8, tested=(16, 32, 64, 128, 528)),
    query_dtypes=("bfloat16", "float16"),
    formats=("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"),
    layouts=arguments.LAYOUTS,
    options=_OPTIONS,
    automatic=True,
    differentiable=False,
    batch_invariant=False,
    needs=f"sm_90, jax 0.11.2; {_NOT_BUILT}",
    missing=_missing,
)
