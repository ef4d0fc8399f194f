"""Signals, and failures while a server starts, each reported in one sentence.

It is told to end (`ends_when_told`). While XLA compiles, Python's own handlers of signals wait, for
minutes with a large model. So a thread hears of the signal (`signal.set_wakeup_fd`) and ends the
process: there is no request yet.

It is a supervisor's child, and the supervisor has died (`end_with_parent`): it ends as if told to.

There is not enough memory (`tells_of_memory`): the server ends with status 1, for there may be more
when it is started again.

Compiled programs cannot be kept or read (`tells_of_cache`): the disk is full, or a process was
killed while it wrote. JAX goes on without, warns of each program, and never writes a file again
that is there, be it half of one.
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

    Does nothing outside of the main thread, where Python takes no signals.

    Args:
      name: what says so.
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
        os.close(tells)  # which ends the thread
        thread.join()
        os.close(hears)


@contextlib.contextmanager
def on_signals(call: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call a function meanwhile, and do nothing else.

    Does nothing outside of the main thread, where Python takes no signals.
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
    """Have this process told to end when its parent has died: it would keep the devices."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_process(status: int) -> NoReturn:
    """End without joining threads: what they compile or read is no longer needed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def tells_of_memory(name: str) -> Iterator[None]:
    """End this process with status 1 if there is not enough memory; `name` says so."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and not reason.startswith("RESOURCE_EXHAUSTED"):
            raise  # another error of XLA's
        print(f"{name}: error: not enough memory: {reason}", file=sys.stderr, flush=True)
        end_process(1)


def tells_of_cache(directory: str | Path, tell: Callable[[str], None]) -> Callable[[str], bool]:
    """Make a filter for JAX's warnings about compiled programs in a folder, which it also repairs.

    Args:
      directory: the folder.
      tell: is called with a sentence, once for reading and once for writing.

    Returns: a function of a warning's text, which says whether it is such a warning.
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
                    path.unlink()  # so that it is written again
        if what not in told:
            told.add(what)
            done = "read from" if what == "reading" else "kept in"
            tell(f"compiled programs cannot be {done} {directory}: {reason}")
        return True

    return take


def watch_cache(directory: str | Path) -> None:
    """Have `tells_of_cache` see this process's warnings from now on."""
    shown = warnings.showwarning
    take = tells_of_cache(directory, lambda text: print(text, file=sys.stderr, flush=True))

    def show(message: Warning | str, *others: object, **more: object) -> None:
        if not take(str(message)):
            shown(message, *others, **more)

    warnings.filterwarnings("always", "Error (reading|writing) .* cache entry")  # every file's
    warnings.showwarning = show


def _is_whole(path: Path) -> bool:
    """Whether a file of a compiled program can be decompressed, as JAX does it."""
    for module in ("zlib", "zstandard", "compression.zstd"):
        with contextlib.suppress(Exception):  # each its own, and of modules that are not there
            importlib.import_module(module).decompress(path.read_bytes())
            return True
    return False
