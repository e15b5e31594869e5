"""The README: short, and its Python runs. Its links and commands are held with those of the pages, in test_docs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

TEXT = (Path(__file__).parents[1] / "README.md").read_text()

# The same program with fewer runs and episodes; every pattern must occur, so that none goes stale.
SMALLER = {r"runs=128": "runs=2", r"10_000": "20", r"log_every=100": "log_every=10", r"range\(100\)": "range(3)"}


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150


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
