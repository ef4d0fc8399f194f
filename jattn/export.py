"""Support for saved programs with jattn's kernels: `jax.export`, or compiled ahead of time."""

from __future__ import annotations

from jax import export

from jattn import capability
from jattn.cpu.native import library
from jattn.pallas.triton import packed


def export_checks() -> tuple[export.DisabledSafetyCheck, ...]:
    """Return the checks to disable in `jax.export` to save a function with jattn's kernels.

    JAX refuses to save custom calls that it does not know to be stable, such as those of the native
    CPU kernel and the Triton kernels. jattn's calls are stable only within one version: load a
    function with the version that saved it. A function with Triton kernels contains code for the
    kind of GPU it was saved for. A call uses the kernels of the machine that saves it: to save for
    other `platforms`, pass `implementation="xla"` to reads and writes. With `implementation="xla"`
    no check needs disabling, and JAX's own guarantees hold. Functions over several devices can be
    saved if they use `jattn.sharding` or `jax.shard_map`.

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
    """Load the native CPU kernel and register its calls with XLA in this process.

    Call this in a process that runs a saved program (`jax.export.deserialize`, or
    `jax.experimental.serialize_executable`) before it has called any other function of jattn: those
    load the kernel automatically. Without it, XLA reports that no handler is registered for
    `jattn_native_attend`. Starts no backend; a second call does nothing.

    Raises:
      UnsupportedError: there is no matching library; gives the reason and the command that helps.
    """
    if library.missing():
        raise capability.UnsupportedError(f"load_native: {'; '.join(library.missing())}")
