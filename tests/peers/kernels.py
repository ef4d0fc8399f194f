"""A pytest plugin that replaces a peer's kernel with jattn before the tests import it.

`JATTN_PEER` names the function that does so. The peers' tests check for a TPU or a GPU: the plugin
makes these checks pass.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import types
import warnings

import jax
import jax.numpy as jnp
from jax._src import test_util as jtu

import jattn
from jattn.integrations import rpa


def _replace(module: str, name: str, function) -> None:
    """Replace a module's function, also in a package that re-exports it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module(module)
    setattr(sys.modules[module], name, function)
    package = sys.modules[module.rpartition(".")[0]]
    if callable(getattr(package, name, None)):
        setattr(package, name, function)


def _there_is_a_tpu() -> None:
    # From version 6 on, the tests leave out quantized pages.
    jtu.is_device_tpu_at_least = lambda version: version <= 5
    jtu.is_device_tpu = lambda version=None, variant="": (
        version in (None, 5) and variant in ("", "e")
    )


def jax_gpu_paged_attention() -> None:
    jtu.is_cuda_compute_capability_at_least = lambda capability: True
    module = "jax.experimental.pallas.ops.gpu.paged_attention"
    _replace(module, "paged_attention", rpa.gpu_paged_attention)


def jax_tpu_paged_attention() -> None:
    _there_is_a_tpu()
    module = "jax.experimental.pallas.ops.tpu.paged_attention.paged_attention_kernel"
    _replace(module, "paged_attention", rpa.tpu_paged_attention)


def jax_tpu_ragged_paged_attention() -> None:
    _there_is_a_tpu()
    module = "jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel"
    _replace(module, "ragged_paged_attention", rpa.tpu_ragged_paged_attention)


def _tpu_inference(module: str, name: str, function) -> None:
    """Replace a tpu-inference kernel, without its package, whose import needs vLLM and a TPU."""
    _there_is_a_tpu()
    root = os.environ["JATTN_PEER_SOURCES"]
    package = types.ModuleType("tpu_inference")
    package.__path__ = [os.path.join(root, "tpu_inference")]
    logger = types.ModuleType("tpu_inference.logger")
    logger.init_logger = logging.getLogger
    utils = types.ModuleType("tpu_inference.utils")
    utils.get_device_name = lambda: "TPU v5e"
    utils.TPU_HEAD_SIZE_ALIGNMENT = 128
    utils.get_dtype_packing = lambda dtype: 4 // jnp.dtype(dtype).itemsize
    for stand_in in (package, logger, utils):
        sys.modules[stand_in.__name__] = stand_in
    _replace(f"tpu_inference.kernels.{module}", name, function)


def _write_bits(module: str) -> None:
    """Make a reference write bits where it writes a cache of 8-bit floats token by token.

    On CPUs XLA would widen the whole cache for every token.
    """
    reference = importlib.import_module(module)
    write = reference.update_kv_cache

    def update_kv_cache(new_kv_c, new_k_pe, cache_kv, *others):
        bits = (x.view(jnp.uint8) for x in (new_kv_c, new_k_pe, cache_kv))
        return write(*bits, *others).view(cache_kv.dtype)

    reference.update_kv_cache = update_kv_cache


def mla_v2() -> None:
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # absl would parse them, but pytest runs the tests
    pipeline = types.ModuleType("tpu_inference.kernels.mla.v2.transpose")
    pipeline.xpose_pipeline = None  # a part of the kernel that needs another package
    sys.modules[pipeline.__name__] = pipeline
    _tpu_inference("mla.v2.kernel", "mla_ragged_paged_attention", rpa.mla_ragged_paged_attention)
    _write_bits("tpu_inference.kernels.mla.v1.kernel")


def rpa_v3() -> None:
    module = "ragged_paged_attention.v3.kernel"
    _tpu_inference(module, "ragged_paged_attention", rpa.ragged_paged_attention)


def rpa_v3_hd64() -> None:
    module = "ragged_paged_attention.v3.kernel_hd64"
    _tpu_inference(module, "ragged_paged_attention_hd64", rpa.ragged_paged_attention_hd64)


def rpa_v2() -> None:
    module = "ragged_paged_attention.v2.kernel"
    _tpu_inference(module, "ragged_paged_attention", rpa.tpu_ragged_paged_attention)


def kv_cache_update(new_kv, slices, kv_cache, num_slices, *, page_size, mesh=None, **others):
    """Run tpu-inference's `kv_cache_update` by `jattn.update_kv_cache`.

    A slice is consecutive rows of the cache: (start in the cache, start among new tokens, count).
    """

    def update(new_kv, slices, kv_cache, num_slices):
        tokens, rows, dim = new_kv.shape
        token = jnp.arange(tokens)[:, None]
        to, begin, count = slices[:, None]  # [1, slices] each
        inside = (token >= begin) & (token < begin + count)
        inside &= (jnp.arange(slices.shape[1]) < num_slices)[None]
        slots = jnp.where(inside, to + token - begin, -1).max(axis=1)
        pool = jattn.KVRows.pairs(kv_cache.reshape(-1, page_size, rows, dim))
        pool, _ = jattn.update_kv_cache(pool, None, new_kv[:, ::2], new_kv[:, 1::2], slots)
        return pool.data.reshape(kv_cache.shape)

    if mesh is not None:
        heads, everywhere = others["kv_cache_pspec"], jax.sharding.PartitionSpec()
        specs = (heads, everywhere, heads, everywhere)
        update = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=heads)
    return update(new_kv, slices, kv_cache, num_slices)


def rpa_v2_update() -> None:
    module = "ragged_paged_attention.v2.ragged_kv_cache_update"
    _tpu_inference(module, "kv_cache_update", kv_cache_update)


if "JATTN_PEER" in os.environ:
    globals()[os.environ["JATTN_PEER"]]()
