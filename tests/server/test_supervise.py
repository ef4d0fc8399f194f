"""Servers that are restarted: which exits count, what clients see, a group of two processes."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support import extras

httpx = extras.serve()

from benchmarks.serving.servers import free_port
from examples.engine.supervise import supervise
from tests.support import processes
from tests.support.serving import completed, wait_for

# Records each start in a file, and ends with the status or signal given for that start.
SERVER = """
import os, pathlib, sys
log = pathlib.Path(sys.argv[1])
starts = log.read_text() if log.exists() else ""
log.write_text(starts + "x")
status = int(sys.argv[2].split(",")[len(starts)])
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""


@pytest.mark.parametrize(
    ("statuses", "restarts", "last"),
    [
        ([0], 3, 0),
        ([1, -9, 0], 3, 0),
        ([1, 2], 3, 2),  # wrong arguments stay wrong
        ([1, 1, 1], 2, 1),
        ([-9], 0, 137),
    ],
)
def test_a_server_that_dies_is_restarted(tmp_path, capfd, statuses, restarts, last):
    log = tmp_path / "starts"
    given = [str(log), ",".join(map(str, statuses))]
    assert supervise([sys.executable, "-Sc", SERVER, *given], restarts, pause=0.01) == last
    assert log.read_text() == "x" * len(statuses)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == len(statuses) - 1
    for i, line in enumerate(told):
        how = f"signal {-statuses[i]}" if statuses[i] < 0 else f"status {statuses[i]}"
        wanted = f"the server ended with {how}: restart {i + 1} of {restarts} in {0.01 * 2**i:g} s"
        assert line == wanted


def test_a_long_run_resets_the_count_of_restarts(tmp_path):
    log = tmp_path / "starts"
    command = [sys.executable, "-Sc", SERVER, str(log), "1,1,1,0"]
    assert supervise(command, 1, pause=0.01, steady=0) == 0
    assert log.read_text() == "xxxx"


@pytest.mark.parametrize("dead", [False, True], ids=["running", "dead"])
def test_a_supervisor_ends_when_told_to(dead):
    server = "raise SystemExit(1)" if dead else "import time; time.sleep(60)"
    code = (
        "import sys; from examples.engine.supervise import supervise\n"
        f"sys.exit(supervise([sys.executable, '-Sc', 'print(1, flush=True); {server}'], 9))"
    )
    with subprocess.Popen(
        [sys.executable, "-Sc", code],
        cwd=processes.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as supervisor:
        assert supervisor.stdout.readline() == b"1\n"
        if dead:
            assert b"restart 1 of 9" in supervisor.stderr.readline()
        supervisor.terminate()
        assert supervisor.wait(30) == (0 if dead else 128 + signal.SIGTERM)


def test_a_server_ends_with_its_supervisor():
    """A supervisor that is killed cannot tell the server to end."""
    server = (
        "import os, time; from examples.engine import starting\n"
        "starting.POLL_SECONDS = 0.05; starting.end_with_parent(os.getppid())\n"
        "print(1, flush=True); time.sleep(60)"
    )
    code = (
        "import sys; from examples.engine.supervise import supervise\n"
        f"supervise([sys.executable, '-Sc', {server!r}], 9)"
    )
    with subprocess.Popen(
        [sys.executable, "-Sc", code], cwd=processes.ROOT, stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout.readline() == b"1\n"
        began = time.monotonic()
        supervisor.kill()
        assert supervisor.stdout.read() == b""  # the server has closed it as well
        assert time.monotonic() - began < 20


def test_a_server_whose_supervisor_died_first_ends():
    """The supervisor died before the server first checked."""
    code = (
        "import time; from examples.engine import starting\n"
        "starting.end_with_parent(2**22 + 1); time.sleep(60)"  # no process has this id
    )
    done = subprocess.run([sys.executable, "-Sc", code], cwd=processes.ROOT, timeout=50)
    assert done.returncode == -signal.SIGTERM


def servers_of(supervisor: int) -> list[int]:
    """Return the ids of a supervisor's running child processes."""
    children = pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children")
    return [int(child) for child in children.read_text().split()]


@contextlib.contextmanager
def supervised(folder, *options: str, count: int = 1):
    """Run supervisors of a group of processes, which log to files `0`, `1`; yield a client too."""
    port, coordinator = free_port(), f"127.0.0.1:{free_port()}"
    sizes = ["--max-seqs=2", "--token-budget=4", "--max-len=128", "--restarts=9"]
    command = [sys.executable, "-m", "examples.engine.serve", "--model=qwen3-tiny", *sizes]
    environment = {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder)}
    group = []
    for rank in range(count):
        others = [f"--coordinator={coordinator}", f"--num-processes={count}"]
        others = [*others, f"--process-id={rank}", f"--mesh=tensor={count}"] * (count > 1)
        with open(folder / str(rank), "w") as log:
            group.append(
                subprocess.Popen(
                    [*command, *others, f"--port={port}", *options],
                    env={**os.environ, **environment},
                    cwd=processes.ROOT,
                    stderr=log,
                )
            )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            yield group, client
    finally:
        for supervisor in group:
            supervisor.terminate()
        for supervisor in group:
            supervisor.wait(60)


BODIES = [
    dict(
        prompt=[i, 1, 2],
        max_tokens=80,
        ignore_eos=True,
        seed=i,
        stream=i % 2 == 0,
        temperature=i % 3 / 2,
    )
    for i in range(6)
]


def answered_while(client, kill) -> list[str]:
    """Return the texts of all requests, sent at once; call `kill` while they run."""
    begun: list[int] = []
    with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as pool:
        answers = [pool.submit(completed, client, body, lambda: begun.append(1)) for body in BODIES]
        while len(begun) < 30 and not all(answer.done() for answer in answers):
            time.sleep(0.01)
        assert not any(answer.done() for answer in answers)
        kill()
        return [answer.result() for answer in answers]


@pytest.mark.extended
def test_requests_outlive_a_server_that_is_killed(tmp_path):
    with supervised(tmp_path) as ((supervisor,), client):
        wait_for(client.base_url.port, supervisor)
        expected = [completed(client, {**body, "stream": False}) for body in BODIES]
        assert len(set(expected)) == len(BODIES)
        (server,) = servers_of(supervisor.pid)
        assert answered_while(client, lambda: os.kill(server, signal.SIGKILL)) == expected
        assert servers_of(supervisor.pid) != [server]
        told = iter([supervisor.terminate])
        drained = completed(client, BODIES[0], lambda: next(told, bool)())
        assert drained == expected[0]
        assert supervisor.wait(60) == 0
    text = (tmp_path / "0").read_text()
    assert text.count("restart 1 of 9 in 1 s") == 1
    assert "restart 2" not in text


@pytest.mark.extended
def test_requests_outlive_the_processes_of_a_group(tmp_path):
    """Kill the second process, then the first: each time the other ends too, and both rejoin."""
    with supervised(tmp_path, count=2) as (group, client):
        wait_for(client.base_url.port, group[0])
        expected = [completed(client, {**body, "stream": False}) for body in BODIES]
        for dies in (1, 0):
            before = [servers_of(supervisor.pid) for supervisor in group]
            kill = functools.partial(os.kill, *before[dies], signal.SIGKILL)
            assert answered_while(client, kill) == expected
            after = [servers_of(supervisor.pid) for supervisor in group]
            assert after[0] != before[0]
            assert after[1] != before[1]
        for supervisor in group:
            supervisor.terminate()
        assert [supervisor.wait(60) for supervisor in group] == [0, 0]
    told = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    assert all("restart 2 of 9 in 2 s" in text and "restart 3" not in text for text in told)
    assert "signal 9: restart 1 of 9 in 1 s" in told[1]
    assert "signal 9: restart 2 of 9 in 2 s" in told[0]


@pytest.mark.extended
@pytest.mark.parametrize("what", ["wrong", "taken"])
def test_a_supervisor_ends_on_wrong_arguments(tmp_path, what):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        given = ["--role=decode"] if what == "wrong" else [f"--port={port}"]
        with supervised(tmp_path, *given) as ((supervisor,), _):
            assert supervisor.wait(120) == 2
    text = (tmp_path / "0").read_text()
    assert ("--prefill-server" if what == "wrong" else f":{port}: Address already in use") in text
    assert "restart 1" not in text
