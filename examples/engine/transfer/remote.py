"""Let other servers read prompts for this one, over HTTP (`examples/engine/transfer/offers.py`).

    offer     the other server reads the prompt, while this engine decodes
    fetch     the bytes come here, into arrays whose sizes follow from this engine's own caches
    release   the other server may drop them

No received data is trusted. It must have as many bytes as these caches need, with the offer's
checksum, and is written only to the request's own blocks. After any failure this server reads the
prompt itself.
"""

from __future__ import annotations

import http.client
import json
import logging
import queue
import re
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from examples.engine.engine import Engine
from examples.engine.request import Request
from examples.engine.transfer.contents import Contents, Transfer
from examples.engine.transfer.description import differences, digest

CHUNK_BYTES = 1 << 20  # read at a time, between two checks of the clock
MOST_JSON = 4 << 20  # bytes of a response other than contents
RETRY_SECONDS = 5.0  # after a failure, during which a server gets no prompts
MOST_ON_THEIR_WAY = 32  # prompts in transfer; others wait here
PATH = "/prefill"


class TransferError(RuntimeError):
    """Another server could not provide a prompt."""


class TransferRefusedError(TransferError):
    """Another server refused one prompt, but may accept others."""


class PrefillServer:
    """A server that reads prompts."""

    def __init__(
        self,
        url: str,
        transfer: Transfer,
        description: Mapping[str, Any],
        *,
        api_key: str | None = None,
        seconds: float = 30.0,
    ):
        """Store its address; send nothing yet.

        Args:
          url: such as http://127.0.0.1:8001.
          transfer: this engine's, which knows the expected sizes.
          description: this engine's, which the other server's must equal.
          api_key: the key that the other server requires.
          seconds: in which a prompt must be read and arrive.

        Raises:
          ValueError: it is not the URL of a server.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            self.port = parts.port
        except ValueError:
            parts = urllib.parse.urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--prefill-server is {url!r}, but must be like http://HOST:PORT")
        self.url, self.host, self.path = url, parts.hostname, parts.path.rstrip("/") + PATH
        self.is_https = parts.scheme == "https"
        self.transfer, self.description = transfer, description
        self.digest, self.api_key, self.seconds = digest(description), api_key, seconds
        self.num_asked = 0  # prompts that it is reading or sending
        self._failed: float | None = None  # when it last did, by time.monotonic()

    @property
    def rests(self) -> bool:
        """Whether it failed recently and gets no prompts for now."""
        return self._failed is not None and time.monotonic() - self._failed < RETRY_SECONDS

    def check(self) -> None:
        """Check that its contents mean the same as here.

        Raises:
          ValueError: they do not, or it reads no prompts.
          TransferError, OSError, http.client.HTTPException: it does not respond as it should.
        """
        with Connection(self) as connection:
            status, theirs = connection.ask("GET", "")
        if status == 404:
            raise ValueError(f"{self.url} reads no prompts: it was started without --role prefill")
        if status != 200:
            raise TransferError(_reason(status, theirs))
        if found := differences(theirs, self.description):
            raise ValueError(f"{self.url} cannot read prompts for this server: {'; '.join(found)}")

    def read(
        self,
        prompt: Sequence[int],
        make: Callable[[int], Contents],
        following: int | None = None,
    ) -> Contents:
        """Fetch the contents of its caches for a prompt, from any thread.

        Args:
          prompt: the tokens.
          make: allocates arrays for some tokens' contents.
          following: the token after them, which an MTP layer's last keys and values depend on.

        Raises:
          Exception: it failed, for any reason.
        """
        try:
            with Connection(self) as connection:
                offered = connection.offer(prompt, following)
                contents = make(len(prompt))
                connection.fetch(offered["id"], contents)
                connection.release(offered["id"])
            if contents.checksum != offered.get("crc32"):
                raise TransferError("the bytes differ from those offered: their CRC-32 is wrong")
        except TransferRefusedError:
            raise
        except Exception:
            self._failed = time.monotonic()
            raise
        return contents


class Connection:
    """The three calls, to one server and for one prompt, all in a limited time."""

    def __init__(self, server: PrefillServer):
        """Connect with the first call."""
        self._server, self._deadline = server, time.monotonic() + server.seconds
        kind = http.client.HTTPSConnection if server.is_https else http.client.HTTPConnection
        self._http = kind(server.host, server.port, timeout=server.seconds)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def offer(self, prompt: Sequence[int], following: int | None = None) -> dict[str, Any]:
        """Ask the server to read a prompt; return the id and checksum of its contents.

        Raises:
          TransferError: the prompt was not read, or the offer has the wrong size.
        """
        body = {"prompt": list(prompt), "next": following, "config": self._server.digest}
        status, offered = self.ask("POST", "", body)
        if status != 200 or not isinstance(offered, dict):
            kind = TransferRefusedError if status in (400, 429) else TransferError
            raise kind(_reason(status, offered))
        num_bytes = self._server.transfer.nbytes(len(prompt))
        wanted = {"num_tokens": len(prompt), "num_bytes": num_bytes}
        found, id = {name: offered.get(name) for name in wanted}, offered.get("id")
        if found != wanted or not isinstance(id, str) or not re.fullmatch(r"[\w-]{1,64}", id):
            raise TransferError(f"it offers {str(offered)[:200]}, but must offer {wanted}")
        return offered

    def fetch(self, id: str, contents: Contents) -> None:
        """Read the bytes of an offer into arrays.

        Raises:
          TransferError: there are more or fewer bytes, or they take too long.
        """
        response = self._send("GET", f"/{id}")
        if response.status != 200:
            raise TransferError(_reason(response.status, self._json(response)))
        if response.length != contents.nbytes:
            raise TransferError(f"it sends {response.length} bytes, not {contents.nbytes}")
        for data in contents.bytes():
            while data:
                found = self._some(response, len(data))
                if not found:
                    raise TransferError("the connection closed before all bytes arrived")
                data[: len(found)] = found
                data = data[len(found) :]
        response.read()  # nothing: the connection is free for the next call

    def release(self, id: str) -> None:
        """Tell the server that an offer is no longer needed."""
        self._json(self._send("DELETE", f"/{id}"))

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request; return the response's status and JSON, or None if it is not JSON."""
        response = self._send(method, path, body)
        return response.status, self._json(response)

    def _send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        self._in_time()
        key = self._server.api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        data = None if body is None else json.dumps(body).encode()
        self._http.request(method, self._server.path + path, data, headers)
        self._in_time()
        return self._http.getresponse()

    def _json(self, response: http.client.HTTPResponse) -> Any:
        data = b""
        while len(data) < MOST_JSON and (found := self._some(response, MOST_JSON)):
            data += found
        if response.length == 0:
            response.read()  # nothing: the connection is free for the next call
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return None

    def _some(self, response: http.client.HTTPResponse, most: int) -> bytes:
        """Read the next part of a body without waiting for all of it; empty at its end."""
        self._in_time()
        return response.read1(min(most, CHUNK_BYTES))

    def _in_time(self) -> None:
        """Let the next wait end at the deadline.

        Raises:
          TransferError: it has passed.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TransferError(f"it took more than {self._server.seconds:g} seconds")
        self._http.timeout = left
        if self._http.sock is not None:
            self._http.sock.settimeout(left)


class Remote:
    """Sends prompts to other servers for prefill when that saves time."""

    def __init__(
        self, servers: Sequence[PrefillServer], *, least_tokens: int = 64, most_bytes: int = 1 << 30
    ):
        """Send nothing yet.

        Args:
          servers: servers that read prompts; the one with the fewest prompts gets the next.
          least_tokens: prompts with fewer tokens to compute are read here.
          most_bytes: the most bytes of contents in transfer or waiting to be put into the caches.
        """
        self.servers, self.least_tokens = tuple(servers), least_tokens
        self._left, self._changed = most_bytes, threading.Condition()
        self._most_bytes = most_bytes
        self._prompts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_threads = 0
        self._counting = threading.Lock()  # of the servers' `num_asked`

    def wants(self, engine: Engine, request: Request) -> bool:
        """Whether another server should read a prompt. Called in the engine's thread."""
        if (
            request.prompt_logprobs
            or request.adapter
            or all(server.rests for server in self.servers)
        ):
            return False
        if len(request.prompt) - 1 < self.least_tokens or request.max_len > engine.limits.max_len:
            return False
        return len(request.prompt) - 1 - engine.scheduler.num_cached(request) >= self.least_tokens

    def start(
        self,
        prompt: Sequence[int],
        done: Callable[[Contents | None], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Send all but a prompt's last token to another server.

        Args:
          prompt: its tokens.
          done: called in another thread, with the contents, or None if none arrived.
          is_wanted: called there when it is the prompt's turn; if it returns False, no server is
            asked.
        """

        def read() -> None:
            contents = None
            try:
                if is_wanted():
                    contents = self._read(prompt[:-1], prompt[-1])
            finally:
                done(contents)

        self._prompts.put(read)
        if self._num_threads < MOST_ON_THEIR_WAY:
            self._num_threads += 1
            # Not a pool of `concurrent.futures`: the process would wait for its threads at exit.
            threading.Thread(target=self._run, name="prefill", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._prompts.get()()

    def _read(self, prompt: Sequence[int], following: int | None = None) -> Contents | None:
        waiting = [server for server in self.servers if not server.rests]
        if not waiting:
            return None
        with self._counting:
            server = min(waiting, key=lambda server: server.num_asked)
            server.num_asked += 1
        try:
            return server.read(prompt, lambda count: self._make(server, count), following)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            logging.getLogger(__name__).warning("%s: %s; the prompt is read here", server.url, what)
            return None
        finally:
            with self._counting:
                server.num_asked -= 1

    def _make(self, server: PrefillServer, num_tokens: int) -> Contents:
        """Allocate arrays for what arrives, once there is room for them."""
        nbytes = server.transfer.nbytes(num_tokens)
        if nbytes > self._most_bytes:
            raise TransferRefusedError(
                f"it needs {nbytes} bytes, but there is room for {self._most_bytes}"
            )
        with self._changed:
            if not self._changed.wait_for(lambda: self._left >= nbytes, server.seconds):
                raise TransferRefusedError("earlier contents are still waiting to be put in caches")
            self._left -= nbytes
        contents = server.transfer.empty(num_tokens)
        weakref.finalize(contents, self._give_back, nbytes)
        return contents

    def _give_back(self, nbytes: int) -> None:
        with self._changed:
            self._left += nbytes
            self._changed.notify_all()


def _reason(status: int, answer: Any) -> str:
    """Return why a server refuses."""
    try:
        said = str(answer["error"]["message"])[:300]
    except (TypeError, KeyError):
        said = "no reason"
    return f"it responds with {status}: {said}"
