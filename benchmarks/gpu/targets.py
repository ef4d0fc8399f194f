"""NVIDIA GPUs to compile for on a machine that has none.

A `Gpu` holds what the compiler and the occupancy rule must know about a device, from its data
sheet. `device_for(sm)` is a compile-only `jax.Device`: functions lower and compile for it, nothing
runs. It needs the CUDA plugin (`pip install jax-cuda13-plugin jax-cuda13-pjrt`, in jax's version),
but no driver and no GPU.
"""

import dataclasses
import functools
import pathlib

import jax

from jattn.integers import ceil_div, round_up
from jattn.pallas import machine


class MissingCompilerError(RuntimeError):
    """The CUDA plugin or an assembler is not installed; the message says what to install."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One device.

    Attributes:
      kind: its name, which JAX must know, because it picks the architecture by name.
      sm: compute capability, 90 for 9.0.
      cores: streaming multiprocessors.
      core_threads, core_blocks: the most that may be resident on one of them.
      l2: bytes.
      bandwidth: GB a second, from the data sheet.
      clock: GHz.
      memory: GB.
    """

    kind: str
    sm: int
    cores: int
    core_threads: int
    core_blocks: int
    l2: int
    bandwidth: int
    clock: float
    memory: int

    @property
    def machine(self) -> machine.Machine:
        """Return the device as the choice of kernels sees it."""
        return machine.Machine(self.sm, self.cores)

    @property
    def block_shared(self) -> int:
        """Bytes of shared memory that one block may have."""
        return self.machine.block_shared

    @property
    def core_shared(self) -> int:
        """Bytes of shared memory of one multiprocessor; 1 KiB per block is the system's."""
        return self.block_shared + machine.KIB


DRIVER = pathlib.Path("/dev/nvidiactl")

MIB = 2**20
GPUS = {
    gpu.sm: gpu
    for gpu in (
        Gpu("NVIDIA A100", 80, 108, 2048, 32, 40 * MIB, 2039, 1.41, 80),
        Gpu("NVIDIA A10", 86, 72, 1536, 16, 6 * MIB, 600, 1.695, 24),
        Gpu("NVIDIA L4", 89, 58, 1536, 24, 48 * MIB, 300, 2.04, 24),
        Gpu("NVIDIA H200", 90, 132, 2048, 32, 50 * MIB, 4800, 1.98, 141),
        Gpu("NVIDIA B200", 100, 148, 2048, 32, 126 * MIB, 8000, 1.965, 180),
        Gpu("NVIDIA RTX PRO 6000", 120, 188, 1536, 24, 128 * MIB, 1792, 2.6, 96),
    )
}


@functools.lru_cache
def devices_for(sm: int, count: int = 1) -> tuple[jax.Device, ...]:
    """Return `count` compile-only devices of compute capability `sm`, as in one machine.

    Raises:
      MissingCompilerError: the CUDA plugin is not installed.
    """
    from jax.experimental import topologies

    if jax.config.jax_platforms is None and not DRIVER.exists():
        jax.config.update("jax_platforms", "cpu")  # or the CUDA plugin needs a driver and fails
    gpu = GPUS[sm]
    # Without versions of runtime and driver, XLA keeps calls out of command buffers.
    config = f"""
      platform_name: "CUDA"
      device_description_str: "{gpu.kind}"
      dnn_version_info {{ major: 9 minor: 12 }}
      gpu_device_info {{
        cuda_compute_capability {{ major: {sm // 10} minor: {sm % 10} }}
        core_count: {gpu.cores}
        fpus_per_core: 128
        threads_per_warp: 32
        threads_per_block_limit: 1024
        threads_per_core_limit: {gpu.core_threads}
        thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: {machine.REGISTERS}
        registers_per_block_limit: {machine.REGISTERS}
        shared_memory_per_block: 49152
        shared_memory_per_block_optin: {gpu.block_shared}
        shared_memory_per_core: {gpu.core_shared}
        l2_cache_size: {gpu.l2}
        memory_bandwidth: {gpu.bandwidth * 10**9}
        clock_rate_ghz: {gpu.clock}
        device_memory_size: {gpu.memory * 10**9}
        runtime_version: "13.0.0" driver_version: "13.0.0"
      }}"""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{count}"
        )
    except NotImplementedError as error:
        raise MissingCompilerError(
            "no CUDA compiler: pip install "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        ) from error
    return tuple(topology.devices)


def device_for(sm: int) -> jax.Device:
    """Return one compile-only device of compute capability `sm`."""
    return devices_for(sm)[0]


def occupancy(gpu: Gpu, threads: int, registers: int, shared: int) -> tuple[int, str]:
    """Return `(blocks that fit on one multiprocessor, what limits them)`.

    Args:
      gpu: the device.
      threads: threads per block.
      registers: registers per thread.
      shared: bytes per block, static and dynamic.
    """
    if shared > gpu.block_shared:
        return 0, "shared memory"
    warps = ceil_div(threads, 32)
    per_warp = round_up(registers * 32, 256)  # a warp's registers come 256 at a time
    limits = {
        "threads": gpu.core_threads // (warps * 32),
        "blocks": gpu.core_blocks,
        "registers": machine.REGISTERS // max(1, per_warp * warps),
        # A block's shared memory comes 128 bytes at a time, and 1 KiB of it is the system's.
        "shared memory": gpu.core_shared // (round_up(shared, 128) + machine.KIB),
    }
    limit = min(limits, key=limits.__getitem__)
    return limits[limit], limit
