"""Hooks for machines without TPUs, in place of functions of tpu-inference that need one."""

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

REPLICAS = "jattn_replicas"  # in the host's sharding: replicas that `vllm serve` starts here
local_workers = 1  # processes of the host on this machine, each with its own devices


def enable_cpu() -> None:
    """Make tpu-inference run on CPUs and GPUs by replacing functions that assume a TPU.

    `register` calls this if it finds no TPU. Call it before anything imports the host's runner.
    Each hook replaces a function of tpu-inference:

    - `utils.make_optimized_mesh` sorts devices by coordinates, which only TPUs have. The hook keeps
      JAX's order.
    - `utils.hbm_usage_bytes` reads how much memory a device has, which CPUs do not report. The hook
      reports half of the memory that the machine, or the container, has left, shared by the devices
      of all workers on the machine.
    - `utils.general_device_put` sends a step's integers from a NumPy array that the host overwrites
      for the next step, but JAX on CPUs may still be reading that array. The hook sends a copy.
    - `utils.get_device_name` raises without a TPU. The hook returns JAX's name for the device: only
      tables of tile sizes use it.
    - `tpu_info.get_num_cores_per_chip` asks Google's cloud for the type of TPU, and raises
      elsewhere; `get_num_chips` also counts the device files of other accelerators. The host
      assigns chips to pipeline stages and replicas by them. The hooks return one core and no chips.
    - `models.common.compiler_options` returns options of XLA's TPU compiler, which other compilers
      reject. The hook returns none.
    - `layers.vllm.quantization.unquantized.t2j` hands a torch model's weight to JAX, which on CPUs
      may keep using the memory that the host frees next (and torch then refuses to free float32
      and float16). The hook hands over a copy.
    - `TpuPlatform.check_and_update_config` selects the worker class. With
      `TPU_MULTIHOST_BACKEND=ray` the hook selects one that starts JAX's distributed runtime, as
      libtpu does on TPUs. It also records how many replicas share this machine's memory.
    - `distributed.utils.get_device_topology_order_id` sorts processes by the coordinates of their
      TPUs. The hook keeps JAX's order.
    - `layers.common.utils.cpu_mesh` uses the first of all CPU devices, which belongs to this
      process only on machines with TPUs. The hook uses the first one of this process.
    - `distributed.kv_transfer` writes blocks from another server into the caches with a TPU kernel,
      and vLLM starts that after the step that reads them. With the hooks of
      `jattn.integrations.tpu_inference.transfers`, XLA writes them before that step.
    - `layers.common.fused_moe_gmm` runs experts with TPU kernels. XLA runs them instead
      (`jattn.integrations.tpu_inference.experts`).
    - `layers.common.attention_interface` and the host's table of torch functions run encoders with
      TPU kernels. XLA runs them instead (`jattn.integrations.tpu_inference.encoders`).
    - `spec_decode.jax.eagle3` and `dflash` jit the functions that draft tokens with options of
      XLA's TPU compiler. Those hooks use none (`jattn.integrations.tpu_inference.drafts`).

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
    """Return a mesh of devices in JAX's order."""
    chosen = np.array(jax.devices() if devices is None else devices)
    kinds = (AxisType.Auto,) * len(axis_shapes)
    return Mesh(chosen.reshape(axis_shapes), axis_names, axis_types=kinds)


@functools.cache
def _cpu_mesh() -> Mesh:
    """Return the mesh that weights are loaded on: one CPU device of this process."""
    return Mesh(jax.local_devices(backend="cpu")[:1], ("cpu",))


def _of_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` receive copies of the NumPy arrays or torch tensors in its first argument."""

    def copy(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return x  # never overwritten
        return x.copy() if isinstance(x, np.ndarray) else x.clone() if hasattr(x, "clone") else x

    @functools.wraps(function)
    def of_a_copy(first: Any, *args: Any, **kwargs: Any) -> Any:
        return function(jax.tree.map(copy, first), *args, **kwargs)

    return of_a_copy


def _with_worker(check_and_update_config: Callable[[Any], None]) -> Any:
    """Wrap the platform's method to record the number of replicas and select a worker for Ray.

    The number is known only here, before each replica's process has a configuration of one.
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
    """Return each device's used and total bytes; devices of other processes count as ours do."""
    ours = [device.process_index == jax.process_index() for device in devices]
    if all(device.platform == "cpu" for device in devices):
        return [(0, memory.available() // 2 // local_workers // sum(ours))] * len(ours)
    stats = [device.memory_stats() for device, here in zip(devices, ours, strict=True) if here]
    found = [(one["bytes_in_use"], one["bytes_limit"]) for one in stats]
    left = iter(found)
    return [next(left) if here else found[0] for here in ours]


def share_memory(config: VllmConfig) -> None:
    """Set how many workers share this machine: per replica one per stage, or with Ray one."""
    global local_workers
    is_ray = os.environ.get("TPU_MULTIHOST_BACKEND") == "ray"
    stages = 1 if is_ray else config.parallel_config.pipeline_parallel_size
    local_workers = stages * getattr(config.sharding_config, REPLICAS, 1)


def _device_name(num_devices: int | None = None) -> str:
    """Return JAX's name for the device, which no table of tile sizes lists."""
    name = jax.devices()[0].device_kind
    return name if num_devices is None else f"{name}-{num_devices}"


def without_tpus() -> bool:
    """Whether JAX is told to use other devices, or the machine has no TPUs and no proxy to any."""
    from tpu_inference import envs, tpu_info

    named = set(filter(None, envs.JAX_PLATFORMS.split(",")))
    if "proxy" in named:
        return False
    return bool(named and "tpu" not in named) or tpu_info.get_num_chips() == 0
