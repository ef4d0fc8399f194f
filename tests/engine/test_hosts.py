"""The engine on two processes of one or two devices each: one plans, both run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safetensors

from benchmarks.serving.servers import free_port
from examples.engine import hosts, serve
from examples.engine.alike import ALIKE, ALIKE_INSIDE, shared_options
from examples.engine.caches import Group
from examples.engine.engine import Engine
from examples.engine.model import load_model
from examples.engine.request import Request, Sequence
from examples.engine.scheduler import Limits, Scheduler
from examples.engine.step import make_buckets, pack
from examples.engine.transfer.fingerprint import fingerprint
from examples.models.lora import CONFIG, TENSORS
from tests.support import checkpoints, processes
from tests.support.processes import start, start_command
from tests.support.serving import wait_for

httpx = pytest.importorskip("httpx", reason="servers need the serve extra")

PROCESS = """
import operator, sys, threading, time
import jax, numpy as np
from examples.engine import hosts
from examples.engine.mesh import DeviceMesh, make_mesh
from examples.engine.model import load_model
from examples.engine.programs import Programs
from examples.engine.request import Request, Sampling
from examples.engine.step import Bucket
from tests.support import checkpoints

rank, address, heartbeat = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
hosts.join(address, 2, rank, heartbeat)
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2

num_read, array = [0, 0], DeviceMesh.array  # bytes that are read of split parameters, and their own

def counted(self, whole, local, read):
    def count(index):
        part = read(index)
        if whole != local:
            num_read[0] += part.nbytes
        return part
    if whole != local:
        num_read[1] += int(np.prod(whole.shape)) * 4
    return array(self, whole, local, count)

DeviceMesh.array = counted
model = load_model(checkpoints.CHECKPOINTS / "qwen3-tiny", mesh=make_mesh("tensor=4"))
compile_one, find = Programs._one, Programs.__getitem__
alone, asked = Bucket(1, 1, 1), threading.Event()

def compile_late(self, bucket, *of):  # a program that no process has at the start
    if bucket == alone:
        asked.wait()
    compile_one(self, bucket, *of)

def find_late(self, bucket):
    if bucket == alone:
        asked.set()
    return find(self, bucket)

if rank:
    Programs._one, Programs.__getitem__ = compile_late, find_late
buckets = (alone, checkpoints.DECODE, checkpoints.MIXED)
engine = checkpoints.make_engine(model, buckets=buckets, behind=True)
assert alone not in engine.steps.programs
print("fraction read", num_read[0] / num_read[1], flush=True)
try:
    if rank:
        hosts.follow(engine)
    wanted = checkpoints.reference("qwen3-tiny")
    tokens, error = checkpoints.serve(engine, wanted, 4)
    np.testing.assert_array_equal(tokens, wanted["tokens"][:, :4])
    assert error.max() <= checkpoints.MAX_ERROR
    while alone not in engine.steps.programs:
        time.sleep(0.1)
    # Steps of one sequence have a program that the other process compiles when it is asked to run
    # it. A request whose past choices the devices remember has another one, which all run, too.
    penalized = Request((5, 6, 7), 4, Sampling(frequency_penalty=2.0))
    assert len(set(engine.generate([penalized])[0].chosen)) == 4
    told = engine.followers
    print("bytes", told.num_bytes // told.num_told, "most", told.most_bytes, flush=True)
    noise = np.random.default_rng(0).bytes(10_000)  # more than one message holds
    engine.followers.tell(operator.eq, noise)
    print("ready", flush=True)
    while True:
        engine.idle()
        time.sleep(0.1)
except Exception as failure:
    hosts.exit_with(failure)
"""


def until(process: subprocess.Popen, word: str) -> str:
    """Return the rest of the first line in which a process prints a word.

    Its line may follow the beginning of another: JAX's runtime prints its own lines in parts.
    """
    for line in iter(process.stdout.readline, ""):
        if word in line:
            return line.partition(word)[2].strip()
    pytest.fail(process.communicate()[1])


# Its connections close, so the other process learns of it before a heartbeat is missed.
KILLED = signal.SIGKILL, hosts.HEARTBEAT_SECONDS, 20
# Its connections stay open, as if its host had vanished. The other process waits half the seconds
# before it asks again, and all of them for the answer; 3 more allow for a busy machine.
STOPPED = signal.SIGSTOP, 5, 1.5 * 5 + 3


@pytest.mark.newer
@pytest.mark.extended
@pytest.mark.parametrize(
    ("dies", "number", "heartbeat", "most"),
    [
        pytest.param("follower", *KILLED, id="follower-killed"),
        pytest.param("follower", *STOPPED, id="follower-stopped", marks=pytest.mark.slow),
        pytest.param("leader", *KILLED, id="leader-killed", marks=pytest.mark.slow),
        pytest.param("leader", *STOPPED, id="leader-stopped"),
    ],
)
def test_two_processes_have_the_tokens_of_one_and_end_together(dies, number, heartbeat, most):
    address = f"127.0.0.1:{free_port()}"
    group = [start(rank, address, str(heartbeat), code=PROCESS, devices="2") for rank in (0, 1)]
    try:
        # Each of the two KV heads lies on two of four devices, so a process reads one of two.
        assert float(until(group[0], "fraction read")) == pytest.approx(0.5, abs=0.01)
        told = until(group[0], "bytes").split()
        until(group[0], "ready")
        assert 0 < int(told[0]) < hosts.FIRST_BYTES, "a step's plan needs more than one message"
        dead, left = group[::-1] if dies == "follower" else group
        began = time.monotonic()
        os.kill(dead.pid, number)
        _, errors = left.communicate(timeout=60)
        assert time.monotonic() - began < most
        # JAX's runtime may notice first and abort.
        assert left.returncode in (1, -signal.SIGABRT)
        assert "the group has failed" in errors or "another task died" in errors, errors
    finally:
        for process in group:
            process.kill()
            process.communicate()


ROLE = """
import os, sys, threading
import numpy as np
from examples.engine import hosts
from examples.engine.transfer.description import description_of
from examples.engine.mesh import make_mesh
from examples.engine.model import load_model
from examples.engine.transfer.offers import Offers
from examples.engine.transfer.remote import PrefillServer
from examples.engine.request import Request
from tests.support import checkpoints
from tests.support.serving import serving

rank, address, name, axes, url = int(sys.argv[1]), *sys.argv[2:6]
hosts.join(address, 2, rank)
model = load_model(checkpoints.CHECKPOINTS / name, mesh=make_mesh(axes))
engine = checkpoints.make_engine(model, block_size=int(sys.argv[6]))

def reads():
    ended = threading.Event()
    def end(reason):
        print(reason, file=sys.stderr, flush=True)
        os._exit(1)
    with serving(engine, offers=Offers(1 << 24), on_failure=end) as url:
        print("serves at", url, flush=True)
        ended.wait()

def decodes():
    server = PrefillServer(url, engine.transfer, description_of(engine))
    server.check()
    wanted, num_new = checkpoints.reference(name), 6
    rows = [i for i, n in enumerate(wanted["prompt_lens"]) if n > 1]
    prompts = [tuple(wanted["prompts"][i][: wanted["prompt_lens"][i]].tolist()) for i in rows]
    sequences = []
    for prompt in prompts:  # each arrives while those before it decode
        contents = server.read(prompt[:-1], engine.transfer.empty)
        sequences.append(engine.add(Request(prompt, num_new), contents))
        engine.step()
    list(engine.stream())
    engine.check_idle()
    np.testing.assert_array_equal([s.chosen for s in sequences], wanted["tokens"][rows, :num_new])
    assert engine.statistics.num_computed_tokens == len(rows) * num_new
    print("decoded", len(rows), flush=True)
    sys.stdin.readline()  # by now one process of the other group is dead
    try:
        server.read(prompts[0], engine.transfer.empty)
    except Exception as error:
        print("failed", repr(error), flush=True)
    (here,) = engine.generate([Request(prompts[0], num_new)])
    assert here.chosen == wanted["tokens"][rows[0], :num_new].tolist()
    print("read here", flush=True)
    engine.followers.tell(hosts.END)

try:
    hosts.follow(engine) if rank else decodes() if url else reads()
except Exception as failure:
    hosts.exit_with(failure)
"""


@pytest.mark.parametrize(
    ("name", "reading", "decoding"),
    [
        # States, heads and experts.
        pytest.param("nemotron-h-tiny", "tensor=2", "tensor=2", marks=pytest.mark.extended),
        # Windows, and tokens split among devices.
        pytest.param("gpt-oss-tiny", "context=2", "tensor=2", marks=pytest.mark.slow),
        # Delta-net states, latents, and layers that read other layers' keys.
        pytest.param("qwen3-next-tiny", "tensor=2", "tensor=2", marks=pytest.mark.slow),
        pytest.param("deepseek-v3-tiny", "tensor=2", "context=2", marks=pytest.mark.slow),
        pytest.param("gemma4-e2b-tiny", "tensor=2", "tensor=2", marks=pytest.mark.slow),
        pytest.param("gemma4-31b-tiny", "tensor=2", "context=2", marks=pytest.mark.slow),
        pytest.param("qwen3-tiny", "tensor=2", "context=2", marks=pytest.mark.slow),
    ],
)
def test_prompts_move_between_two_groups_of_processes(name, reading, decoding):
    """Tokens are those of one engine. When a reader dies, the decoding group reads prompts."""

    def start_role(axes: str, url: str, block_size: str) -> list[subprocess.Popen]:
        address = f"127.0.0.1:{free_port()}"
        given = [address, name, axes, url, block_size]
        return [start(rank, *given, code=ROLE, devices="1") for rank in (0, 1)]

    groups = [start_role(reading, "", "8")]
    try:
        url = until(groups[0][0], "serves at ")
        theirs = httpx.get(f"{url}/prefill").json()
        alone = load_model(checkpoints.CHECKPOINTS / name)
        assert theirs["weights"] == fingerprint(alone)  # the same as on one device
        groups.append(start_role(decoding, url, "16"))
        leader = groups[1][0]
        assert int(until(leader, "decoded ")) > 4
        os.kill(groups[0][1].pid, signal.SIGKILL)
        _, errors = groups[0][0].communicate(timeout=60)
        assert groups[0][0].returncode in (1, -signal.SIGABRT)
        assert "the engine has failed" in errors or "another task died" in errors, errors
        leader.stdin.write("go on\n")
        leader.stdin.flush()
        assert until(leader, "failed ")
        until(leader, "read here")
        assert [process.wait(60) for process in groups[1]] == [0, 0]
    finally:
        for process in (process for group in groups for process in group):
            process.kill()
            process.communicate()


@pytest.mark.extended
def test_a_group_that_is_told_to_end_finishes_its_requests():
    """All are told at once, during a request, while programs are still being compiled."""
    port, url = free_port(), f"http://127.0.0.1:{free_port()}"
    given = ["--model", str(checkpoints.CHECKPOINTS / "byte-gemma"), "--mesh", "tensor=2"]
    given += ["--port", url.rsplit(":", 1)[1], "--coordinator", f"127.0.0.1:{port}"]
    given += ["--num-processes", "2", "--no-compilation-cache", "--max-len", "512"]
    run = "import sys; from examples.engine.serve import main; main(sys.argv[2:])"
    group = [
        start(rank, *given, "--process-id", str(rank), code=run, devices="1") for rank in (0, 1)
    ]
    try:
        wait_for(int(given[given.index("--port") + 1]), group[0])
        body = {"prompt": "The function", "max_tokens": 400, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=100) as response:
            lines = filter(None, response.iter_lines())
            answered = [next(lines)]
            coming = httpx.get(f"{url}/metrics").text.partition("\njattn_programs_coming ")[2]
            for process in group:
                process.send_signal(signal.SIGTERM)
            answered += lines
        assert float(coming.split()[0]) > 0
        assert answered.pop() == "data: [DONE]"
        assert '"finish_reason":"length"' in answered[-1].replace(" ", "")
        errors = [process.communicate(timeout=60)[1] for process in group]
        assert [process.returncode for process in group] == [0, 0], errors
        assert "waiting for the first process to end the group" in errors[1]
    finally:
        for process in group:
            process.kill()
            process.communicate()


@pytest.mark.newer
@pytest.mark.extended
def test_processes_with_different_options_do_not_start():
    command = [sys.executable, "-m", "examples.engine.serve", "--mesh", "tensor=2"]
    group = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    differing = (["--max-seqs", "4", "--host-cache", "1"], ["--max-seqs", "4"])
    started = [
        start_command([*command, *group, *options, "--process-id", str(rank)], devices="1")
        for rank, options in enumerate(differing)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 2
            assert "error: --host-cache is 1.0 in process 0, 0.0 in process 1: start all" in errors
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_every_option_is_shared_or_left_to_each_process():
    differing = {
        *("chat_template", "host", "port", "max_requests", "step_timeout", "drain_timeout"),
        *("compilation_cache", "no_compilation_cache", "products", "api_key", "cors", "uds"),
        *("lora_folder", "prefill_server", "prefill_timeout", "prefill_tokens", "transfer_memory"),
        *("coordinator", "num_processes", "process_id", "cluster", "restarts", "restart_wait"),
        *("supervisor", "no_prefix_cache", "seed", "help"),
    }
    alike = {*ALIKE, *ALIKE_INSIDE}
    assert not alike & differing
    options = {action.dest for action in serve.options_parser()._actions}
    assert options == alike | differing


def test_the_files_at_a_path_are_compared(tmp_path):
    """Paths may differ between hosts, but not the model, draft model or adapter behind them."""

    def write(name: str, config: str = "{}", last: float = 0.0, shards: bool = False) -> Path:
        """Write a checkpoint and an adapter of two tensors, in one file or two."""
        place = tmp_path / name
        place.mkdir()
        tensors = {"a": np.zeros(4, np.float32), "b": np.zeros((900, 2), np.float32)}
        tensors["b"][-1] = tensors["b"][450] = last
        for file in ("config.json", CONFIG):
            (place / file).write_text(config)
        safetensors.save_file(tensors, place / TENSORS)
        if shards:
            for key, tensor in tensors.items():
                safetensors.save_file({key: tensor}, place / f"{key}.safetensors")
            index = {"weight_map": {key: f"{key}.safetensors" for key in tensors}}
            (place / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            safetensors.save_file(tensors, place / "model.safetensors")
        return place

    def told(place: Path, name: str = "a") -> dict[str, object]:
        given = ["--model", str(place), "--draft", str(place), "--lora", f"{name}={place}"]
        return shared_options(serve.options_parser().parse_args(given))

    def differing(other: dict[str, object]) -> set[str]:
        return {name for name in first if first[name] != other[name]}

    one = write("one")
    first = told(one)
    assert differing(told(write("same"))) == differing(told(write("sharded", shards=True))) == set()
    assert differing(told(write("config", "{ }"))) == {*ALIKE_INSIDE}
    assert differing(told(write("weights", last=1.0))) == {*ALIKE_INSIDE}
    assert differing(told(one, "b")) == {"lora"}
    for name in ("cut", "text", "list"):
        file = write(name) / "model.safetensors"
        wrong = {"cut": b"\x00", "text": b"x" * 99, "list": b"\x02" + b"\x00" * 7 + b"[]"}
        file.write_bytes(wrong[name])
        file.with_name(TENSORS).write_bytes(wrong[name])
        found = told(file.parent)
        assert found["model"] == found["draft"] == "not a checkpoint"
        assert found["lora"] == "a: not an adapter"
    gone = shared_options(serve.options_parser().parse_args(["--model", str(tmp_path)]))
    assert (gone["model"], gone["draft"], gone["lora"]) == ("not a checkpoint", None, "")


def test_options_of_processes_are_compared(monkeypatch):
    rows = []

    def gather(row):
        assert row.size == 8192  # the same size in every process, whatever its options
        rows.append(row)
        return np.stack([rows[0], row])

    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", gather)
    options = {"mesh": "tensor=2", "max_seqs": 4, "lora": "\U0001f600" * 5000}
    hosts.check_alike(options)
    hosts.check_alike(dict(options))
    with pytest.raises(
        ValueError,
        match=r"^--mesh is tensor=2 in process 0, tensor=4 in process 1; --max-seqs is 4 in proc",
    ):
        hosts.check_alike({**options, "max_seqs": "8", "mesh": "tensor=4"})
    with pytest.raises(ValueError, match=r"^--lora is \S+\.\.\. \w{16} in process 0, "):
        hosts.check_alike({**options, "lora": options["lora"][:-1] + "x"})


def test_a_plan_is_as_large_as_the_page_says():
    """Measured with 64 sequences of 300 tokens and more, for a model with two cache groups."""
    groups = (Group("sliding", (0,), window=1024), Group("global", (1,)))
    limits = Limits(groups, max_seqs=64, token_budget=512, block_size=16, max_len=8192)
    scheduler, rng = Scheduler(limits), np.random.default_rng(0)
    buckets = make_buckets(limits, mixed=[512])
    for _ in range(64):  # the first still decodes when the last is read
        scheduler.add(Sequence(Request(tuple(rng.integers(0, 150_000, 300).tolist()), 44)))
    decoding, reading = [], []  # sizes of steps with all sequences, and with 512 tokens
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        bucket = next(b for b in buckets if b.holds(plan))
        told = hosts.encode(Engine.run, bucket, pack(plan, bucket, limits))
        if bucket.max_query_len > 1:
            reading.append(len(told))
        elif len(plan) == 64:
            decoding.append(len(told))
        scheduler.commit(plan)
        for sequence in (chunk.sequence for chunk in plan if chunk.is_last):
            sequence.append(int(rng.integers(0, 150_000)))
            if sequence.finish_reason:
                scheduler.remove(sequence)
    assert len(decoding) >= 3
    assert len(reading) > 30
    assert max(decoding + reading) < hosts.FIRST_BYTES
    decode, read = (np.median(sizes) / 1000 for sizes in (decoding, reading))
    page = " ".join((processes.ROOT / "docs" / "several-devices.md").read_text().split())
    assert f"{decode:.1f} KB in a decode step and {read:.1f} KB with 512 tokens of" in page


def test_messages_are_padded():
    """Sizes are powers of two, so that few programs are compiled."""
    assert [hosts._padded(n) for n in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]
