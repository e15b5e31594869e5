"""Pages made from the code: the public names, every command's options, the changelog."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torchcmdp
from train.__main__ import COMMANDS, main
from train.bench import PARTS as BENCHMARKS
from train.tune import PARTS as STUDIES

ROOT = Path(__file__).parents[2]
PARTS = {"bench": BENCHMARKS, "tune": STUDIES}


@functools.cache
def generated() -> dict[str, str]:
    """The pages by their path."""
    return {**api(), "reference/commands.md": commands(), "reference/changelog.md": (ROOT / "CHANGELOG.md").read_text()}


def groups() -> dict[str, list[str]]:
    """The names of `torchcmdp.__all__` under the comments that divide them there."""
    found: dict[str, list[str]] = {}
    for comment, names in re.findall(r"^# (.+)\n((?:__all__ \+= .+\n)+)", inspect.getsource(torchcmdp), flags=re.MULTILINE):
        found[comment] = re.findall(r'"(\w+)"', names)
    return found


def api() -> dict[str, str]:
    """A page for each group of names."""
    made = {}
    for title, names in groups().items():
        slug = re.sub(r"\W+", "-", title.lower()).strip("-")
        made[f"reference/api-{slug}.md"] = f"# API: {title[0].lower()}{title[1:]}\n\n" + "\n".join(map(_entry, names))
    return made


def _entry(name: str) -> str:
    value: Any = getattr(torchcmdp, name)
    if not isinstance(value, ModuleType):
        return f"::: torchcmdp.{name}\n"
    lines = [f"::: torchcmdp.{name}", "    options:", "      show_root_full_path: true"]
    lines += ["      show_submodules: true"] if hasattr(value, "__path__") else []
    return "\n".join(lines) + "\n"


def commands() -> str:
    """What every command does and takes, from its --help."""
    parts = [
        "# Commands\n",
        "Every command is `python -m train COMMAND`, and `torchcmdp COMMAND` after a `pip install`. Where a command prints "
        "a table, `--json` prints the same as JSON. This page is made from what `--help` prints.\n",
        "| command | what it does |\n|---|---|",
        *(f"| [`{name}`](#{name}) | {purpose} |" for name, purpose in COMMANDS.items()),
    ]
    for name in COMMANDS:
        parts.append(f"\n## {name}\n")
        for part in PARTS.get(name, ()):
            parts += [f"\n### {name} {part}\n", described([name, part])]
        if name not in PARTS:
            parts.append(described([name]))
    return "\n".join(parts) + "\n"


def described(words: list[str]) -> str:
    """The help of one command as Markdown: its text, its examples, and a table of its options."""
    told = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "400"
    try:
        with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    _, _, rest = told.getvalue().partition("\n\n")  # how it is called
    text, *boxes = re.split(r"^[\s╭─]*options[\s─╮]*$", rest, flags=re.MULTILINE)
    head, found, examples = text.partition("Examples:\n")
    block = f"```text\n{textwrap.dedent(examples).strip()}\n```" if found else ""
    return "\n\n".join([_plain(head), block, *map(_options, boxes)])


def _options(box: str) -> str:
    """The lines under the heading of the options: each option at the left, its explanation to the right of it or below."""
    rows: list[list[str]] = []
    for line in (line.strip("│ ") for line in box.splitlines()):
        if re.match(r"--?\w", line):
            flag, _, told = line.partition("  ")
            rows.append([flag, told.strip()])
        elif rows and line:
            rows[-1][1] += f" {line}"
    cells = [
        f"| `{flag.replace('|', '/')}` | {_plain(told).replace('|', '/')} |" for flag, told in rows if not flag.startswith("-h")
    ]
    return "\n".join(["| option | what it does |", "|---|---|", *cells])


def _plain(text: str) -> str:
    return text.strip().replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
