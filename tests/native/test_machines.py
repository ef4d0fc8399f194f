"""The native kernel compiled for other machines, and run under an emulator.

`tests/support/native/harness.cc` runs it there, without Python, JAX or XLA.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pathlib
import platform
import shutil
import subprocess

import numpy as np
import pytest

import jattn
from jattn.cpu.native import build, launch
from tests.support import budget, problems
from tests.support.native import writing as native_writing

pytestmark = pytest.mark.extended
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HARNESS = pathlib.Path(__file__).parents[1] / "support" / "native" / "harness.cc"


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """The harness for 64-bit ARM, as `arm("write" or "attend", case, instruction_set)`."""
    command, prefix = [CROSS, "-static"], [EMULATOR]
    if platform.machine() in ("aarch64", "arm64"):
        command, prefix = build.compiler(), []
    for tool in (command[0], *prefix):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}, which compiles or runs the kernel for 64-bit ARM")
    folder = tmp_path_factory.mktemp("arm")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # one build for all workers
    program = shared / "arm-harness"
    with open(shared / "arm-harness.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            compile_harness(command, folder / "harness")
            (folder / "harness").rename(program)

    def run(what: str, case: bytes, instruction_set: str = "base") -> bytes:
        (folder / "case").write_bytes(case)
        done = subprocess.run(
            [*prefix, str(program), what, str(folder / "case"), str(folder / "result")],
            check=True,
            timeout=600,
            env={**os.environ, "JATTN_NATIVE_ISA": instruction_set},
            stdout=subprocess.PIPE,
            text=True,
        )
        if instruction_set not in done.stdout.split():
            pytest.skip(f"this machine has only {done.stdout}")
        return (folder / "result").read_bytes()

    return run


def compile_harness(command: list[str], program: pathlib.Path) -> None:
    """Build the kernel for every instruction set of 64-bit ARM, and the program that calls it."""
    flags = ["-std=c++17", "-O2", "-fno-math-errno", "-w", "-DJATTN_ARM", f"-I{build.SOURCES}"]
    sets = build.instruction_sets("aarch64", command)
    objects = []
    for (name, of_set), source in itertools.product(sets.items(), build.PER_SET_SOURCES):
        objects.append(program.parent / f"{source}_{name}.o")
        unit = [*of_set, f"-DINSTRUCTION_SET={name}", "-c", str(build.SOURCES / f"{source}.cc")]
        subprocess.run([*command, *flags, *unit, "-o", str(objects[-1])], check=True)
    sources = [build.SOURCES / "schedule.cc", build.SOURCES / "update.cc", HARNESS]
    units = [*map(str, (*sources, *objects)), "-pthread", "-o", str(program)]
    subprocess.run([*command, *flags, *units], check=True)


def number(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def array(x, dtype=None) -> bytes:
    """Return an array as bytes, preceded by its size."""
    data = b"" if x is None else np.ascontiguousarray(x, dtype).tobytes()
    return number(len(data)) + data


def pool(cache: jattn.KVArray) -> bytes:
    """Return a cache in the form that the harness reads."""
    format, words = cache.format, np.asarray(cache.data)
    sizes = (launch.format_code(format), launch.PER[format.per], cache.shape[-1])
    params = (None if x is None else np.asarray(x) for x in cache.quant_params)
    row_bytes = words.shape[-1] * words.itemsize
    return number(*sizes, row_bytes) + b"".join(map(array, (words, *params)))


@pytest.mark.parametrize("name", problems.FORMATS)
def test_writing(arm, name):
    """Writing gives the same bits as on this machine, where a test compares them with XLA's."""
    format = problems.FORMATS[name]
    at = list(problems.FORMATS).index(name)
    case = ((format, format), "HND" if at % 2 else "NHD", ("float32", "bfloat16")[at // 2 % 2], 48)
    before, after = native_writing.written("native", *case)
    blocks, *inner = before[0].shape[:3]
    heads, size = inner if at % 2 else inner[::-1]
    rows, slots = native_writing.new_rows(48, case[2]), native_writing.slots()
    given = number(len(slots), heads, blocks, size, case[1] == "NHD", launch.FORMATS[case[2]])
    divisor = before[0].scale if format.takes_scale else None
    found = arm("write", given + b"".join(map(array, (slots, rows, divisor))) + pool(before[0]))
    at = 0
    for have in (after[0].data, *after[0].quant_params):
        if have is None:
            continue
        want = np.asarray(have)
        part = np.frombuffer(found, want.dtype, want.size, at).reshape(want.shape)
        at += want.nbytes
        same = (part == want) | ((part != part) & (want != want))
        if name in ("float16", "bfloat16"):  # a NaN's other bits depend on the machine
            as_floats = [
                np.asarray(x).view(format.value_dtype).astype(np.float32) for x in (part, want)
            ]
            same |= np.isnan(as_floats[0]) & np.isnan(as_floats[1])
        assert same.all(), np.argwhere(~same)[:5]
    assert at == len(found)


@pytest.mark.parametrize(
    ("format", "dtype", "options", "instruction_set", "heads", "head_dim"),
    [
        ("float32", "float32", {"sinks"}, "base", 6, 48),
        ("bfloat16", "bfloat16", {"sliding_window"}, "base", 6, 48),
        ("float16", "float16", set(), "base", 6, 48),
        ("fp8_e4m3", "bfloat16", set(), "base", 6, 48),
        ("int4_zero", "float32", set(), "base", 6, 48),
        ("nvfp4", "float32", {"sinks"}, "base", 6, 48),
        # Products of pairs, for one row, a few and many, and for formats that are widened first.
        ("bfloat16", "bfloat16", {"sliding_window"}, "bf16", 6, 48),
        ("bfloat16", "bfloat16", {"sinks"}, "bf16", 2, 37),
        ("bfloat16", "bfloat16", set(), "bf16", 16, 512),
        ("fp8_e5m2", "bfloat16", set(), "bf16", 6, 50),
        ("int8", "bfloat16", set(), "bf16", 4, 64),
        ("int4_zero", "bfloat16", set(), "bf16", 6, 48),
        ("nvfp4", "bfloat16", {"sinks"}, "bf16", 8, 80),
        ("float16", "bfloat16", set(), "bf16", 6, 48),
    ],
)
def test_attention(arm, format, dtype, options, instruction_set, heads, head_dim):
    """Decode, prefill and a long sequence are within the budget of the oracle."""
    problem = problems.Problem(
        query_lens=(1, 0, 1, 37, 1, 20),
        seq_lens=(1, 0, 16, 130, 700, 23),
        num_heads=heads,
        num_kv_heads=2,
        head_dim=head_dim,
        value_dim=head_dim,
        query_dtype=dtype,
        format=format,
        kv_layout="NHD" if heads % 4 else "HND",
        options=frozenset({"return_lse", *options}),
    )
    batch = problems.build(problem)
    call, x = batch.call()
    keys, values = batch.key_cache, batch.value_cache
    tables = np.asarray(x.block_tables)
    window = None if x.sliding_window is None else int(x.sliding_window)
    assert call.is_causal is True
    given = number(
        *(call.num_tokens, len(tables), call.num_heads, call.num_kv_heads, keys.shape[0]),
        *(call.block_size, tables.shape[1], call.kv_layout == "NHD", 1),
        *(window is not None, window or 0, call.max_query_len, launch.FORMATS[dtype]),
    )
    arrays = (x.scale, x.query, tables, x.seq_lens, x.query_start_loc, x.sinks)
    case = given + b"".join(array(None if each is None else np.asarray(each)) for each in arrays)
    case += pool(keys) + pool(values) + array(x.k_scale) + array(x.v_scale)
    found = np.frombuffer(arm("attend", case, instruction_set), np.float32)
    split = call.num_tokens * call.num_heads * call.value_dim
    out = found[:split].reshape(call.num_tokens, call.num_heads, call.value_dim)
    lse = found[split:].reshape(call.num_tokens, call.num_heads)
    budget.of(batch).check(out.astype(call.out_dtype), lse)
