"""`python ci/notebook.py` writes `docs/generated/five_minutes.md`: the notebook, with what its cells print and show.

With `--run` its cells are run first, as Jupyter runs them, and the notebook keeps what they give; with `--run
OTHER.ipynb` that one is written, and nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "five_minutes.ipynb"
PAGE = ROOT / "docs" / "generated" / "five_minutes.md"


def main(arguments: list[str]) -> None:
    """Run the notebook, if that is asked for, and write it, or the page."""
    if arguments[:1] == ["--run"]:
        sys.path.insert(0, str(ROOT))
        target = Path(*arguments[1:]).resolve() if arguments[1:] else NOTEBOOK
        notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # cells write files
            run(notebook)
            os.chdir(ROOT)
        target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if len(arguments) < 2:
        PAGE.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the page."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    title, *parts = [part for cell in cells for part in _parts(cell)]
    said = "Written by `python ci/notebook.py --run` from `examples/five_minutes.ipynb`, which Jupyter opens."
    return "\n\n".join([title, said, *parts]) + "\n"


def run(notebook: Any) -> None:
    """Run the cells, one after the other in this process, and keep in each what it gives."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["execution_count"] = number
        cell["outputs"] = list(_outputs("".join(cell["source"]), names, number))


def _outputs(source: str, names: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Run a cell, and yield what it prints, then what its last line is worth."""
    filename = f"cell_{number}"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename  # AutoGraph reads it
    tree = ast.parse(source, filename)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, filename, "exec"), names)
        value = eval(compile(ast.Expression(last.value), filename, "eval"), names) if last else None
    if printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": printed.getvalue()}
    if value is not None:
        data = {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else {"text/plain": repr(value)}
        yield {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}


def _parts(cell: Any) -> Iterator[str]:
    """Yield a cell as Markdown."""
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        yield from source.split("\n\n", 1)
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output.get("data", {"text/plain": output.get("text", "")})
        if "text/html" in shown:
            yield f"<div>{''.join(shown['text/html']).strip()}</div>"
        else:
            yield f"```text\n{''.join(shown['text/plain']).rstrip()}\n```"


if __name__ == "__main__":
    main(sys.argv[1:])
