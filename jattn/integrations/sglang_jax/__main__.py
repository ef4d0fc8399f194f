"""`python -m jattn.integrations.sglang_jax FLAGS`: sglang-jax's server with jattn."""

from __future__ import annotations

from jattn.integrations import sglang_jax


def main() -> None:
    """Run the server with jattn installed, until it stops."""
    sglang_jax.install()
    from sgl_jax import launch_server

    launch_server.main()


if __name__ == "__main__":
    main()
