"""One engine over several processes, each of which has some of the mesh's devices.

    python -m examples.engine.serve --mesh tensor=4 --coordinator HOST:PORT --num-processes 2 \\
        --process-id 0                            # on the first host; 1 on the second, and so on

JAX's distributed runtime joins the processes (`join`), so that `jax.devices()` has the devices of
all processes, and a step is one program that every process starts. Each process reads its own
devices' parts of the weights. The first one has the scheduler and the HTTP server, and tells the
others what it runs:

    leader      schedule -> pack -> tell ------------+     run(bucket, inputs) -> tokens
    followers                       hear  (some KiB) +---> run(bucket, inputs)

Messages name functions of an engine (`on_all_hosts`), and travel through collectives
(`broadcast_one_to_all`), so there is no protocol of our own, and when a process has died, the next
collective fails in all others. They exit with status 1, or JAX aborts them; a supervisor restarts
the group. While idle, the leader sends a message every few seconds, so that no process waits for
one that has died.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from examples.engine.mesh import DeviceMesh

if TYPE_CHECKING:
    from examples.engine.engine import Engine

FIRST_BYTES = 8192  # of a message, which all processes expect; most steps fit
OPTION_CHARS = 100  # of an option's value that are sent; a digest replaces the rest
SIZE_BYTES = 4  # at the start of a message: how many bytes it has
END = ""  # the last message
IDLE_SECONDS = 2.0  # between two signs of life while there is no work
HEARTBEAT_SECONDS = 30


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat: int = HEARTBEAT_SECONDS,
) -> None:
    """Join the other processes of a group. Call this before anything asks for devices.

    Args:
      coordinator: HOST:PORT of the first process.
      num_processes: processes in the group.
      process_id: this one's index, from 0. If all three are None, `jax.distributed.initialize`
        finds them from the cluster (Slurm, Kubernetes, a TPU pod).
      heartbeat: seconds of silence from a host after which JAX aborts the others. The same in every
        process.

    Raises:
      RuntimeError: the others cannot be reached.
    """
    jax.distributed.initialize(
        coordinator, num_processes, process_id, heartbeat_timeout_seconds=heartbeat
    )


def check_alike(options: Mapping[str, Any]) -> None:
    """Compare the options of all processes; each of them calls this after `join`.

    Args:
      options: options by name that must be the same everywhere.

    Raises:
      ValueError: in every process, if options differ; it lists each process's values.
    """
    texts = {name: _short(str(value)) for name, value in options.items()}
    data = json.dumps(texts).encode()
    size = _padded(len(options) * 16 * OPTION_CHARS)  # the same everywhere, and enough
    packed = np.frombuffer(data.ljust(size), np.uint8)
    everyone = [json.loads(bytes(row)) for row in multihost_utils.process_allgather(packed)]
    problems = []
    for name in options:
        values = [texts[name] for texts in everyone]
        if len(set(values)) > 1:
            named = ", ".join(f"{value} in process {i}" for i, value in enumerate(values))
            problems.append(f"--{name.replace('_', '-')} is {named}")
    if problems:
        raise ValueError(f"{'; '.join(problems)}: start all processes with the same options")


def _short(text: str) -> str:
    """Shorten a text to at most `OPTION_CHARS` to send it; different texts stay different."""
    if len(text) <= OPTION_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
    return f"{text[: OPTION_CHARS - 20]}... {digest}"


def followers_of(mesh: DeviceMesh | None) -> Followers | None:
    """Return a mesh's other processes for the first one; None if there are none."""
    if mesh is None or not mesh.devices.is_multi_process or jax.process_index():
        return None
    return Followers()


class Followers:
    """The other processes, from the first one's point of view."""

    def __init__(self) -> None:
        self.num_told = 0  # messages
        self.num_bytes = 0  # of all messages
        self.most_bytes = 0  # of the longest message

    def tell(self, function: Callable | str, *arguments: Any) -> None:
        """Make every other process do with its engine what this one is about to do.

        Args:
          function: a module's function of an engine and the arguments, or `END`.
          arguments: they must be picklable.
        """
        data = encode(function, *arguments)
        self.num_told += 1
        self.num_bytes += len(data)
        self.most_bytes = max(self.most_bytes, len(data))
        broadcast(data[:FIRST_BYTES], FIRST_BYTES)
        if rest := data[FIRST_BYTES:]:
            broadcast(rest, _padded(len(rest)))


def encode(function: Callable | str, *arguments: Any) -> bytes:
    """Encode a message: its size, then its compressed bytes."""
    told = zlib.compress(pickle.dumps((function, arguments)), 1)
    return len(told).to_bytes(SIZE_BYTES, "little") + told


def hear() -> tuple[Any, tuple]:
    """Receive a message from the first process: the counterpart of `Followers.tell`."""
    data = broadcast(b"", FIRST_BYTES)
    size = int.from_bytes(data[:SIZE_BYTES], "little") + SIZE_BYTES
    if size > FIRST_BYTES:
        data += broadcast(b"", _padded(size - FIRST_BYTES))
    return pickle.loads(zlib.decompress(data[SIZE_BYTES:size]))


def follow(engine: Engine) -> None:
    """Do what the first process says, until it says that it ends."""
    while (told := hear())[0] != END:
        function, arguments = told
        jax.block_until_ready(function(engine, *arguments))


def on_all_hosts(function: Callable) -> Callable:
    """Wrap a function of an engine so that all processes call it when the first one does."""

    @functools.wraps(function)
    def tell_and_do(engine: Engine, *arguments: Any) -> Any:
        if engine.followers:
            engine.followers.tell(tell_and_do, *arguments)
        return function(engine, *arguments)

    return tell_and_do


def leave(engine: Engine) -> None:
    """Leave the group after `END`, together with all other processes."""
    engine.close()
    jax.distributed.shutdown()


def exit_with(error: BaseException) -> None:
    """End this process because another one ended, or because of its own error."""
    process = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"{process}: the group has failed: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # JAX would wait for the others


def gathered(array: jax.Array) -> np.ndarray:
    """Return a whole array. If other processes have parts of it, all processes must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def broadcast(data: bytes, size: int) -> bytes:
    """Return the first process's `data`, padded to `size`; other processes' data is ignored."""
    padded = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)))


def _padded(size: int) -> int:
    """Round up to a power of two, so that few programs serve all sizes."""
    return 1 << max(size - 1, 0).bit_length()
