"""Strictness for every test: no silent dtype or rank promotion, and every warning an error."""

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
# inside XLA's thread pool: with one thread per core, two cores are not enough for three of them.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))
# NumPy multiplies small matrices here: threads for them would wait for those of the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

from tests.support import compile_log, rotation, rows


def pytest_configure(config):
    """Compile fast, and no program twice: workers and the processes of tests inherit the settings.

    Most of the time would go to optimising programs that run once. An `XLA_FLAGS` in the
    environment is taken as it is: CI sets it empty to test what XLA compiles by default.
    """
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)
    # Traces are large trees that live long: collecting less often saves a tenth of the run.
    gc.set_threshold(200_000, 20, 100)
    # Programs do not say which Python lines they come from, and at its end a worker collects
    # what is left once, not twice.
    set_jax("jax_traceback_in_locations_limit", 0)
    config.add_cleanup(gc.freeze)
    if hasattr(config, "workerinput"):  # has reported its results; JAX would free each program
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
    """An option of JAX, here and in the processes that tests start."""
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)


@pytest.fixture(autouse=True)
def strict_promotion():
    """JAX refuses what it would otherwise promote in silence."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


# Every program that XLA has compiled for the CPU keeps some mappings of memory, of which Linux
# allows a process 65,530; past them it ends in a segmentation fault. A run of all tests in one
# process needs more.
MOST_MAPPINGS = 35_000
MAPPINGS = pathlib.Path("/proc/self/maps")
tests_begun = itertools.count(1)


@pytest.fixture(autouse=True)
def few_compiled_programs():
    """Forget what earlier tests compiled before there is too much of it."""
    yield
    if next(tests_begun) % 20 == 0 and MAPPINGS.exists():
        with MAPPINGS.open("rb") as lines:
            count = sum(1 for _ in lines)
        if count > MOST_MAPPINGS:
            jax.clear_caches()


def pytest_generate_tests(metafunc):
    """Tests with `each_row` run once for every implementation that runs here."""
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
    """Tests of the implementation that others are preferred to are left to `-m extended`.

    `slow` overrides `extended`. Of large samples a share may be asked for: `rotation`. Tests marked
    `long` come first, so that no worker is left alone with one in the end.
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
    """The automatic implementation, in turn every one that runs here."""
    with rows.automatic(request.param):
        yield request.param


@pytest.fixture(scope="module")
def each_differentiable_row(each_row):
    """Those of them through which gradients flow."""
    if not each_row.differentiable:
        pytest.skip(f"{each_row.implementation} has no gradients")
    return each_row
