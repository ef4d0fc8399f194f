"""The page about blocks runs as it is written."""

import doctest
import pathlib
import re


def test_every_line_of_the_page_runs():
    page = pathlib.Path(__file__).parent.parent / "docs" / "blocks.md"
    parser = doctest.DocTestParser()
    text = re.sub(r"^```.*$", "", page.read_text(), flags=re.MULTILINE)
    test = parser.get_doctest(text, {}, page.name, str(page), 0)
    assert len(test.examples) > 40
    results = doctest.DocTestRunner().run(test)
    assert results.failed == 0
