"""Tutorials are notebooks in Markdown: run them, and put what their cells print and draw under the cells."""

from __future__ import annotations

import hashlib
import html
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
CELL_SECONDS = 300


def execute(text: str) -> Any:
    """Run a notebook written in Markdown, in a folder of its own; raises what a cell raises.

    Args:
        text: Markdown with its cells as blocks of Python.

    Returns:
        The notebook, with outputs.
    """
    notebook = jupytext.reads(text, fmt="md")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), before])
    )  # the cells import this tree, not an installed one
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = {"metadata": {"path": folder}}
            # that the kernel talks over TCP, on this machine, is no news to whoever builds the pages
            NotebookClient(notebook, timeout=CELL_SECONDS, resources=place, extra_arguments=["--log-level=40"]).execute()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return notebook


def with_outputs(text: str, cache: Path) -> str:
    """The Markdown of a tutorial with the outputs of its cells.

    Args:
        text: Of the tutorial.
        cache: Folder of executed notebooks: one whose text has not changed is not run again.
    """
    place = cache / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.ipynb"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        nbformat.write(execute(text), place)
    cells = iter([cell for cell in nbformat.read(place, as_version=4).cells if cell.cell_type == "code"])
    return re.sub(
        r"^```python\n.*?^```$", lambda match: match[0] + shown(next(cells).outputs), text, flags=re.DOTALL | re.MULTILINE
    )


def shown(outputs: list[Any]) -> str:
    """Outputs of a cell as HTML inside Markdown: pictures, and text as it was printed."""
    parts = []
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            parts.append(
                f'<img class="output" alt="Drawn by the cell above" src="data:image/png;base64,{data["image/png"].strip()}">'
            )
        elif output.output_type == "stream" and output.name == "stdout":
            parts.append(_pre(output.text))
        elif "text/plain" in data:
            parts.append(_pre(data["text/plain"]))
    return "".join(f"\n\n{part}" for part in parts)


def _pre(text: str) -> str:
    lines = html.escape(text.strip("\n")).replace("\n", "&#10;")  # one line: a blank one would end the block of HTML
    return f'<pre class="output"><code>{lines}</code></pre>'
