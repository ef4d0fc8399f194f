"""The page about serving runs as it is written."""

import pathlib
import re


def test_every_block_of_the_page_runs():
    """One after another, in one namespace, as a reader would paste them."""
    page = pathlib.Path(__file__).parent.parent / "docs" / "serving.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    assert len(blocks) == 10
    namespace = {"__name__": "serving"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), namespace)
