"""What machine a call runs on. Nothing here starts a backend until it is asked."""

from __future__ import annotations

import importlib.util

import jax


def platform() -> str:
    """The platform new arrays land on: "cpu", "gpu" or "tpu". Starts JAX's backend."""
    name = jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def compute_capability() -> int | None:
    """`80` for sm_80, `90` for sm_90, None where there is no NVIDIA GPU. Starts JAX's backend."""
    if platform() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return None if capability is None else round(float(capability) * 10)


def installed(module: str) -> bool:
    """Whether `module` could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None
