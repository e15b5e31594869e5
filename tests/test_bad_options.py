"""Every command-line option is fed bad values, which follow from its type and its name: each gets one sentence and exit code 2."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import torchcmdp as tc
from torchcmdp.run.session import Session
from train.__main__ import COMMANDS, main
from train.bench import PARTS as BENCHMARKS
from train.program import bar, in_options, spelled, watch
from train.study import PARTS as COMPARISONS
from train.tune import PARTS as STUDIES

ROOT = Path(__file__).parents[1]
PARTS = {"bench": BENCHMARKS, "tune": STUDIES, "study": COMPARISONS}


def programs() -> Iterator[tuple[str, ...]]:
    """Every command, and every part of those that have parts."""
    for command in COMMANDS:
        yield from ((command, part) for part in PARTS[command]) if command in PARTS else [(command,)]


def module_of(program: tuple[str, ...]) -> Any:
    return importlib.import_module(".".join(["train", *program]))


BY_NAME: dict[str, list[list[str]]] = {
    "name": [["../x"], [".."], [""], ["a/b"]],
    "logdir": [["FILE"]],
    "device": [["cdua"], ["meta"], ["cuda:99"]],
    "seed": [["-1"], ["4294967296"], ["x"]],
    "delta": [["0"], ["1"], ["-0.1"], ["nan"], ["x"]],
    "widths": [["2", "1"], ["1", "0", "1"], ["1", "x", "1"], ["1"]],
    "constraints": [["-1"], ["x"]],
    "learners": [["wc-opps"]],
    "sizes": [["papr"]],
    "host": [["no host"]],
}


ANY_SIGN = {"curvature"}  # numbers that may be negative


def bad_values(name: str, kind: Any) -> list[list[str]]:
    """What an option of this name and type must refuse."""
    if name in BY_NAME:
        several = typing.get_origin(kind) is tuple
        return [value if several and name == "widths" else value[:1] for value in BY_NAME[name]]
    if name in ANY_SIGN:
        return [["abc"], ["nan"], ["inf"]]
    arguments = typing.get_args(kind)
    if type(None) in arguments:
        return bad_values(name, next(a for a in arguments if a is not type(None)))
    if typing.get_origin(kind) is Literal:
        return [["zzz"]]
    if typing.get_origin(kind) is tuple:
        return [[*bad] for bad in bad_values(name, arguments[0])]
    return {int: [["abc"], ["1.5"], ["-3"]], float: [["abc"], ["nan"], ["inf"], ["-0.5"]], bool: [["yes"]], str: []}[kind]


def command_cases() -> Iterator[tuple[tuple[str, ...], str, list[str]]]:
    for program in programs():
        options = module_of(program).Options
        types = typing.get_type_hints(options)
        for field in dataclasses.fields(options):
            for values in bad_values(field.name, types[field.name]):
                yield program, spelled(field.name), values
            if types[field.name] is not bool and field.name != "front":
                yield program, spelled(field.name), []
        yield program, "--nonsense", []


class Started(BaseException):
    """A program with a bad value began to work."""


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a program does when it is content with its options, it does not do it here."""

    def start(*_: Any, **__: Any) -> None:
        raise Started

    for place in (
        "torchcmdp.simulator.Simulator.rollout", "torchcmdp.nn.SafeOccupancy.forward",
            "train.paper.play_all", "train.paper.regimes.play_all",
        "train.tune.study.Work.run", "train.tune.horizons.evaluate", "train.tune.threshold.play",
        "train.bench.imports.import_times", "train.bench.fuzz.wrong", "train.bench.env.player",
       "train.bench.sizes.multiprocessing.get_context",
        "train.bench.gpu._timed",
        "train.study.compare.Work.run", "train.study.alarms.count", "tensorboard.program.TensorBoard.main",
    ):  # fmt: skip
        monkeypatch.setattr(place, start)
    monkeypatch.setattr(Session, "advance", start)
    for name in ("run", "run_split"):
        monkeypatch.setattr(tc, name, start)


@pytest.mark.parametrize(
    ("program", "option", "values"), list(command_cases()), ids=lambda x: " ".join(x) if not isinstance(x, str) else x
)
def test_a_bad_option_gets_one_sentence_and_code_2(program, option, values, tmp_path, monkeypatch, capsys, no_work) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    values = [str(file) if value == "FILE" else value for value in values]
    extra = ["--eta", "0.1", "0.2"] if program == ("sweep",) and option not in ("--eta", "--nonsense") else []
    assert main([*program, *extra, option, *values]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.strip()[-1] in ".?"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learner", "uob-reps", "--bonus-scale", "0.5"], "--bonus-scale is not a setting of uob-reps, which takes --eta"),
        (["--learner", "uob-reps", "--threshold-scale", "1.0"], "--threshold-scale is not a setting of uob-reps"),
        (["--learner", "greedy", "--radius-scale", "1.0"], "--radius-scale is not a setting of greedy"),
        (["--learner", "pdb-ps", "--bonus-scale=1"], "--bonus-scale is not a setting of pdb-ps"),
        (["--env", "FrozenLake-v1", "--actions", "3"], "--actions belongs to --env random"),
        (["--constraints", "-1"], "--constraints is -1;"),
        (["--widths", "2", "1"], "--widths "),
        (["sweep", "--eta", "0.1", "--constraints", "-1"], "--constraints is -1;"),
        (["sweep", "--eta"], "--eta got no value; expected numbers separated by spaces."),
        (["paper", "--quick", "--episodes", "10"], "--episodes is 10; the report compares how a run begins with how it ends"),
        (["completion", "--json"], "--json is for commands that print a table, and completion prints a script"),
        (["tensorboard", "--json"], "and tensorboard serves pages; leave it out."),
        (["tensorboard", "--port", "65536"], "--port is 65536; it must be a port, from 0 to 65535."),
        (["--runs", "10000000"], "--runs is 10,000,000; so many runs take about"),
        (["--runs", "10000000"], "GiB, and this device has"),
    ],
)
def test_a_sentence_is_about_the_option(arguments, words, tmp_path, capsys, no_work) -> None:
    assert main([*arguments, "--logdir", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint and complaint.count("\n") == 1 and not re.search(r"(scale|bonus|radius)_", complaint)
    assert list(tmp_path.iterdir()) == []


def test_every_setting_of_the_library_that_is_refused_is_refused_as_an_option() -> None:
    """Whatever argument a learner complains about, the command line names the option."""
    for name in ("bonus_scale", "radius_scale", "eta", "gamma", "threshold_scale", "cap_scale"):
        with pytest.raises(tc.InvalidInput) as caught:
            tc.WCOPS(tc.Layout((1, 1), 2), 1, 10, **{name: -1.0})
        assert in_options(str(caught.value), module_of(("run",)).Options).startswith(f"{spelled(name)} contains -1.0;")
    assert in_options("isolated eta is odd.", module_of(("run",)).Options) == "isolated eta is odd."


def test_progress_is_told_where_there_is_no_terminal(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("train.output.SILENCE", 0.02)
    size = ["--episodes", "60", "--runs", "2", "--widths", "1", "2", "1"]
    assert main(["--learner", "greedy", *size, "--logdir", str(tmp_path)]) == 0
    told = re.findall(r"^Greedy: (\d+) of 60, [\d:]+ gone, [\d:?]+ left$", capsys.readouterr().err, re.MULTILINE)
    assert told and [int(n) for n in told] == sorted(map(int, told))


def test_a_bar_becomes_lines_where_there_is_no_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setattr("train.output.SILENCE", 0.02)
    for _ in bar(range(20), "working"):
        time.sleep(0.01)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(re.fullmatch(r"working: \d+ of 20, [\d:]+ gone, [\d:?]+ left", line) for line in lines)
    monkeypatch.setattr("train.output.SILENCE", 10.0)
    assert list(bar(range(3), "short")) == [0, 1, 2] and capsys.readouterr().err == ""


def test_the_time_left_does_not_count_what_came_before_the_first_episode() -> None:
    shown = bar(None, "playing", total=1_000)
    shown.start_t -= 600  # ten minutes of compiling
    watch(shown, 0, lambda: 10)(10)
    assert shown.n == 10 and shown.format_dict["elapsed"] < 300
    shown.close()


def test_programs_start_when_their_options_are_good(tmp_path, monkeypatch, no_work) -> None:
    """So that the refusals above are about the values."""
    monkeypatch.chdir(tmp_path)
    for program in programs():
        if program[0] in ("doctor", "completion", "problems"):  # nothing to start
            continue
        extra = ["--eta", "0.1", "0.2"] if program == ("sweep",) else []
        if program == ("soak",):  # counts what its learners raise, but this is no Exception
            extra = ["--quick"]
        with pytest.raises(Started):
            main([*program, *extra])


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["rnu"], "run"),
        (["swep"], "sweep"),
        (["bench", "scael"], "scale"),
        (["tune", "horizon"], "horizons"),
        (["paper", "stochastic-9"], "stochastic-"),
        (["--episodez", "5"], "--episodes"),
        (["sweep", "--bonus-scal", "1"], "--bonus-scale"),
        (["soak", "--learners", "wcops"], "wc-ops"),
    ],
)
def test_a_misspelt_name_is_told_the_nearest(arguments, nearest, capsys) -> None:
    assert main(arguments) == 2
    assert f"did you mean {nearest}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("program", [p for p in programs() if hasattr(module_of(p).Options, "device")], ids=" ".join)
def test_a_missing_gpu_gets_one_sentence(program, capsys, no_work) -> None:
    assert main([*program, "--device", "cuda"]) == 2
    complaint = capsys.readouterr().err
    assert "--device cuda cannot be used here" in complaint and complaint.count("\n") == 1


def test_every_command_has_help_with_an_example_and_a_word_on_every_option(capsys) -> None:
    for program in programs():
        with pytest.raises(SystemExit) as end:
            main([*program, "--help"])
        assert end.value.code == 0
        example, out = f"python -m train {program[0]}".removesuffix(" run"), capsys.readouterr().out
        assert len(re.findall(f"^ *{example}( |$)", out, re.MULTILINE)) >= 1
        listed = " ".join(re.sub(r"[^\x20-\x7e\n]", " ", out).split()).partition("show this help message and exit")[2]
        for field in dataclasses.fields(module_of(program).Options):
            words = listed.partition(f"{spelled(field.name)} ")[2].partition("(default:")[0]
            assert len(re.findall(r"\w*[a-z]", re.sub(r"\{.*?\}", "", words))) >= 2, (program, field.name)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 TB"), OSError(28, "No space left on device", "x")],
)
def test_a_full_machine_gets_one_sentence(error, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("train.run.make_cmdp", lambda _: (_ for _ in ()).throw(error))
    assert main(["--logdir", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert ("No space left" if isinstance(error, OSError) else "not enough memory") in complaint and complaint.count("\n") == 1


def test_a_mistake_of_ours_is_not_hidden(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("train.run.make_cmdp", lambda _: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["--logdir", str(tmp_path)])


def test_a_bad_environment_variable_gets_one_sentence(tmp_path) -> None:
    command = [sys.executable, "-m", "train", "--learner", "wc-ops", "--episodes", "2", "--runs", "1", "--logdir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TORCHCMDP_THREADS": "many"}, capture_output=True, text=True)
    assert done.returncode == 2 and "TORCHCMDP_THREADS is 'many'" in done.stderr and "Traceback" not in done.stderr
