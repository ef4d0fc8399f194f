"""Run the notebooks and store what their cells print and plot.

    python examples/notebooks/execute.py [paged_attention ...]

This needs no Jupyter: cells are plain Python. Run it from the repository's root, with the extras
`examples` and `notebooks`; the cell about transformers also needs the extra `transformers`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pathlib
import sys
import types

FOLDER = pathlib.Path(__file__).parent


def stream(text: str) -> list[dict]:
    """Turn a cell's printed text into its output."""
    lines = text.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def figures() -> list[dict]:
    """Turn all open figures into outputs, and close them."""
    pyplot, outputs = sys.modules.get("matplotlib.pyplot"), []
    for number in pyplot.get_fignums() if pyplot else ():
        figure, picture = pyplot.figure(number), io.BytesIO()
        figure.savefig(picture, format="png", dpi=72, bbox_inches="tight")
        data = {
            "image/png": base64.b64encode(picture.getvalue()).decode(),
            "text/plain": ["<Figure>"],
        }
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    if pyplot:
        pyplot.close("all")
    return outputs


def execute(path: pathlib.Path) -> None:
    """Run a notebook from its first cell to its last, and store the outputs."""
    notebook, module, count = json.loads(path.read_text()), types.ModuleType(path.stem), 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), path.name, "exec"), module.__dict__)
        cell["outputs"] = [*stream(printed.getvalue()), *figures()]
        cell["execution_count"] = count
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main(names: list[str]) -> None:
    os.environ.setdefault("MPLBACKEND", "agg")
    sys.path.insert(0, str(FOLDER.parent.parent))
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            execute(path)


if __name__ == "__main__":
    main(sys.argv[1:])
