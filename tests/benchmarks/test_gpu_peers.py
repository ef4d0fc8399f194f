"""The GPU benchmark's peers, without a GPU: which are installed, which refuse, their worker."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import data as gpu_data
from benchmarks.gpu import matrix as gpu_matrix
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu import session as gpu_session
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.worker import WorkerError
from jattn.pallas import machine

pytestmark = pytest.mark.extended  # a tool for users with a GPU

DECODE = gpu_workloads.workload("gpt-oss", "3q1s70")
EVERYTHING = frozenset({peer.package for peer in gpu_peers.PEERS})
ALL = gpu_peers.Found(EVERYTHING, EVERYTHING)
BY_NAME = {peer.name: peer for peer in gpu_peers.PEERS}


def runs(layer: str, batch: str) -> set[str]:
    w = gpu_workloads.workload(layer, batch)
    return {peer.name for peer, why in gpu_peers.listed(ALL, w) if why is None}


def test_nothing_is_installed():
    """Each missing peer says what to install, and listing them imports neither jax nor torch."""
    found = gpu_peers.Found(frozenset({"jax"}), frozenset())
    said = dict(gpu_peers.listed(found, DECODE))
    assert {peer.name for peer, why in said.items() if why is None} == {"jax-pallas", "jax-cudnn"}
    assert all("no torch: pip install torch" in why for why in said.values() if why)
    only_torch = gpu_peers.Found(frozenset(), frozenset({"torch"}))
    said = {peer.name: why for peer, why in gpu_peers.listed(only_torch, DECODE)}
    assert said["jax-pallas"] == "no jax: pip install jax"
    assert said["vllm-triton"].startswith("no vllm: pip install vllm, or name a folder")
    assert said["flashinfer-hnd"] == "no flashinfer: pip install flashinfer-python"
    code = (
        "import sys; from benchmarks.gpu import peers as gpu_peers; "
        "assert not {'jax', 'torch'} & set(sys.modules); print(sorted(gpu_peers.installed()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "jax" in ran.stdout


def test_another_python_is_asked():
    assert gpu_peers.installed(sys.executable) == gpu_peers.installed()
    assert gpu_peers.installed("no-such-python") == frozenset()


def test_a_folder_of_kernels(tmp_path):
    def why(folder):
        found = gpu_peers.Found(frozenset(), frozenset({"torch"}), str(folder))
        return found.why_not(BY_NAME["vllm-triton"], DECODE)

    (tmp_path / gpu_peers.VLLM_FILES[0]).write_text("")
    assert why(tmp_path) == f"{tmp_path} has no {gpu_peers.VLLM_FILES[1]}"
    (tmp_path / gpu_peers.VLLM_FILES[1]).write_text("")
    assert why(tmp_path) is None


@pytest.mark.parametrize(
    ("layer", "batch", "refuse"),
    [
        ("llama-8b", "q1s8k", ()),
        ("llama-8b", "q8k", ("jax-pallas",)),
        ("llama-8b", "q2ks32k", ("jax-pallas", "jax-cudnn")),
        ("llama-8b", "q2k_64q1s4k", ("jax-pallas", "jax-cudnn", "torch-sdpa", "torch-flex")),
        ("gemma4-31b", "q1s8k", ("jax-cudnn", "torch-sdpa")),
        ("gpt-oss-window", "64q1s8k", ("jax-pallas",)),
        ("gpt-oss-window", "q8k", ("jax-pallas", "torch-sdpa")),
    ],
)
def test_refusals(layer, batch, refuse):
    assert runs(layer, batch) == set(gpu_peers.NAMES) - set(refuse)
    w = gpu_workloads.workload(layer, batch)
    assert all(len(BY_NAME[name].refuses(w).split()) > 3 for name in refuse)


@pytest.mark.extended
def test_dry_run_lists_peers(capsys, monkeypatch):
    monkeypatch.setattr(gpu.gpu_peers, "find", lambda *a: gpu_peers.Found({"jax"}, set()))
    gpu.main(["--dry-run", "--filter", "^gemma4-31b-q1s8k", "--implementation", "xla"])
    said = capsys.readouterr().out
    assert "peer jax-pallas: would run" in said
    assert "peer jax-cudnn: head size 512: cuDNN takes multiples of 8 up to 256" in said
    assert "peer torch-sdpa: no torch" in said


REAL_WORKER = gpu_peers.Worker


def worker(python: str = sys.executable, device: str = "cpu", **given) -> gpu_peers.Worker:
    return REAL_WORKER(python, device, module="tests.support.fake_gpu_worker", **given)


def test_worker():
    """The peer that computes the right rows is timed; each of the others loses only its own row."""
    data = gpu_data.make_data(DECODE, 2**10)
    want = gpu_data.expected_rows(DECODE, data, np.asarray(data.tables[0]))
    with worker() as other:

        def said(name):
            return gpu_peers.measure(BY_NAME[name], DECODE, data, want, other)

        assert said("torch-sdpa") == ([1e-3] * 7, "it knows")
        assert "out of budget: sequence 0" in said("torch-flex")
        assert said("vllm-triton") == "WorkerError: RuntimeError: it does not like this"
        first = other.info["pid"]
        assert "it ended with 3: a library that prints" in said("flashinfer-nhd")
        assert said("torch-sdpa") == ([1e-3] * 7, "it knows")
        assert other.info["pid"] != first
        # A kernel that loses the device also loses only its own row.
        second = other.info["pid"]
        assert said("flashinfer-hnd") == "WorkerError: RuntimeError: misaligned address"
        assert said("torch-sdpa") == ([1e-3] * 7, "it knows")
        assert other.info["pid"] != second


def test_rows_of_peers(capsys, tmp_path):
    """A wrong or missing peer has a reason instead of a time, in the table and in the file."""
    data, limits = gpu_data.make_data(DECODE, 2**10), gpu_rows.Ceilings(1e10, 1e11)
    want = gpu_data.expected_rows(DECODE, data, np.asarray(data.tables[0]))
    lines = gpu.Lines(str(tmp_path / "new"), ("decode", "peers"))
    chosen = [
        (BY_NAME["torch-sdpa"], None),
        (BY_NAME["torch-flex"], None),
        (BY_NAME["vllm-triton"], "no vllm"),
    ]
    with worker() as other:
        found = gpu.theirs(DECODE, chosen, data, limits, want, other)
        assert not gpu.report(DECODE, found, lines)
    (file,) = (tmp_path / "new").glob("*-decode-peers.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["row", "none", "none"]
    assert (rows[0]["median"], rows[0]["timed"]) == (1e-3, "it knows")
    assert rows[1]["why"].startswith("out of budget")
    assert rows[2]["why"] == "no vllm"
    said = capsys.readouterr().out.splitlines()
    assert "1000.0" in said[0]
    assert "out of budget" in said[1]
    assert gpu.report(DECODE, [("triton", "WRONG: all")], gpu.Lines(None, ()))
    with file.open("a") as cut_off:
        cut_off.write('{"kind": "row", "na')
    names = ("torch-sdpa", "torch-flex", "vllm-triton")
    assert gpu_session.answered(str(file.parent)) == {(DECODE.name, name) for name in names}


def test_an_alarm(tmp_path, monkeypatch):
    """What hangs is recorded, what is out of time is left for later; a lost device ends the run."""
    ended = []
    lines = gpu.Lines(str(tmp_path), ("decode",))

    def ring(session):
        rung = len(ended) + 1
        with session.watched("w", "triton"):
            while len(ended) < rung:
                threading.Event().wait(0.01)

    monkeypatch.setattr(gpu_session, "PATIENCE", 0.05)
    ring(gpu_session.Session(60.0, lines, ended.append))
    monkeypatch.setattr(gpu_session, "PATIENCE", 60.0)
    monkeypatch.setattr(gpu_session, "GRACE", 0.05)
    ring(gpu_session.Session(0.0, lines, ended.append))
    assert ended == [gpu_session.HUNG] * 2
    assert gpu_session.answered(str(tmp_path)) == {("w", "triton")}
    kinds = [line["kind"] for line in gpu_session.lines_of(str(tmp_path))]
    assert kinds == ["none", "left"]
    session = gpu_session.Session(60.0, lines, ended.append)
    found = session.each("w", ["a", "b"], [("a", "FAILED"), ("b", "FAILED")], lambda: False)
    assert next(found) == ("a", "FAILED")
    with pytest.raises(gpu_session.LostDeviceError):
        next(found)


@pytest.mark.slow
def test_a_run_and_another(capsys, tmp_path, monkeypatch):
    """Everything but the GPU: one implementation fails, and peers are right, wrong or dead.

    A second run measures the rest, and nothing twice.
    """
    monkeypatch.setattr(gpu.gpu_peers, "Worker", functools.partial(worker, device="here"))
    right = gpu.attend

    def attend(w, data, implementation, table):
        if implementation == "triton":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        return right(w, data, implementation, table)

    monkeypatch.setattr(gpu, "attend", attend)
    chosen = [DECODE, gpu_workloads.workload("gpt-oss", "2q1s40")]
    names = ("torch-sdpa", "torch-flex", "flashinfer-nhd")

    def run(minutes, *more):
        given = ["--part", "decode", "peers", "--out", str(tmp_path / "out"), *more]
        args = gpu.parse([*given, "--minutes", str(minutes), "--peers", *names])
        session = gpu_session.Session(60 * minutes, gpu.Lines(args.out, args.part))
        limits = gpu_rows.Ceilings(1e10, 1e11)
        given = ("triton", "xla"), ALL, limits, session, 2**10, machine.Machine(90, 132)
        status = gpu.measure_all(chosen, args, *given)
        return status, capsys.readouterr().out

    status, said = run(0.0)
    assert status == 3
    assert "0 min are over; run again with --resume. Not measured: gpt-oss-3q1s70" in said
    monkeypatch.setattr(gpu_session, "device_answers", iter([True, False]).__next__)
    status, said = run(9, "--resume", str(tmp_path / "out"))
    assert status == 3, "the device is lost while a peer is measured"
    assert "triton         FAILED: RuntimeError: RESOURCE_EXHAUSTED: out of memory" in said
    monkeypatch.undo()
    monkeypatch.setattr(gpu.gpu_peers, "Worker", functools.partial(worker, device="here"))
    status, said = run(9, "--resume", str(tmp_path / "out"))
    assert status == 0
    lines = [line for line in said.splitlines() if "q1s70" in line]
    assert len(lines) == 1
    assert "flashinfer-nhd WorkerError: it ended with 3" in lines[0]
    assert "2q1s40" in said
    assert run(9, "--resume", str(tmp_path / "out")) == (0, "")


class MatrixRuns:
    """Runs pytest with the matrix plugin over given tests, in a folder of their own."""

    def __init__(self, folder, tests):
        self.folder, self.count = folder, 0
        (folder / "test_some.py").write_text(tests)

    def run(self, *more, seconds=60.0):
        self.count += 1
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.matrix"]
        command += [str(self.folder / "test_some.py"), *more]
        settings = {
            "JATTN_MATRIX_FILE": str(self.folder / f"{self.count}.jsonl"),
            "JATTN_MATRIX_RESUME": str(self.folder),
            "JATTN_MATRIX_PATIENCE": "2",
            "JATTN_MATRIX_SECONDS": str(seconds),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        command += ["-c", "/dev/null", "--rootdir", str(self.folder)]
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        environment = ours | settings
        return subprocess.run(command, cwd=gpu_peers.ROOT, env=environment, check=False).returncode

    def outcomes(self):
        known = gpu_matrix.outcomes(str(self.folder))
        return {name.split("::")[1]: outcome for name, outcome in known.items()}


LOSES_THE_DEVICE = """
def test_e():
    from benchmarks.gpu import session
    session.device_answers = lambda: False
    assert 0, 'misaligned address'
"""


@pytest.mark.extended
def test_the_matrix_in_several_runs(tmp_path):
    """Outcomes are kept, a test that hangs ends its process, and the next run goes on after it."""
    runs = MatrixRuns(
        tmp_path,
        "import time\n"
        "def test_a(): pass\n"
        "def test_b(): assert 0\n"
        "def test_c(): time.sleep(60)\n"
        "def test_d(): pass\n"
        f"{LOSES_THE_DEVICE}"
        "def test_f(): pass\n",
    )
    assert runs.run(seconds=0.0) == 3
    assert runs.outcomes() == {}
    assert runs.run() == 3
    assert runs.outcomes() == {"test_a": "passed", "test_b": "failed", "test_c": "hung"}
    assert runs.run() == 3
    found = runs.outcomes()
    assert (found["test_d"], found["test_e"]) == ("passed", "lost")
    assert "test_f" not in found, "nothing runs on a GPU that does not answer"
    assert runs.run() == 0
    assert runs.outcomes()["test_f"] == "passed"
    assert runs.run() == gpu_matrix.NO_TESTS_LEFT
    why = [line["why"] for line in gpu_session.lines_of(str(tmp_path)) if line["why"]]
    assert why == ["assert 0", "AssertionError: misaligned address", gpu_matrix.LOST]


@pytest.mark.extended
def test_a_run_that_is_out_of_time_goes_on_after_a_failure(tmp_path):
    runs = MatrixRuns(
        tmp_path,
        "from benchmarks.gpu import matrix\n"
        "def test_a():\n"
        "    matrix._began = -1e9\n"
        "    assert 0\n"
        "def test_b(): pass\n",
    )
    assert runs.run(seconds=600) == 3
    assert runs.outcomes() == {"test_a": "failed"}
    assert runs.run() == 0
    assert runs.outcomes() == {"test_a": "failed", "test_b": "passed"}


@pytest.mark.extended
def test_the_matrix_in_several_workers(tmp_path):
    """A worker that loses its device or hangs costs one test, and warnings fail none."""
    pytest.importorskip("xdist", reason="pip install pytest-xdist")
    runs = MatrixRuns(
        tmp_path,
        "import time, warnings\n"
        "import pytest\n"
        "def test_a(): pass\n"
        f"{LOSES_THE_DEVICE}"
        "def test_c(): time.sleep(60)\n"
        "@pytest.mark.parametrize('i', range(12))\n"
        "def test_later(i): warnings.warn('the image is old', DeprecationWarning)\n",
    )
    more = gpu_matrix.command(("triton",))
    more = [*more[more.index("-W") :], "-m", ""]
    more[more.index("-n") + 1] = "2"
    assert runs.run(*more) == 1
    found = runs.outcomes()
    assert found.pop("test_e") in ("lost", "failed")
    assert found.pop("test_c") in ("hung", "failed")
    assert found == {"test_a": "passed"} | {f"test_later[{i}]": "passed" for i in range(12)}
    assert runs.run(*more) == gpu_matrix.NO_TESTS_LEFT


def test_a_worker_that_does_not_start():
    does_not = pytest.raises(WorkerError, match="does not start")
    with worker(python="no-such-python") as absent, does_not:
        absent.ask("time", turns=1)
    with worker(device="none") as lost:
        for _ in range(2):
            with pytest.raises(WorkerError, match="no such device"):
                lost.ask("time", turns=1)


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        ("gpt-oss", "3q1s70"),
        ("gpt-oss-window", "2q1s200_q1s140"),
        pytest.param("gpt-oss-window", "2q160", marks=pytest.mark.extended),
    ],
)
def test_keys_side_by_side(layer, batch):
    """The call to cuDNN, made to XLA instead: its rows are right, and another copy's refused."""
    w = gpu_workloads.workload(layer, batch)
    data = gpu_data.make_data(w, 2**10)
    table = np.asarray(data.tables[0])
    want = gpu_data.expected_rows(w, data, table)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = gpu_peers.jax_dense(w, data, "xla")
    assert gpu_peers.judge(w, result, want) is None
    other = gpu_data.expected_rows(w, data, np.asarray(data.tables[1]))
    assert "out of budget" in gpu_peers.judge(w, result, other)
    odd = gpu_peers.Result(result.rows, False, result.time)
    assert "not finite" in gpu_peers.judge(w, odd, want)


# From jax 0.12 on, importing it warns that it is deprecated.
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_in_tree_kernel(monkeypatch):
    """The call to JAX's kernel, interpreted: its tables hold no id past a sequence's end."""
    from jax.experimental.pallas.ops.gpu import paged_attention as module

    interpreted = functools.partial(module.paged_attention, interpret=True)
    monkeypatch.setattr(module, "paged_attention", interpreted)
    data = gpu_data.make_data(DECODE, 2**10)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = gpu_peers.jax_pallas(DECODE, data)
    want = gpu_data.expected_rows(DECODE, data, np.asarray(data.tables[0]))
    assert gpu_peers.judge(DECODE, result, want) is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("peer", ["torch-sdpa", "torch-flex"])
@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        ("gpt-oss", "3q1s70"),
        ("gpt-oss", "2q150"),
        ("gpt-oss", "2q4s300"),
        ("gpt-oss-window", "2q1s200"),
        ("gpt-oss-window", "2q140s300"),
    ],
)
def test_torch(layer, batch, peer):
    """The peers' data, layouts and masks, with plain torch on the CPU."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    from benchmarks.gpu import peer_worker as gpu_peer_worker

    w = gpu_workloads.workload(layer, batch)
    if BY_NAME[peer].refuses(w):
        pytest.skip(BY_NAME[peer].refuses(w))
    data = gpu_data.make_data(w, 2**10)
    problem = gpu_peer_worker.Problem(w, len(data.tables), "cpu")
    np.testing.assert_array_equal(
        problem.key_cache.float().numpy(), np.asarray(data.key_cache.astype(jnp.float32))
    )
    call = (gpu_peer_worker.sdpa if peer == "torch-sdpa" else gpu_peer_worker.flex)(problem)
    tokens = gpu_data.sampled_tokens(w)
    for copy in (0, 1):
        want = gpu_data.expected_rows(w, data, np.asarray(data.tables[copy]))
        with torch.inference_mode():
            have = call(copy)[tokens].float().numpy()
        assert not gpu_data.wrong_rows(w, want, have)


@pytest.mark.parametrize(
    ("layer", "batch"),
    [("gpt-oss", "3q1s300"), ("gpt-oss", "2q300"), ("gpt-oss-window", "2q200s520")],
)
def test_flex_blocks(layer, batch):
    """A mask lists the blocks with a visible key; full blocks are those without a hidden one."""
    pytest.importorskip("torch", reason="pip install torch")
    from benchmarks.gpu import peer_worker as gpu_peer_worker

    w = gpu_workloads.workload(layer, batch)
    problem = gpu_peer_worker.Problem(w, 1, "cpu")
    lengths = np.array([w.seq_lens[b] - w.first_visible(b) for b in range(w.num_seqs)])
    n, size, wide = w.max_query_len, gpu_peer_worker.FLEX_BLOCK, -(-int(lengths.max()) // 128)
    ids = np.random.default_rng(0).permutation(w.num_seqs * wide).reshape(w.num_seqs, wide)
    mask = gpu_peer_worker.flex_mask(problem, ids, lengths, ids.size)
    for b in range(w.num_seqs):
        limit = lengths[b] - n + np.arange(n)[:, None]
        keys = np.arange(wide * size)
        seen = keys <= limit
        if w.sliding_window is not None:
            seen &= keys > limit - w.sliding_window
        for row in range(-(-n // size)):
            blocks = seen[row * size : (row + 1) * size].reshape(-1, wide, size)
            whole, some = blocks.all((0, 2)), blocks.any((0, 2))
            for chosen, count, order in (
                (some & ~whole, mask.kv_num_blocks, mask.kv_indices),
                (whole, mask.full_kv_num_blocks, mask.full_kv_indices),
            ):
                named = order[b, 0, row, : int(count[b, 0, row])].tolist()
                assert sorted(named) == sorted(ids[b][chosen].tolist())


class FakeFlashInfer:
    """Stands in for FlashInfer's wrappers: `run` computes the planned attention in float64."""

    def __init__(self, workspace, layout, **options):
        self.layout = layout

    def plan(self, *given, causal=True, sm_scale, window_left, q_data_type, kv_data_type):
        if len(given) == 7:  # decode: one query token a sequence
            given = (np.arange(len(given[0])), *given)
        self.starts, self.pages, self.indices, self.last = (np.asarray(x) for x in given[:4])
        self.heads, self.kv_heads, _, self.size = given[4:]
        self.scale, self.window = sm_scale, window_left
        assert causal

    def run(self, query, pools):
        import torch

        key, value = (pool if self.layout == "NHD" else pool.transpose(1, 2) for pool in pools)
        out = torch.empty_like(query)
        for b, last in enumerate(self.last):
            ids = torch.as_tensor(self.indices[self.pages[b] : self.pages[b + 1]])
            length = (len(ids) - 1) * self.size + int(last)
            k, v = (pool[ids].flatten(0, 1)[:length].double() for pool in (key, value))
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
            rows = slice(int(self.starts[b]), int(self.starts[b + 1]))
            n = rows.stop - rows.start
            behind = torch.arange(length - n, length)[:, None] - torch.arange(length)
            hidden = (behind < 0) | ((behind > self.window) if self.window >= 0 else behind < 0)
            logits = torch.einsum("qhd,khd->hqk", query[rows].double(), k) * self.scale
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("layer", "batch"), [("gpt-oss", "q20s150_q1s33"), ("gpt-oss-window", "2q1s200_q1s64")]
)
def test_flashinfer_plan(layer, batch, layout, monkeypatch):
    """The pages, lengths and window of a plan say which keys a query sees."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    from benchmarks.gpu import peer_worker as gpu_peer_worker

    fake = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer,
        BatchPrefillWithPagedKVCacheWrapper=FakeFlashInfer,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    w = gpu_workloads.workload(layer, batch)
    data = gpu_data.make_data(w, 2**10)
    problem = gpu_peer_worker.Problem(w, 2, "cpu")
    call = gpu_peer_worker.flashinfer_paged(problem, layout)
    for copy in (0, 1):
        want = gpu_data.expected_rows(w, data, np.asarray(data.tables[copy]))
        with torch.inference_mode():
            have = call(copy)[gpu_data.sampled_tokens(w)].float().numpy()
        assert not gpu_data.wrong_rows(w, want, have)


def test_a_round_repeats_its_copies():
    pytest.importorskip("torch", reason="pip install torch")
    from benchmarks.gpu import peer_worker as gpu_peer_worker

    copies = []
    seconds, how = gpu_peer_worker.time_calls(copies.append, 2, 3, "cpu", repeats=5)
    assert copies == [0, 1] * (gpu_peer_worker.WARM_UP + 3 * 5)
    assert (len(seconds), how) == (3, "host clock")


def test_the_real_worker():
    pytest.importorskip("torch", reason="pip install torch")
    data = gpu_data.make_data(DECODE, 2**10)
    want = gpu_data.expected_rows(DECODE, data, np.asarray(data.tables[0]))
    with gpu_peers.Worker(device="cpu") as other:
        seconds, how = gpu_peers.measure(BY_NAME["torch-sdpa"], DECODE, data, want, other)
        assert (len(seconds), how) == (7, "host clock")
        assert min(seconds) > 0
        lost = gpu_peers.measure(BY_NAME["flashinfer-nhd"], DECODE, data, want, other)
        assert "No module named 'flashinfer'" in lost
