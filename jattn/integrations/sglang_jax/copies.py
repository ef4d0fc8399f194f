"""Copies of what sglang-jax puts on CPUs.

Where the alignment allows it, JAX makes an array on a CPU of NumPy's memory itself. The host goes
on to write to some of it (lengths of sequences, while drafts are verified) before the step has read
it.
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
    """Let the host's `device_array` copy, in every module of the host that has it."""
    from sgl_jax.srt.utils import jax_utils

    plain = getattr(jax_utils, NAME)
    if hasattr(plain, "__wrapped__"):
        return  # done before
    copying = copied(plain)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "sgl_jax" and getattr(module, NAME, None) is plain:
            setattr(module, NAME, copying)


def copied(device_array: Callable[..., Result]) -> Callable[..., Result]:
    """`device_array` of copies of the NumPy arrays in its data."""

    @functools.wraps(device_array)
    def call(data: Any, *arguments: Any, **options: Any) -> Result:
        owned = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, data)
        return device_array(owned, *arguments, **options)

    return call
