"""Which GPU a call is for, and the limits that the kernels share.

It is the GPU that JAX would put new arrays on, which `with jax.default_device(device):` chooses.
That `device` may come from `jax.experimental.topologies` and only describe a GPU that this machine
does not have: then a call can be lowered and compiled ahead of time, but not run.
"""

from __future__ import annotations

import dataclasses

import jax

from jattn import device

KIB = 2**10
REGISTERS = 65536  # of 32 bits, per multiprocessor, on every GPU that the kernels run on
# Shared memory in KiB that one block may have, by compute capability (CUDA's programming guide).
_BLOCK_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
# Sequences with up to this many query tokens are decoded: their keys are split over the GPU. Eight
# cover speculative decoding, which is bound by reading K and V just as one token is.
DECODE_TOKENS = 8
# CUDA's limit on the blocks of a grid along y, and along z. Along x it is 2**31 - 1.
MOST_ROWS_OF_BLOCKS = 65535


def block_shared(sm: int) -> int:
    """Bytes of shared memory that one block may have on GPUs of a compute capability."""
    return _BLOCK_SHARED.get(sm, 99 if sm >= 80 else 48) * KIB


@dataclasses.dataclass(frozen=True)
class Machine:
    """The facts about a GPU that decide which kernels run.

    Attributes:
      sm: compute capability, 90 for 9.0.
      cores: streaming multiprocessors.
    """

    sm: int
    cores: int

    @property
    def block_shared(self) -> int:
        """Bytes of shared memory that one block may have."""
        return block_shared(self.sm)


def here() -> Machine | None:
    """Return the current NVIDIA GPU, or None if the current platform is another."""
    if device.platform() != "gpu":
        return None
    given = device.default()
    # The given device, or the first one of its platform: the GPUs of a machine are all alike.
    found = given if given is not None and not isinstance(given, str) else None
    if found is None:
        found = jax.local_devices(backend=given)[0]
    capability = str(getattr(found, "compute_capability", ""))
    if not capability.replace(".", "").isdigit():  # AMD uses names
        return None
    major, _, minor = capability.partition(".")
    return Machine(10 * int(major) + int(minor or 0), int(found.core_count))


def not_nvidia() -> tuple[str, ...]:
    """Return why no kernel runs on another vendor's GPU; empty on NVIDIA's, and without a GPU."""
    if here() is None and device.platform() == "gpu":
        return ("it runs on NVIDIA GPUs, and this GPU is not one",)
    return ()
