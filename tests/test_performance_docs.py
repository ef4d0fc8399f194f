"""The figures in README and docs are those of the committed result files."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from benchmarks.cpu import format_speed, report, tables, workloads

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("page", "table"),
    [("README.md", tables.mean_table), ("docs/performance-cpu.md", tables.full_table)],
)
def test_tables_are_made_from_the_results(page, table):
    rows = tables.read_rows(tables.FILES)
    text = (ROOT / page).read_text()
    found = re.search(r"<!-- cpu table -->\n(.*?)\n<!-- /cpu table -->", text, re.S)
    assert found, f"{page} has no table between its markers"
    assert found.group(1) == table(rows)
    mean = report.geometric_mean(row["ratio"] for row in rows)
    assert f"Geometric mean of all {len(rows)}: {mean:.2f}" in text


@pytest.mark.parametrize(
    ("name", "table", "file"),
    [
        ("formats", tables.format_table, tables.FORMAT_FILE),
        ("masks", tables.mask_table, tables.MASK_FILE),
    ],
)
def test_what_formats_and_masks_cost_is_made_from_the_results(name, table, file):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    found = re.search(r"<!-- cost table -->\n(.*?)\n<!-- /cost table -->", text, re.S)
    assert found, f"docs/{name}.md has no table between its markers"
    assert found.group(1) == table(tables.read_lines(file))


def test_the_results_are_of_the_whole_suite():
    rows = tables.read_rows(tables.FILES)
    assert {row["name"] for row in rows} == {w.name for w in workloads.suite()}
    assert all(row["ratio"] == row["peer_median_ms"] / row["median_ms"] for row in rows)


def test_a_later_file_replaces_rows_and_uncompared_rows_do_not_count(tmp_path):
    def row(name, ratio):
        compared = {} if ratio is None else {"ratio": ratio}
        return json.dumps({"kind": "row", "name": name, **compared})

    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("\n".join([json.dumps({"kind": "run"}), row("a", 1.0), row("b", 2.0)]))
    second.write_text("\n".join([row("b", 3.0), row("c", None)]))
    found = {r["name"]: r["ratio"] for r in tables.read_rows([first, second])}
    assert found == {"a": 1.0, "b": 3.0}


@pytest.mark.parametrize("jax", ["0.10", "0.12"])
def test_the_tables_of_formats_are_made_from_the_results(jax):
    results = (tables.RESULTS / f"2026-11-21-formats-cpu-jax{jax}.jsonl").read_text()
    records = [json.loads(line) for line in results.splitlines()]
    rows = [record for record in records if record.pop("kind") == "row"]
    assert rows
    found = "\n".join([format_speed.HEADER, *(str(format_speed.Row(**row)) for row in rows)])
    assert found in (ROOT / "docs" / "formats.md").read_text()
