"""Settings and fixtures of all tests: no silent promotion, fast compilation, which tests run."""

import atexit
import gc
import importlib.metadata
import itertools
import os
import pathlib
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The interpreter of Mosaic GPU runs the warpgroups of a block as threads that wait for each other
# inside XLA's thread pool. With one thread per core, two cores would deadlock three warpgroups.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))
# NumPy multiplies only small matrices here: its threads would compete with the other worker's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

from tests.support import compile_log, rotation, rows


def pytest_configure(config):
    """Compile fast, and no program twice. Workers and processes that tests start inherit this.

    Otherwise most of the time would go to optimizing programs that run once. If `XLA_FLAGS` is
    already set, it is kept: CI sets it to an empty string to test what XLA compiles by default.
    """
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)
    # Traces are large trees that live long: collecting less often saves a tenth of the run.
    gc.set_threshold(200_000, 20, 100)
    # Leave Python line numbers out of compiled programs, and let an exiting worker collect garbage
    # once, not twice.
    set_jax("jax_traceback_in_locations_limit", 0)
    config.add_cleanup(gc.freeze)
    # At exit JAX would free every program, but a worker has reported its results by then.
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    if "COMPILE_LOG" in os.environ:
        compile_log.start(os.environ["COMPILE_LOG"])
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="jattn-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    set_jax("jax_compilation_cache_dir", folder)
    set_jax("jax_persistent_cache_min_compile_time_secs", 0.1)
    set_jax("jax_persistent_cache_min_entry_size_bytes", 0)


def set_jax(name, value):
    """Set an option of JAX, here and in the processes that tests start."""
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)


@pytest.fixture(autouse=True)
def strict_promotion():
    """Make JAX raise where it would otherwise promote dtypes or ranks silently."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


# Every program that XLA compiles for the CPU holds some memory mappings. Linux allows a process
# 65,530, and XLA crashes with a segmentation fault beyond them. Running all tests in one process
# would need more.
MOST_MAPPINGS = 35_000
MAPPINGS = pathlib.Path("/proc/self/maps")
tests_begun = itertools.count(1)


@pytest.fixture(autouse=True)
def few_compiled_programs():
    """Clear JAX's caches before compiled programs hold too many memory mappings."""
    yield
    if next(tests_begun) % 20 == 0 and MAPPINGS.exists():
        with MAPPINGS.open("rb") as lines:
            count = sum(1 for _ in lines)
        if count > MOST_MAPPINGS:
            jax.clear_caches()


def pytest_generate_tests(metafunc):
    """Run tests that use `each_row` once per implementation that runs here."""
    if "each_row" in metafunc.fixturenames:
        metafunc.parametrize(
            "each_row",
            rows.here(),
            ids=[row.implementation for row in rows.here()],
            indirect=True,
            scope="module",
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests of the least preferred implementation `fallback` and `extended`, and order tests.

    `slow` overrides `extended`. A run may ask for a share of large samples (see `rotation`). Tests
    marked `long` run first, so that none of them keeps a single worker busy at the end.
    """
    for item in items:
        kinds = {mark.name for mark in item.iter_markers()}
        if "slow" in kinds:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "extended"]
        elif rows.is_of_fallback(getattr(item, "callspec", None)) and "extended" not in kinds:
            item.add_marker(pytest.mark.fallback)
            item.add_marker(pytest.mark.extended)
    if share := os.environ.get(rotation.VARIABLE):
        others = [item for item in items if rotation.is_left_out(share, item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="module")
def each_row(request):
    """Make each implementation that runs here the automatic choice in turn."""
    with rows.automatic(request.param):
        yield request.param


@pytest.fixture(scope="module")
def each_differentiable_row(each_row):
    """Like `each_row`, for implementations that have gradients."""
    if not each_row.differentiable:
        pytest.skip(f"{each_row.implementation} has no gradients")
    return each_row
