"""The machine that a call runs on. Only `platform` starts a backend."""

from __future__ import annotations

from typing import Any

import jax


def default() -> jax.Device | str | None:
    """Return the value of `jax.default_device`: a device, the name of a platform, or None."""
    config: Any = jax.config
    return config.jax_default_device


def platform() -> str:
    """Return the current platform: "cpu", "gpu" or "tpu". Starts JAX's backend."""
    given = default()
    if given is None:
        name = jax.default_backend()
    else:
        name = given if isinstance(given, str) else given.platform
    return "gpu" if name in ("cuda", "rocm") else name
