"""What machine a call runs on. Nothing here starts a backend until it is asked."""

from __future__ import annotations

import jax


def platform() -> str:
    """The platform new arrays land on: "cpu", "gpu" or "tpu". Starts JAX's backend."""
    name = jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name
