"""The capability rows of the GPU kernels."""

from __future__ import annotations

import jax

from jattn import call as calls
from jattn import capability, formats
from jattn.pallas import machine
from jattn.pallas.mosaic_gpu import pools, scratch
from jattn.pallas.mosaic_gpu.decode import tiles as decode_tiles
from jattn.pallas.mosaic_gpu.prefill import tiles as prefill_tiles
from jattn.pallas.triton import needs
from jattn.pallas.triton import tiles as triton_tiles

# The test matrix of both passed on an H100.
RESULTS = "2026-11-27-gpu-h100-jax0.11.jsonl"
# Formats with scales per token, block or group are newer than that.
_NEWER_FORMATS = tuple(format.name for format in formats.ALL if format.chooses_scales)

_NEWER_OPTIONS = tuple(name for name in calls.OPTIONS if name not in calls.CORE_OPTIONS)

TRITON = capability.Row(
    implementation="triton",
    summary="Triton kernels through jax-triton, the portable GPU path",
    devices=("gpu",),
    head_dims=capability.Sizes(16, 576, 1, tested=(64, 80, 96, 128, 192, 256, 512, 576)),
    value_dims=capability.Sizes(16, 512, 1, tested=(64, 80, 96, 128, 192, 256, 512)),
    block_sizes=capability.Sizes(8, 2**20, 8, tested=(16, 32, 64, 128, 528)),
    query_dtypes=calls.QUERY_DTYPES,
    formats=capability.ALL_FORMATS,
    layouts=formats.ALL_LAYOUTS,
    options=calls.OPTIONS,
    automatic=True,
    differentiable=True,
    requirements=(
        capability.Need(f"sm_{needs.LOWEST_SM} and up", needs.gpu_lacks),
        capability.Need(f"jax-triton {' or '.join(needs.TRITON)}", needs.installed_lack),
    ),
    refuses=needs.refuses,
    results=RESULTS,
    newer=(*_NEWER_OPTIONS, *_NEWER_FORMATS),
)

_MOSAIC_JAX = (0, 11, 2)
_MOSAIC_JAX_TEXT = ".".join(map(str, _MOSAIC_JAX))


def _jax_too_old() -> tuple[str, ...]:
    if jax.__version_info__ >= _MOSAIC_JAX:
        return ()
    return (
        f"it needs jax {_MOSAIC_JAX_TEXT} or newer, and this is {jax.__version__}: "
        f"pip install -U 'jax[cuda13]>={_MOSAIC_JAX_TEXT}' on Python 3.12 or newer",
    )


def _not_hopper() -> tuple[str, ...]:
    here = machine.here()
    if here is not None and here.sm != scratch.SM:
        needed, found = scratch.SM / 10, here.sm / 10
        return (f"it runs on compute capability {needed}, and this GPU's is {found}",)
    return machine.not_nvidia()


def _mosaic_refuses(call: calls.Call) -> tuple[str, ...]:
    """Return why the kernels cannot run a combination of what the row claims."""
    reasons = pools.refusals(call)
    stored, value = call.key_format.name, call.value_format.name
    if stored != value:
        reasons.append(
            f"the key cache holds {stored} and the value cache {value}; it takes one format"
        )
    if (call.query_dtype, stored) == ("float16", "bfloat16"):
        # Neither dtype holds the other's numbers, and one product takes one dtype.
        reasons.append("the query is float16 and the cache bfloat16; it takes bfloat16 for both")
    bytes_, d, v = call.key_format.word_dtype.itemsize, call.head_dim, call.value_dim
    sizes = d in MOSAIC_GPU.head_dims and v in MOSAIC_GPU.value_dims
    if sizes and bytes_ <= 2 and decode_tiles.chunk_of(d, v, bytes_) is None:
        step = 16 if bytes_ == 2 else 32
        reasons.append(
            f"head size D is {d} and value size V {v} in {stored}; it takes those with a common "
            f"divisor of at least 64 that is a multiple of {step}"
        )
    if call.max_query_len > machine.DECODE_TOKENS:
        reasons += prefill_tiles.refusals(call)
    return tuple(reasons)


def _mosaic_prefers_others(call: calls.Call) -> tuple[str, ...]:
    """Return why Triton should be faster: few new tokens after many keys, which it splits."""
    gpu = machine.here()
    if gpu is None or call.max_query_len <= machine.DECODE_TOKENS or TRITON.refusals(call):
        return ()
    if triton_tiles.decode_limit(call, gpu) < call.max_query_len:
        return ()
    return (
        f"{call.num_tokens} query tokens keep few multiprocessors busy, and triton splits their "
        "keys; implementation='mosaic_gpu' takes it",
    )


MOSAIC_GPU = capability.Row(
    implementation="mosaic_gpu",
    summary="Pallas on Mosaic GPU for Hopper; prefill in the query's dtype, in fp8 up to D = 256",
    devices=("gpu",),
    head_dims=capability.Sizes(64, 576, 16, tested=(64, 80, 96, 128, 192, 256, 512, 576)),
    value_dims=capability.Sizes(64, 512, 16, tested=(64, 80, 96, 128, 192, 256, 512)),
    block_sizes=capability.Sizes(8, 2**20, 8, tested=(8, 16, 32, 64, 128, 528)),
    query_dtypes=("bfloat16", "float16"),
    formats=("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"),
    layouts=formats.ALL_LAYOUTS,
    options=(*calls.CORE_OPTIONS, "value_dim"),
    automatic=True,
    differentiable=True,
    requirements=(
        capability.Need("sm_90 (H100/H200)", _not_hopper),
        capability.Need(f"jax {_MOSAIC_JAX_TEXT}+", _jax_too_old),
    ),
    refuses=_mosaic_refuses,
    prefers_others=_mosaic_prefers_others,
    may_hang=True,
    results=RESULTS,
    newer=(formats.ROWS_LAYOUT, "value_dim"),
)
