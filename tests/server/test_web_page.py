"""The page at `/`, in a headless browser."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse

import pytest

from tests.support import extras

httpx = extras.serve("jinja2")

from examples.engine.http.chat import ChatTemplate
from tests.support.serving import MAX_LEN, serving, shared_engine

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def url():
    template = ChatTemplate({"default": "{{ messages[0].content }}:"})
    with serving(shared_engine(), template=template) as address:
        yield address


@pytest.mark.extended
def test_the_page_needs_nothing_from_elsewhere(url):
    answer = httpx.get(url)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=|https?://", answer.text)
    paths = re.findall(r'"(/[\w/]+)"', answer.text)
    assert "/v1/models" in paths
    for path in paths:
        assert httpx.get(f"{url}{path}").status_code in (200, 405)  # it exists


class Browser:
    """Chromium, driven by its DevTools protocol over two pipes."""

    def __init__(self, folder):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
        ]
        command += [f"--user-data-dir={folder}", "--window-size=900,800", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', *command],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._ids, self._held, self._session = itertools.count(1), b"", {}
        page = self._ask("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in page if one["type"] == "page")
        found = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}

    def _ask(self, method: str, **parameters) -> dict:
        """Call a method, and wait for its response among the events."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                data = os.read(self._read, 1 << 16)
                assert data, "the browser has ended"
                self._held += data
            line, _, self._held = self._held.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, expression: str):
        """Return the value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, id: str) -> str:
        """Return the text of an element."""
        return self.run(f"document.getElementById('{id}').textContent")

    def show(self, address: str, **query: str) -> None:
        """Open a page, and wait until it has sent what the query asks for."""
        self._ask("Page.navigate", url=f"{address}/?{urllib.parse.urlencode(query)}")
        self.wait("document.readyState == 'complete' && !document.getElementById('send').disabled")
        self.wait("document.getElementById('model').textContent != '…'")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + 60
        while not self.run(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)

    def screenshot(self) -> bytes:
        """Return the page as a PNG."""
        return base64.b64decode(self._ask("Page.captureScreenshot")["data"])

    def close(self) -> None:
        """Close the browser."""
        os.close(self._write)
        self._process.terminate()
        self._process.wait(60)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if BROWSER is None:
        pytest.skip("needs chromium")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.mark.extended
def test_a_prompt_and_a_message_are_answered(url, browser):
    text = "it <b>is</b> & was"
    browser.show(url, send=text)
    assert browser.text("model") == "tiny"
    assert re.fullmatch(r"200 tokens in [\d.]+ s, [\d.]+ per second", browser.text("status"))
    assert browser.text("output").startswith(text)
    body = {"prompt": text, "max_tokens": 200, "temperature": 0}
    browser.run("form.elements.temperature.value = '0', form.requestSubmit()")
    browser.wait("document.getElementById('send').disabled == false")
    whole = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
    assert browser.text("output") == text + whole
    assert browser.screenshot().startswith(b"\x89PNG")
    browser.show(url, send="hello", chat="")
    assert browser.text("status").startswith("200 tokens")
    assert not browser.text("output").startswith("hello")


@pytest.mark.extended
def test_errors_are_shown_and_a_text_can_be_stopped(url, browser):
    browser.show(url, send="x" * MAX_LEN)
    assert f"together they must be at most {MAX_LEN}" in browser.text("status")
    color = "getComputedStyle(document.getElementById('status')).color"
    assert browser.run(color) == "rgb(192, 57, 43)"
    browser.run("form.elements.prompt.value = 'x', form.requestSubmit()")
    browser.run("document.getElementById('stop').click()")
    browser.wait("document.getElementById('send').disabled == false")
    assert browser.text("status") == "stopped"
