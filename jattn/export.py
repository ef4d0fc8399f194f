"""Saved programs that hold jattn's kernels: by `jax.export`, or compiled ahead of time."""

from __future__ import annotations

from jax import export

from jattn import capability
from jattn.cpu.native import library
from jattn.pallas.triton import packed


def export_checks() -> tuple[export.DisabledSafetyCheck, ...]:
    """The checks to disable in `jax.export` so that it saves a function with jattn's kernels.

    JAX refuses to save custom calls whose names it does not know to be stable: those of the native
    CPU kernel and of Triton's. jattn's calls are stable only within one version: a saved
    function is read by the version that wrote it. One with Triton's kernels holds code for the kind
    of GPU that it was saved for. A call takes the kernels of the machine that saves it: to save for
    other `platforms`, name `implementation="xla"` in reads and writes.
    With `implementation="xla"` none of this is needed, and JAX's own guarantees hold. Functions
    over several devices are saved where they use `jattn.sharding` or `jax.shard_map`.

    Returns:
      A tuple for `disabled_checks`.

    Example:
      >>> import jax, jax.numpy as jnp, jattn
      >>> def attend(query, pool, tables, lens):
      ...     return jattn.paged_attention(query, pool, pool, block_tables=tables, seq_lens=lens)
      >>> given = jnp.ones((1, 2, 8)), jnp.ones((4, 1, 16, 8)), jnp.array([[3]]), jnp.array([5])
      >>> save = jax.export.export(jax.jit(attend), disabled_checks=jattn.export_checks())
      >>> saved = save(*given).serialize()
      >>> float(jax.export.deserialize(saved).call(*given)[0, 0, 0])
      1.0
    """
    calls = (*library.CALLS, packed.TARGET)
    return tuple(map(export.DisabledSafetyCheck.custom_call, calls))


def load_native() -> None:
    """Load the native CPU kernel and make its calls known to XLA in this process.

    For processes that run saved programs (`jax.export.deserialize`, or
    `jax.experimental.serialize_executable`) and call no function of jattn first. Without it XLA
    says that no handler is registered for `jattn_native_attend`. Every other function of jattn
    loads the kernel automatically. Starts no backend; a second call does nothing.

    Raises:
      UnsupportedError: there is no library that fits, with the reason and the command that helps.
    """
    if library.missing():
        raise capability.UnsupportedError(f"load_native: {'; '.join(library.missing())}")
