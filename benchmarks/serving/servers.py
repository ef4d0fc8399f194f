"""Start servers of the same checkpoint: the example engine's and vLLM's CPU server."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving.client import Client, RefusedError

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 600  # vLLM compiles its model when it starts
# Puts both servers' weights and arrays in huge pages.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ServerError(Exception):
    """A server does not start, or has ended."""


class Server:
    """A server in a separate process group. Use as a context manager."""

    def __init__(self, command: Sequence[str], port: int, **environment: str):
        """Start the server.

        Args:
          command: the command that runs it.
          port: the port where it will listen.
          environment: environment variables in addition to this process's.
        """
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`stop` closes it)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.client = Client(f"http://127.0.0.1:{port}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, metric: str | None = None) -> None:
        """Wait until it serves and, if a metric is named, until that metric is 0.

        Raises:
          ServerError: it ended or takes too long; the message has the end of its output.
        """
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerError(f"{self.name} ended with {self._process.returncode}{self.log()}")
            try:
                with self.client.send("/health"):
                    pass
                if metric is None or not self.client.metric(metric):
                    return
            except (OSError, http.client.HTTPException, RefusedError):
                pass
            time.sleep(0.5)
        raise ServerError(f"{self.name} does not serve after {START_SECONDS} s{self.log()}")

    @property
    def name(self) -> str:
        """The module that it runs."""
        return self._process.args[2]

    def log(self, lines: int = 15) -> str:
        """Return the end of its output."""
        self._log.seek(0)
        return "\n  ".join(["", *self._log.read().splitlines()[-lines:]])

    def cpu_seconds(self) -> float:
        """Return the time that its processes have spent on all cores."""
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == self._process.pid:  # its session
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        """Stop its processes until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it and every process it started."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self.resume()
            self._process.terminate()
            self._process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def free_port() -> int:
    """Return a port where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start_jattn(
    python: str, directory: Path, dtype: str, *further: str, max_seqs: int, max_len: int
) -> Server:
    """Start the example engine's server, with `further` options."""
    port = free_port()
    options = {
        "--model": directory,
        "--dtype": dtype,
        "--port": port,
        "--max-seqs": max_seqs,
        "--max-len": max_len,
        "--max-requests": 4 * max_seqs,
    }
    command = [python, "-m", "examples.engine.serve", "--no-prefix-cache"]
    environment = {"PYTHONPATH": str(ROOT), **HUGE_PAGES}
    return Server([*command, *_words(options), *further], port, **environment)


def start_vllm(python: str, directory: Path, dtype: str, *, max_seqs: int, max_len: int) -> Server:
    """Start vLLM's server, with its own defaults except for sizes and threads.

    By default it reserves a core for its HTTP process; here it computes on all cores, as XLA does.
    """
    port = free_port()
    options = {
        "--model": directory,
        "--dtype": dtype,
        "--port": port,
        "--max-num-seqs": max_seqs,
        "--max-model-len": max_len,
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **HUGE_PAGES,
    }
    return Server([*command, "--no-enable-prefix-caching", *_words(options)], port, **environment)


def _words(options: dict[str, object]) -> list[str]:
    return [str(word) for pair in options.items() for word in pair]
