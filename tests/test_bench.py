"""The benchmarks run, say what they measured, and refuse nonsense in one sentence."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from train.__main__ import main
from train.bench import fuzz
from train.bench.scale import Growth


def test_projection_benchmark_writes_what_it_prints(tmp_path, capsys):
    arguments = ["bench", "projection", "--sizes", "small", "--batches", "2", "--seconds", "0.01", "--logdir", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "bench" / "projection.md").read_text().strip() in printed
    rows = list(csv.DictReader(open(tmp_path / "bench" / "projection.csv")))
    assert [(row["size"], row["batch"], row["mode"]) for row in rows] == [
        ("small", "2", "forward"),
        ("small", "2", "forward+backward"),
    ]
    assert all(float(row[name]) > 0 for row in rows for name in ("compiled", "torch", "Moreau", "DIFFCP"))
    assert "not measured" in printed  # the aims are about another size


def test_episode_benchmark_times_both_engines(tmp_path, capsys):
    arguments = ["bench", "episode", "--batches", "2", "--episodes", "2", "--seconds", "0.01", "--cvxpy-episodes", "1"]
    assert main([*arguments, "--logdir", str(tmp_path)]) == 0
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[4].strip("|").split("|")]
    assert row[0] == "2" and row[3].endswith("x") and row[4] == "-"
    compiled, slow, ratio, through = (float(row[j].replace(",", "").rstrip("x")) for j in (1, 2, 3, 5))
    assert min(compiled, slow, through) > 0 and abs(ratio - compiled / slow) < 0.1 + 0.01 * ratio


def test_program_benchmark_agrees_with_highs(tmp_path, capsys):
    arguments = ["bench", "program", "--batches", "2", "--constraints", "2", "--episodes", "20", "--repeats", "1"]
    assert main([*arguments, "--highs-instances", "2", "--logdir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "bench" / "program.md").read_text().strip() in printed
    row = [cell.strip() for cell in printed.splitlines()[2].strip("|").split("|")]
    assert row[:2] == ["2", "2"] and row[4].endswith("x") and float(row[-1]) < 1e-7


def test_scale_benchmark_covers_every_direction(tmp_path, capsys):
    arguments = ["bench", "scale", "--batches", "4", "1", "2", "--widths", "1", "2", "3", "--layers", "1", "2", "3"]
    assert main([*arguments, "--runs", "2", "--episodes", "2", "--repeats", "2", "--logdir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "bench" / "scale.md").read_text().strip() in printed
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line.startswith("| ")]
    sizes = [(row[0], row[1], row[2]) for row in rows if len(row) == 5][1:]
    directions = ("runs in a batch", "states in a layer", "layers of states")
    assert sizes == [(directions[0], size, size) for size in "124"] + [
        (what, size, "2") for what in directions[1:] for size in "123"
    ]
    assert [row[0] for row in rows if len(row) == 2][1:] == list(directions)
    assert all("+-" in row[1] for row in rows if len(row) == 2 and row[0] in directions)
    assert (tmp_path / "bench" / "scale.png").stat().st_size > 10_000


def test_the_fitted_growth_is_that_of_the_cost():
    sizes = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    seconds = torch.stack([0.5 * sizes**1.7, 2 * sizes**1.7])
    seconds[:, :2] = 9.0  # the smaller half is not fitted
    growth = Growth(sizes, torch.full((5,), 64.0, dtype=torch.float64), seconds)
    assert growth.exponent[0] == pytest.approx(1.7)
    assert growth.speed[-1].item() == pytest.approx(64 / (0.5 * 16**1.7))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["projetion"], "did you mean projection?"),
        (["projection", "--sizes", "huge"], "'huge' is not one of --sizes; there is small, paper, large."),
        (["projection", "--batches", "0"], "--batches is 0"),
        (["program", "--constraints", "0"], "--constraints is 0"),
        (["episode", "--episodes", "-3"], "--episodes is -3"),
        (["episode", "--name", "../x"], "one plain folder name"),
        (["scale", "--widths", "4", "8"], "--widths has fewer than three sizes"),
        (["scale", "--layers", "0", "2"], "--layers is 0"),
    ],
)
def test_wrong_arguments_get_a_sentence(arguments, sentence, capsys):
    assert main(["bench", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint and complaint.count("\n") == 1


def test_help_lists_the_benchmarks(capsys):
    assert main(["bench"]) == 0
    printed = capsys.readouterr().out
    assert "projection" in printed and "episode" in printed


def test_imports_benchmark_compares_with_torch_and_names_our_modules(tmp_path, capsys):
    assert main(["bench", "imports", "--repeats", "1", "--logdir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "bench" / "imports.md").read_text().strip() in printed
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line.startswith("| t")]
    assert [row[0] for row in rows[:2]] == ["torch", "torchcmdp"] and rows[0][2] == "1.00"
    assert len(rows) == 12


def test_fuzz_counts_what_goes_wrong(monkeypatch, capsys):
    assert main(["bench", "fuzz", "--instances", "50", "--first", "7"]) == 0
    assert "60 instances, 0 wrong" in capsys.readouterr().out
    assert main(["bench", "fuzz", "--instances", "20", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert {"what": "instances", "count": 20.0} in table["rows"] and {"what": "wrong", "count": 0.0} in table["rows"]
    monkeypatch.setattr(fuzz, "units", lambda costs: 1e-30)
    assert main(["bench", "fuzz", "--instances", "400"]) == 1
    assert "of 20 wrong" in capsys.readouterr().out
    assert main(["bench", "fuzz", "--backend", "fortran"]) == 2
