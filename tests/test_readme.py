"""The README: its Python runs, and what it points to exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from train.__main__ import COMMANDS, MAIN_JOB
from train.bench import BENCHMARKS
from train.tune import STUDIES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()

# The same program with fewer runs and episodes; every pattern must occur, so that none goes stale.
SMALLER = {r"runs=128": "runs=2", r"10_000": "20", r"log_every=100": "log_every=10", r"range\(100\)": "range(3)"}


def test_the_python_runs_as_written_but_for_its_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL))
    for pattern, replacement in SMALLER.items():
        program, count = re.subn(pattern, replacement, program)
        assert count, pattern
    names: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), names)
    result = names["result"]
    assert result.regret.shape == result.violation.shape == result.positive_violation.shape == (2, 2)  # type: ignore[attr-defined]
    assert torch.isfinite(result.regret).all()  # type: ignore[attr-defined]
    assert (tmp_path / "runs" / "first" / "checkpoint.pt").exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https:)([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^    make (\w+)", TEXT, flags=re.MULTILINE):
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), name


COMMAND_LINES = re.findall(r"python -m train((?: [^\s`#,;)]+)*)", TEXT)


@pytest.mark.parametrize("line", sorted(set(COMMAND_LINES)))
def test_command_lines_name_commands_and_options_that_exist(line):
    words = line.split()
    name = words[0] if words and re.fullmatch(r"[a-z]+", words[0]) else MAIN_JOB
    assert name in COMMANDS, line
    command, parts = COMMANDS[name], {"bench": BENCHMARKS, "tune": STUDIES}.get(name, {})
    if parts and len(words) > 1 and not words[1].startswith("-"):
        assert words[1] in parts, line
        command = parts[words[1]]
    module = importlib.import_module(parts["study"].module if name == "tune" and command not in parts.values() else command.module)
    for option in re.findall(r"--([a-z-]+)", line):
        assert option == "help" or option.replace("-", "_") in module.Options.__dataclass_fields__, option
