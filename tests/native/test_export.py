"""Saved programs with native calls: from `jax.export`, compiled, or in JAX's cache on disk."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import jattn
from jattn.cpu.native import library, partition
from tests.support import processes
from tests.support.native import library as native_library

pytestmark = native_library.needed


def step(pool, new, query):
    """Write and read a pool of keys that hold their values."""
    lens = jnp.asarray([5], jnp.int32)
    tables = jnp.asarray([[3]], jnp.int32)
    write = jattn.update_kv_cache
    pool, _ = write(pool, None, new, None, lens + 47, implementation="native")
    return jattn.paged_attention(
        *(query, pool, None),
        block_tables=tables,
        seq_lens=lens,
        value_dim=8,
        implementation="native",
    )


def given():
    pool = jnp.asarray(np.arange(4 * 16 * 8).reshape(4, 1, 16, 8) % 13, jnp.float32)
    return pool, jnp.ones((1, 1, 8)), jnp.ones((1, 2, 8))


def test_an_exported_function_runs_here_and_names_the_checks_it_needs():
    with pytest.raises(ValueError, match="jattn_native_update"):
        jax.export.export(jax.jit(step))(*given())
    save = jax.export.export(jax.jit(step), disabled_checks=jattn.export_checks())
    saved = save(*given()).serialize()
    have = jax.export.deserialize(saved).call(*given())
    np.testing.assert_array_equal(have, step(*given()))


def test_a_program_of_another_version_says_so(monkeypatch):
    """Its operands may differ, so programs carry a version number of the sources."""
    version = library.version()
    monkeypatch.setattr(library, "version", lambda: version + 1)
    operands = (jnp.ones((5, 1, 16, 8)), *given()[1:])  # a size that no other test has traced
    save = jax.export.export(jax.jit(step), disabled_checks=jattn.export_checks())
    saved = save(*operands).serialize()
    with pytest.raises(jax.errors.JaxRuntimeError, match="another version of jattn made this"):
        np.asarray(jax.export.deserialize(saved).call(*operands))


def test_each_version_has_programs_of_its_own_over_several_devices(monkeypatch):
    """XLA's cache on disk identifies such a call only by the arguments of `partition.run`."""
    told = []

    def run(f, static, division, arrays):
        told.append(repr(static))
        return f(static, *arrays)

    monkeypatch.setattr(partition, "run", run)
    operands = (jnp.ones((7, 1, 16, 8)), *given()[1:])  # a size that no other test has traced
    jax.eval_shape(step, *operands)
    assert len(told) == 2  # the update and the attention
    assert all(str(library.version()) in text for text in told)


def test_a_process_without_a_library_says_so(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: library.Loaded(None, "its library is not built"))
    with pytest.raises(jattn.UnsupportedError, match="load_native: its library is not built"):
        jattn.load_native()


CALL = """
import sys
{first}
import jax, jax.numpy as jnp, numpy as np, pickle
from jax.experimental import serialize_executable
pool = jnp.asarray(np.arange(4 * 16 * 8).reshape(4, 1, 16, 8) % 13, jnp.float32)
saved = open({path!r}, "rb").read()
if {compiled}:
    call = serialize_executable.deserialize_and_load(*pickle.loads(saved))
else:
    call = jax.export.deserialize(bytearray(saved)).call
try:
    print(np.asarray(call(pool, jnp.ones((1, 1, 8)), jnp.ones((1, 2, 8)))).tolist())
except Exception as error:
    print(error)
"""


@pytest.mark.extended
@pytest.mark.parametrize("compiled", [False, True])
def test_another_process_loads_the_kernel_first(tmp_path, compiled):
    path = tmp_path / "saved"
    if compiled:
        program = jax.jit(step).lower(*given()).compile()
        path.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
    else:
        save = jax.export.export(jax.jit(step), disabled_checks=jattn.export_checks())
        path.write_bytes(save(*given()).serialize())
    code = CALL.format(first="import jattn; jattn.load_native()", path=str(path), compiled=compiled)
    assert processes.python(code) == str(np.asarray(step(*given())).tolist())
    if not compiled:
        found = processes.python(CALL.format(first="", path=str(path), compiled=compiled))
        assert "No FFI handler registered for jattn_native_" in found


CACHED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jattn
if jax.device_count() > 1:
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
mesh = jax.make_mesh((jax.device_count(),), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
heads = NamedSharding(mesh, P(None, "heads"))
for kind in ("e4m3", "e5m2"):  # programs that differ in nothing else
    caches = jattn.init_kv_cache(4, 2, 16, 8, format=jattn.Fp8(kind))
    new = jnp.asarray(np.arange(16).reshape(1, 2, 8), jnp.float32)
    at = jnp.asarray([48], jnp.int32)
    caches = jattn.update_kv_cache(*caches, new, new, at, implementation="xla")
    caches = [x.replace(data=jax.device_put(x.data, heads)) for x in caches]
    query = jax.device_put(jnp.ones((1, 2, 8)), heads)
    attend = jax.jit(lambda q, k, v: jattn.paged_attention(
        q, k, v, block_tables=at[None] // 16, seq_lens=at // 48, implementation="native"))
    np.testing.assert_allclose(attend(query, *caches)[0], new[0], rtol=0.15)
    if kind == "e4m3":
        np.testing.assert_allclose(attend(query, *caches)[0], new[0], rtol=0.07)
print("same")
"""


@pytest.mark.extended
@pytest.mark.parametrize("devices", ["1", "2"])
def test_programs_are_kept_on_disk(tmp_path, devices):
    """Exactly one per program; for several devices, JAX must ignore the address of a callback."""
    found = []
    for _ in range(2):
        there = processes.python(
            CACHED,
            JAX_NUM_CPU_DEVICES=devices,
            JAX_COMPILATION_CACHE_DIR=str(tmp_path),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="0",
        )
        assert there == "same"
        found.append({path.name for path in tmp_path.iterdir() if "atime" not in path.name})
    programs = [name for name in found[0] if re.search("lambda", name)]
    assert len(programs) == 2, found[0]
    assert found[1] == found[0]


PROCESS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jattn
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
arrays = [rng.standard_normal(shape).astype(np.float32)
          for shape in ((3, 8, 16), (6, 4, 4, 16), (6, 4, 4, 16), (3, 4, 16))]
tables = np.asarray([[5, 0], [2, 4], [1, 3]], np.int32)
lens = np.asarray([3, 8, 5], np.int32)
def step(query, keys, values, new):
    slots = jnp.asarray(tables)[jnp.arange(3), (lens - 1) // 4] * 4 + (lens - 1) % 4
    caches = jattn.update_kv_cache(keys, values, new, new, slots, implementation="native")
    out = jattn.paged_attention(query, *caches, block_tables=jnp.asarray(tables),
                                seq_lens=jnp.asarray(lens), implementation="native")
    return out, *caches
heads = NamedSharding(mesh, P(None, "heads"))
split = [jax.make_array_from_callback(x.shape, heads, lambda at, x=x: x[at]) for x in arrays]
compiled = jax.jit(step).lower(*split).compile()
assert "all-gather" not in compiled.as_text()
with jax.default_device(jax.local_devices()[0]):
    want = jax.jit(step)(*arrays)
for a, b in zip(compiled(*split), want, strict=True):
    for part in a.addressable_shards:
        np.testing.assert_allclose(part.data, np.asarray(b)[part.index], rtol=1e-5, atol=1e-6)
print("same")
"""


@pytest.mark.extended
def test_two_processes():
    """On a mesh over two processes with two devices, each process runs its own heads."""
    port = 20000 + os.getpid() % 20000
    command = [sys.executable, "-W", "error", "-c", PROCESS, f"localhost:{port}"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(processes.ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    pair = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        for one in pair:
            assert one.communicate(timeout=300)[0].strip() == "same"
    finally:
        for one in pair:
            one.kill()
