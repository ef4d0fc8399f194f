"""One engine over several processes, of which each has some of the mesh's devices.

    python -m examples.engine.serve --mesh tensor=4 --coordinator HOST:PORT --num-processes 2 \\
        --process-id 0                            # on the first host; 1 on the second, and so on

JAX's distributed runtime joins the processes (`join`), so that `jax.devices()` has the devices of
all of them and a step is one program that every process starts. Each reads its own devices' parts
of the weights. The first has the scheduler and the HTTP server, and tells the others what it runs:

    leader      schedule -> pack -> tell ------------+     run(bucket, inputs) -> tokens
    followers                       hear  (some KiB) +---> run(bucket, inputs)

What is told are functions of an engine (`on_all_hosts`), and it goes the way of the collectives
(`broadcast_one_to_all`): there is no protocol of our own, and a process that has died ends the next
collective of all others with an error. They exit with status 1, or JAX aborts them; a supervisor
starts the group again. While there is no work the leader says so every few seconds, so that no
process waits for one that has died.
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

FIRST_BYTES = 8192  # of what is told, that all processes know to expect; most steps fit
OPTION_CHARS = 100  # of an option's value that are told; a digest stands for those that follow
SIZE_BYTES = 4  # in front of it: how many bytes it has
END = ""  # told last
IDLE_SECONDS = 2.0  # between two signs of life while there is no work
HEARTBEAT_SECONDS = 30


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat: int = HEARTBEAT_SECONDS,
) -> None:
    """Join the other processes of a group. Before anything asks for devices.

    Args:
      coordinator: HOST:PORT of the first process.
      num_processes: in the group.
      process_id: this one's, from 0. All None: what the cluster says (Slurm, Kubernetes, a TPU
        pod), as `jax.distributed.initialize` finds it.
      heartbeat: seconds without an answer from a host, after which JAX aborts the others. The same
        in every process.

    Raises:
      RuntimeError: the others cannot be reached.
    """
    jax.distributed.initialize(
        coordinator, num_processes, process_id, heartbeat_timeout_seconds=heartbeat
    )


def check_alike(options: Mapping[str, Any]) -> None:
    """Compare what every process was told at its start; all of them call this after `join`.

    Args:
      options: of the command, by name, that must be the same everywhere.

    Raises:
      ValueError: in every process: options that differ, with the value that each process has.
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
    """A text that others are told, of at most `OPTION_CHARS`; different ones stay different."""
    if len(text) <= OPTION_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
    return f"{text[: OPTION_CHARS - 20]}... {digest}"


def followers_of(mesh: DeviceMesh | None) -> Followers | None:
    """The other processes of a mesh, for the first one; None if there are none."""
    if mesh is None or not mesh.devices.is_multi_process or jax.process_index():
        return None
    return Followers()


class Followers:
    """The other processes, as the first one sees them."""

    def __init__(self) -> None:
        self.num_told = 0  # messages
        self.num_bytes = 0  # of them all
        self.most_bytes = 0  # of the longest

    def tell(self, function: Callable | str, *arguments: Any) -> None:
        """Have every other process do with its engine what this one is about to do.

        Args:
          function: of an engine and the arguments, by the name it has in a module; or `END`.
          arguments: which can be pickled.
        """
        data = encode(function, *arguments)
        self.num_told += 1
        self.num_bytes += len(data)
        self.most_bytes = max(self.most_bytes, len(data))
        broadcast(data[:FIRST_BYTES], FIRST_BYTES)
        if rest := data[FIRST_BYTES:]:
            broadcast(rest, _padded(len(rest)))


def encode(function: Callable | str, *arguments: Any) -> bytes:
    """Encode a message, compressed, after its size."""
    told = zlib.compress(pickle.dumps((function, arguments)), 1)
    return len(told).to_bytes(SIZE_BYTES, "little") + told


def hear() -> tuple[Any, tuple]:
    """Receive what the first process tells: the other end of `Followers.tell`."""
    data = broadcast(b"", FIRST_BYTES)
    size = int.from_bytes(data[:SIZE_BYTES], "little") + SIZE_BYTES
    if size > FIRST_BYTES:
        data += broadcast(b"", _padded(size - FIRST_BYTES))
    return pickle.loads(zlib.decompress(data[SIZE_BYTES:size]))


def follow(engine: Engine) -> None:
    """Do what the first process tells, until it says that it ends."""
    while (told := hear())[0] != END:
        function, arguments = told
        jax.block_until_ready(function(engine, *arguments))


def on_all_hosts(function: Callable) -> Callable:
    """A function of an engine that the first process calls, and all others with it."""

    @functools.wraps(function)
    def tell_and_do(engine: Engine, *arguments: Any) -> Any:
        if engine.followers:
            engine.followers.tell(tell_and_do, *arguments)
        return function(engine, *arguments)

    return tell_and_do


def leave(engine: Engine) -> None:
    """End this process's part of a group after `END`, together with all others."""
    engine.close()
    jax.distributed.shutdown()


def exit_with(error: BaseException) -> None:
    """End this process because another one did, or because of an error of its own."""
    process = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"{process}: the group has failed: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # JAX would wait for the others


def gathered(array: jax.Array) -> np.ndarray:
    """All of an array. Of what other processes have parts of, all of them must ask for it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def broadcast(data: bytes, size: int) -> bytes:
    """The first process's `data`, padded to `size`, on every process; those of others are lost."""
    padded = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)))


def _padded(size: int) -> int:
    """A power of two: few programs for all sizes."""
    return 1 << max(size - 1, 0).bit_length()
