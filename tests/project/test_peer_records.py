"""The counts of peers' tests in docs/peer-tests.md come from committed runs."""

from __future__ import annotations

import dataclasses

import pytest

from tests.peers import records, run
from tests.peers.suites import SUITES, Checkout


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_has_a_record_of_a_run_that_passed(name):
    suite, found = SUITES[name], records.read()[name]
    assert found.failed == 0
    assert found.every <= suite.every, "the record is of a smaller sample than usual"
    assert found.passed >= suite.at_least
    assert found.files == suite.files
    assert (found.torch is not None) == ("torch" in suite.needs)
    if not isinstance(suite.source, Checkout):
        assert found.version == suite.source.version, "the record is of another version"


def test_a_record_replaces_that_of_its_suite(tmp_path):
    """The other lines stay, in the order of the suites."""
    file, names = tmp_path / "records.jsonl", [*SUITES][2:5]
    for name in (names[1], names[2], names[0]):
        report = run.Report(passed=7, failed=0, skipped={"not here": 2}, log="")
        records.write(records.record(SUITES[name], tmp_path, report), file)
    first = records.read(file)
    assert [*first] == names
    records.write(dataclasses.replace(first[names[1]], passed=8), file)
    second = records.read(file)
    assert second[names[1]].passed == 8
    assert second == {**first, names[1]: second[names[1]]}
