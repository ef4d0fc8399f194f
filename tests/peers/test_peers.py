"""Every suite of the peers passes with jattn instead of its kernel."""

from __future__ import annotations

import pathlib
import tempfile

import pytest

from tests.peers import fetch, run
from tests.peers.suites import SUITES

pytestmark = pytest.mark.peers
CACHE = pathlib.Path(tempfile.gettempdir()) / "jattn-peers"


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_passes(name):
    suite = SUITES[name]
    try:
        folder = fetch.sources(suite, CACHE)
    except fetch.NotFetchedError as error:
        pytest.skip(f"{name}: {error}")
    report = run.run(suite, folder)
    assert report.failed == 0, report.log[-4000:]
    assert report.passed >= suite.at_least, report.skipped
