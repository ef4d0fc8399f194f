"""Copies of the arrays that sglang-jax puts on CPU devices.

If the alignment allows it, a JAX array on a CPU shares the memory of the NumPy array it was made
from. The host then writes to some of these NumPy arrays (sequence lengths, while draft tokens are
verified) before the step has read them. jattn copies them first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

Result = TypeVar("Result")
NAME = "device_array"


def replace_device_array() -> None:
    """Make the host's `device_array` copy, in every module of the host that has it."""
    from sgl_jax.srt.utils import jax_utils

    plain = getattr(jax_utils, NAME)
    if hasattr(plain, "__wrapped__"):
        return  # already replaced
    copying = copied(plain)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "sgl_jax" and getattr(module, NAME, None) is plain:
            setattr(module, NAME, copying)


def copied(device_array: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `device_array` so that it copies the NumPy arrays in its data."""

    @functools.wraps(device_array)
    def call(data: Any, *arguments: Any, **options: Any) -> Result:
        owned = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, data)
        return device_array(owned, *arguments, **options)

    return call
