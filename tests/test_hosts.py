"""The engine over two processes of two devices each: one plans, both run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from examples.engine import hosts
from examples.engine.caches import Group
from examples.engine.request import Request, Sequence
from examples.engine.scheduler import Limits, Scheduler
from examples.engine.step import make_buckets, pack
from tests.support import processes

PROCESS = """
import sys, time
import jax, numpy as np
from examples.engine import hosts
from examples.engine.mesh import DeviceMesh, make_mesh
from examples.engine.model import load_model
from examples.engine.request import Request, Sampling
from tests import test_models as single

rank, address = int(sys.argv[1]), sys.argv[2]
hosts.join(address, 2, rank)
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2

num_read, array = [0, 0], DeviceMesh.array  # bytes that are read of split parameters, and their own

def counted(self, whole, own, read):
    def count(index):
        part = read(index)
        if whole != own:
            num_read[0] += part.nbytes
        return part
    if whole != own:
        num_read[1] += int(np.prod(whole.shape)) * 4
    return array(self, whole, own, count)

DeviceMesh.array = counted
model = load_model(single.CHECKPOINTS / "qwen3-tiny", mesh=make_mesh("tensor=4"))
engine = single.make_engine(model)
print("fraction read", num_read[0] / num_read[1], flush=True)
try:
    if rank:
        hosts.follow(engine)
    wanted = single.reference("qwen3-tiny")
    tokens, error = single.serve(engine, wanted, 4)
    np.testing.assert_array_equal(tokens, wanted["tokens"][:, :4])
    assert error.max() <= single.MAX_ERROR
    # A request whose past choices the devices remember: another program, which all processes run.
    penalized = Request((5, 6, 7), 4, Sampling(frequency_penalty=2.0))
    assert len(set(engine.generate([penalized])[0].chosen)) == 4
    told = engine.followers
    print("bytes", told.num_bytes // told.num_told, "most", told.most_bytes, flush=True)
    noise = np.random.default_rng(0).bytes(10_000)  # more than one message holds
    engine.followers.tell("__eq__", noise)
    print("ready", flush=True)
    while True:
        engine.idle()
        time.sleep(0.1)
except Exception as failure:
    hosts.exit_with(failure)
"""


def start(rank: int, address: str) -> subprocess.Popen:
    """One of the two processes."""
    environment = {"PYTHONPATH": str(processes.ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(rank), address],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        cwd=processes.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.extended
@pytest.mark.parametrize("dies", ["follower", "leader"])
def test_two_processes_have_the_tokens_of_one_and_end_together(dies):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    group = [start(rank, address) for rank in (0, 1)]
    try:
        lines = {}
        for line in iter(group[0].stdout.readline, ""):
            lines |= {line.rsplit(" ", 1)[0]: line.split()[-1]}
            if line == "ready\n":
                break
        else:
            pytest.fail(group[0].communicate()[1])
        # Two of four devices; each of two KV heads lies on two of them, and a process reads one.
        assert float(lines["fraction read"]) == pytest.approx(0.5, abs=0.01)
        (told,) = (line.split() for line in lines if line.startswith("bytes"))
        assert 0 < int(told[1]) < hosts.FIRST_BYTES, "a step's plan takes more than one message"
        killed, left = group[::-1] if dies == "follower" else group
        began = time.monotonic()
        os.kill(killed.pid, signal.SIGKILL)
        _, errors = left.communicate(timeout=60)
        assert time.monotonic() - began < 20
        # JAX's runtime may notice first, and abort.
        assert left.returncode in (1, -signal.SIGABRT)
        assert "the group has failed" in errors or "another task died" in errors, errors
    finally:
        for process in group:
            process.kill()
            process.communicate()


def test_a_plan_takes_some_kib():
    """64 sequences of 300 tokens and more, of a model with two cache groups."""
    groups = (Group("sliding", (0,), window=1024), Group("global", (1,)))
    limits = Limits(groups, max_seqs=64, token_budget=512, block_size=16, max_len=8192)
    scheduler, rng = Scheduler(limits), np.random.default_rng(0)
    buckets = make_buckets(limits, mixed=[512])
    for _ in range(64):
        scheduler.add(Sequence(Request(tuple(rng.integers(0, 150_000, 300).tolist()), 8)))
    sizes = {1: [], 512: []}  # of decode steps, and of those that read prompts
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        bucket = next(b for b in buckets if b.holds(plan))
        told = hosts.encode("run", bucket, pack(plan, bucket, limits))
        sizes[bucket.max_query_len].append(len(told))
        scheduler.commit(plan)
        for sequence in (chunk.sequence for chunk in plan if chunk.is_last):
            sequence.append(int(rng.integers(0, 150_000)))
            if sequence.finish_reason:
                scheduler.remove(sequence)
    assert len(sizes[512]) > 30
    assert 500 < max(sizes[1]) < 4096
    assert max(sizes[512]) < hosts.FIRST_BYTES


def test_sizes_that_are_told():
    """Few programs: sizes are powers of two."""
    assert [hosts._padded(n) for n in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]
