"""Answers to tpu-inference's questions about TPUs, for machines without one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jattn.integrations.tpu_inference import drafts, encoders, experts, memory, transfers
from jattn.integrations.tpu_inference.settings import VllmConfig

REPLICAS = "jattn_replicas"  # of the host's sharding: how many `vllm serve` starts on this machine
local_workers = 1  # processes of the host on this machine, each with devices of its own


def enable_cpu() -> None:
    """Let tpu-inference start on CPUs, and on GPUs: answer what it asks of a TPU.

    `register` does so where no TPU is found; before it, nothing of the host's runner may have been
    imported. Each hook takes the place of a function of tpu-inference:

    - `utils.make_optimized_mesh` sorts devices by their coordinates, which only TPUs have: they
      stay in JAX's order.
    - `utils.hbm_usage_bytes` reads how much memory a device has, which CPUs do not say: half of
      what the machine, or the container, has left is taken for it, shared by the devices of all
      workers on the machine.
    - `utils.general_device_put` sends a step's integers from a NumPy array that the next step
      overwrites, and which JAX on CPUs may read in place: it sends a copy.
    - `utils.get_device_name` raises without a TPU; only tables of tile sizes read it.
    - `tpu_info.get_num_cores_per_chip` asks Google's cloud for the kind of TPU, and raises
      elsewhere; `get_num_chips` counts other accelerators' files, too. They choose the chips that a
      pipeline's stage or a replica sees: one core, and no chips.
    - `models.common.compiler_options`: options of XLA's TPU compiler, which others refuse: none.
    - `layers.vllm.quantization.unquantized.t2j` hands a weight of a torch model to JAX, which on
      CPUs may keep the very memory that the host frees next (and torch then refuses to free
      float32 and float16): it hands over a copy.
    - `TpuPlatform.check_and_update_config` names the worker; with `TPU_MULTIHOST_BACKEND=ray` it is
      one that brings JAX's processes together, as libtpu does on TPUs. The number of replicas on
      this machine is noted, which share its memory.
    - `distributed.utils.get_device_topology_order_id` sorts processes by the coordinates of their
      TPUs: they stay in JAX's order.
    - `layers.common.utils.cpu_mesh` takes the first of all CPUs, which on TPUs is this process's:
      it takes the first of this process.
    - `distributed.kv_transfer` puts blocks that another server sends into the caches by a kernel
      for TPUs, and vLLM after the step that reads them: XLA does, and before it, by
      `jattn.integrations.tpu_inference.transfers`.
    - `layers.common.fused_moe_gmm` runs experts with TPU kernels: XLA runs them, by
      `jattn.integrations.tpu_inference.experts`.
    - `layers.common.attention_interface` and the host's table of torch's functions run encoders
      with TPU kernels: XLA runs them, by `jattn.integrations.tpu_inference.encoders`.
    - `spec_decode.jax.eagle3` and `dflash` jit what drafts tokens with options of XLA's TPU
      compiler: without any, by `jattn.integrations.tpu_inference.drafts`.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    from tpu_inference import tpu_info, utils
    from tpu_inference.distributed import utils as distributed_utils
    from tpu_inference.layers.common import utils as layer_utils
    from tpu_inference.layers.vllm.quantization import unquantized
    from tpu_inference.models.common import compiler_options
    from tpu_inference.platforms.tpu_platform import TpuPlatform

    if utils.make_optimized_mesh is _mesh:
        return  # done before
    utils.make_optimized_mesh = _mesh
    utils.hbm_usage_bytes = _memory
    utils.get_device_name = _device_name
    tpu_info.get_num_cores_per_chip = lambda: 1
    tpu_info.get_num_chips = lambda: 0
    utils.general_device_put = _of_a_copy(utils.general_device_put)
    compiler_options.get_step_fn_compiler_options = dict
    compiler_options.get_sampling_compiler_options = dict
    unquantized.t2j = _of_a_copy(unquantized.t2j)
    distributed_utils.get_device_topology_order_id = _process_index
    layer_utils.cpu_mesh = _cpu_mesh
    experts.enable()
    encoders.enable()
    transfers.enable()
    drafts.enable()
    TpuPlatform.check_and_update_config = _with_worker(TpuPlatform.check_and_update_config)


def _mesh(
    axis_shapes: Sequence[int], axis_names: Sequence[str], *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of devices in JAX's order."""
    chosen = np.array(jax.devices() if devices is None else devices)
    kinds = (AxisType.Auto,) * len(axis_shapes)
    return Mesh(chosen.reshape(axis_shapes), axis_names, axis_types=kinds)


@functools.cache
def _cpu_mesh() -> Mesh:
    """The mesh on which weights are loaded: one CPU of this process."""
    return Mesh(jax.local_devices(backend="cpu")[:1], ("cpu",))


def _of_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, given copies of the NumPy arrays or torch tensors in its first argument."""

    def copy(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return x  # never overwritten
        return x.copy() if isinstance(x, np.ndarray) else x.clone() if hasattr(x, "clone") else x

    @functools.wraps(function)
    def of_a_copy(first: Any, *args: Any, **kwargs: Any) -> Any:
        return function(jax.tree.map(copy, first), *args, **kwargs)

    return of_a_copy


def _with_worker(check_and_update_config: Callable[[Any], None]) -> Any:
    """The platform's method, and then the worker for several processes.

    Each replica's process has a configuration of one: how many there are is noted before.
    """

    def update(cls: type[Any], config: Any) -> None:
        del cls
        replicas = config.parallel_config.data_parallel_size_local
        check_and_update_config(config)
        setattr(config.sharding_config, REPLICAS, max(1, replicas))
        if os.environ.get("TPU_MULTIHOST_BACKEND") != "ray":
            return
        if os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1") != "1":
            raise ValueError(
                "VLLM_USE_RAY_V2_EXECUTOR_BACKEND: 0, but must be 1: without TPUs, jattn supports "
                "only that executor"
            )
        config.parallel_config.worker_cls = "jattn.integrations.tpu_inference.Worker"

    return classmethod(update)


def _process_index(local_devices: Sequence[Any], global_devices: Sequence[Any]) -> int:
    del global_devices
    return int(local_devices[0].process_index)


def _memory(devices: Sequence[Any]) -> list[tuple[int, int]]:
    """Bytes used and bytes there, of each device; other processes' are taken to be as ours."""
    ours = [device.process_index == jax.process_index() for device in devices]
    if all(device.platform == "cpu" for device in devices):
        return [(0, memory.available() // 2 // local_workers // sum(ours))] * len(ours)
    stats = [device.memory_stats() for device, here in zip(devices, ours, strict=True) if here]
    found = [(one["bytes_in_use"], one["bytes_limit"]) for one in stats]
    left = iter(found)
    return [next(left) if here else found[0] for here in ours]


def share_memory(config: VllmConfig) -> None:
    """Say how many workers of the host share this machine: with Ray one, else one per stage.

    So many for each replica.
    """
    global local_workers
    is_ray = os.environ.get("TPU_MULTIHOST_BACKEND") == "ray"
    stages = 1 if is_ray else config.parallel_config.pipeline_parallel_size
    local_workers = stages * getattr(config.sharding_config, REPLICAS, 1)


def _device_name(num_devices: int | None = None) -> str:
    """A name that no table of tile sizes has."""
    name = jax.devices()[0].device_kind
    return name if num_devices is None else f"{name}-{num_devices}"


def without_tpus() -> bool:
    """Whether JAX is told to use others here, or the machine has none and no proxy to some."""
    from tpu_inference import envs, tpu_info

    named = set(filter(None, envs.JAX_PLATFORMS.split(",")))
    if "proxy" in named:
        return False
    return bool(named and "tpu" not in named) or tpu_info.get_num_chips() == 0
