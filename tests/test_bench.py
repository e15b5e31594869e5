"""The benchmarks run, say what they measured, and refuse nonsense in one sentence."""

from __future__ import annotations

import csv
import importlib.util
import json

import numpy as np
import pytest
import torch

from torchcmdp.kernels import cuda
from train.__main__ import main
from train.bench import counts, fuzz, gpu
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


@pytest.mark.parametrize(
    ("arguments", "installed", "sentence"),
    [
        ([], True, "there is no GPU here that PyTorch and numba-cuda find, so that nothing can be timed; --static needs none."),
        ([], False, 'numba-cuda is not installed, without which no kernel becomes code for a GPU: pip install "torchcmdp[cuda]".'),
        (["--static"], False, "numba-cuda is not installed"),
        (["--kernels", "pul"], True, "'pul' is not one of --kernels; did you mean pull?"),
    ],
)
def test_without_a_gpu_or_its_compiler_the_gpu_benchmark_says_so(arguments, installed, sentence, monkeypatch, tmp_path, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: installed or None if name == "numba_cuda" else real(name))
    monkeypatch.setattr(cuda, "usable", lambda: False)
    assert main(["bench", "gpu", *arguments, "--logdir", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


REPORT = """ptxas info    : Compiling entry function 'grid' for 'sm_80'
ptxas info    : Function properties for grid
    848 bytes stack frame, 460 bytes spill stores, 488 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 1848 bytes cumulative stack size, 64 bytes smem, 11984 bytes cmem[0]
ptxas info    : Function properties for solve
    0 bytes stack frame, 120 bytes spill stores, 224 bytes spill loads
"""
PTX = """.version 6.4
.target sm_75
.address_size 64
.visible .entry twice(.param .u64 where) {
    .reg .f64 %f<3>;
    .reg .b64 %r<3>;
    .reg .pred %p<2>;
    ld.param.u64 %r1, [where];
    ld.global.f64 %f1, [%r1];
    setp.gt.f64 %p1, %f1, 0d0000000000000000;
    @!%p1 div.rn.f64 %f1, %f1, %f1;
    add.rn.f64 %f2, %f1, %f1;
    st.global.f64 [%r1], %f2;
    ret;
}
"""


def test_what_ptxas_says_is_added_up_over_the_functions_of_a_kernel():
    assert gpu.told(REPORT, 16) == gpu.Code(255, 1848, 580, 712, 64, 11984, 16)


def test_the_kinds_of_instructions_are_counted():
    assert list(gpu.mixture(PTX).values()) == [1, 1, 2, 1, 0, 2]


def test_ptx_becomes_machine_code_where_ptxas_is_at_hand():
    if not any(gpu.assemblers()):
        pytest.skip("ptxas is not at hand")
    notes: set[str] = set()
    found = gpu.assembled(PTX, 75, notes)
    assert not notes and found.registers >= 4 and found.size >= 16 and found.shared == found.spill_loads == 0
    assert gpu.assembled(PTX.replace(".version 6.4", ".version 99.0"), 75, notes) is None
    assert ["Unsupported .version 99.0" in note for note in notes] == [True]


def test_loads_and_stores_are_counted_apart_for_what_all_threads_share():
    geometry = cuda.geometry_of(cuda.Layout((1, 2, 1), 2))
    shared, (own,), number = counts.watched((geometry, (torch.zeros(3, 2),), 7))
    counts.counted.clear()
    own[1, 0] += shared.row[2] + own[:, 1][2]
    assert dict(counts.counted) == {"own loads": 2, "own stores": 1, "shared loads": 1} and number == 7
    assert np.asarray(own)[1, 0] == geometry.row[2]


def test_kernels_become_ptx_without_a_gpu(tmp_path, capsys):
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    arguments = ["--static", "--kernels", "pull", "--architectures", "80", "--instances", "0", "--widths", "1", "2", "1"]
    assert main(["bench", "gpu", *arguments, "--logdir", str(tmp_path), "--json"]) == 0
    tables = {table["title"]: table["rows"] for table in json.loads(capsys.readouterr().out)["tables"]}
    assert tables["PTX"][0]["arithmetic"] > 100 and tables["PTX"][0]["memory"] > 100
    assert list(tables["machine code"][0])[:3] == ["kernel", "GPU", "registers"]
