"""Handle signals, and failures while a server starts; each is reported in one sentence.

The server is told to end (`ends_when_told`). While XLA compiles, Python's own signal handlers wait,
which takes minutes with a large model. So a thread receives the signal (`signal.set_wakeup_fd`) and
ends the process: there are no requests yet.

Its supervisor has died (`end_with_parent`). The server ends as if told to.

There is not enough memory (`tells_of_memory`). The server ends with status 1, since there may be
more memory after a restart.

Compiled programs cannot be kept or read (`tells_of_cache`), because the disk is full or a process
was killed while writing. JAX goes on without them, warns about each program, and never rewrites an
existing file, even a truncated one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_SECONDS = 1.0  # between two checks of the parent


@contextlib.contextmanager
def ends_when_told(name: str) -> Iterator[None]:
    """End this process with status 128 + n if signal n (SIGTERM, SIGINT) comes meanwhile.

    Does nothing outside the main thread, where Python receives no signals.

    Args:
      name: the program's name, for the message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hears, tells = os.pipe()
    os.set_blocking(tells, False)

    def wait() -> None:
        found = os.read(hears, 1)
        if found:
            which = signal.Signals(found[0]).name
            print(f"{name}: ended by {which} before it was ready", file=sys.stderr, flush=True)
            os._exit(128 + found[0])

    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    previous = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(tells)  # ends the thread
        thread.join()
        os.close(hears)


@contextlib.contextmanager
def on_signals(call: Callable[[], None]) -> Iterator[None]:
    """Make SIGTERM and SIGINT call a function meanwhile, and do nothing else.

    Does nothing outside the main thread, where Python receives no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: call()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """End this process when its parent has died, or else it would keep the devices."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_process(status: int) -> NoReturn:
    """End this process without joining threads, whose work is no longer needed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def tells_of_memory(name: str) -> Iterator[None]:
    """End this process with status 1 if there is not enough memory, with a message by `name`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and not reason.startswith("RESOURCE_EXHAUSTED"):
            raise  # a different XLA error
        print(f"{name}: error: not enough memory: {reason}", file=sys.stderr, flush=True)
        end_process(1)


def tells_of_cache(directory: str | Path, tell: Callable[[str], None]) -> Callable[[str], bool]:
    """Make a filter for JAX's warnings about a folder of compiled programs, which also repairs it.

    Args:
      directory: the folder.
      tell: called with a sentence, once for reading and once for writing.

    Returns: a function that takes a warning's text and returns whether it is such a warning.
    """
    told: set[str] = set()

    def take(text: str) -> bool:
        found = re.match(r"Error (reading|writing) .* cache entry for '(.*?)': (.*)", text)
        if found is None:
            return False
        what, program, reason = found.groups()
        for path in Path(directory).glob("*-cache"):
            if path.name.startswith(f"{program}-") and not _is_whole(path):
                with contextlib.suppress(OSError):
                    path.unlink()  # so that JAX writes it again
        if what not in told:
            told.add(what)
            done = "read from" if what == "reading" else "kept in"
            tell(f"compiled programs cannot be {done} {directory}: {reason}")
        return True

    return take


def watch_cache(directory: str | Path) -> None:
    """Pass this process's warnings through `tells_of_cache` from now on."""
    shown = warnings.showwarning
    take = tells_of_cache(directory, lambda text: print(text, file=sys.stderr, flush=True))

    def show(message: Warning | str, *others: object, **more: object) -> None:
        if not take(str(message)):
            shown(message, *others, **more)

    warnings.filterwarnings("always", "Error (reading|writing) .* cache entry")  # every file's
    warnings.showwarning = show


def _is_whole(path: Path) -> bool:
    """Whether a compiled program's file can be decompressed, as JAX does it."""
    for module in ("zlib", "zstandard", "compression.zstd"):
        with contextlib.suppress(Exception):  # their own errors, and errors of missing modules
            importlib.import_module(module).decompress(path.read_bytes())
            return True
    return False
