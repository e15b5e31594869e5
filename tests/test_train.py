"""The command line: what it writes and prints, one sentence for every mistake, and Ctrl-C."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from hedge import read

import torchcmdp as tc
from torchcmdp.learners import LEARNERS
from torchcmdp.planning import slater_gap
from train.__main__ import COMMANDS, main
from train.program import settings_of
from train.run import COMPARED, PRACTICAL, Options, build, label_of, make_cmdp, players
from train.verdict import ranking, sentences

ROOT = Path(__file__).parents[1]
SMALL = ["--episodes", "30", "--runs", "2", "--widths", "1", "2", "1", "--actions", "2", "--constraints", "1"]


def built(**options):
    """The learner and the simulator of two runs."""
    chosen = Options(**options)
    return build(chosen, chosen.learner or "wc-ops", *make_cmdp(chosen), 2)


def small(logdir, *more: str) -> list[str]:
    """The arguments of a small job of one learner."""
    return ["--learner", "wc-ops", *SMALL, "--logdir", str(logdir), *more]


PICTURES = {f"{name}.{kind}" for name in ("curves", "growth", "balance") for kind in ("png", "pdf")}


def written(folder: Path) -> set[str]:
    """The files of an experiment, but for those of TensorBoard."""
    return {file.name for file in folder.iterdir() if not file.name.startswith("events.")}


def test_the_main_job_compares_learners_on_the_same_instance_and_seeds(tmp_path, capsys):
    """One table, three pictures, two sentences, one TensorBoard experiment; then the same again without playing."""
    arguments = [*SMALL, "--logdir", str(tmp_path)]
    assert main(arguments) == 0
    folder, out = tmp_path / "main", capsys.readouterr().out
    assert written(folder) == {*PICTURES, "summary.md", *COMPARED}
    configs = [json.loads((folder / name / "config.json").read_text()) for name in COMPARED]
    assert all(config["env"] == configs[0]["env"] and config["episodes"] == 30 for config in configs)
    assert configs[0]["learner"]["radius_scale"] == 1 != configs[1]["learner"]["radius_scale"]  # the paper's, and the practical
    results = {label_of(name): tc.load(folder / name) for name in COMPARED}
    report = (folder / "summary.md").read_text()
    assert ranking(results) in report and all(sentence in report for sentence in sentences(results))
    assert "**" in report and "**" not in out and "\033" not in out  # bold where it can be
    for column in ("regret", "violation", "positive violation", "unsafe episodes"):
        assert column in out
    assert main(arguments) == 0 and capsys.readouterr().out == out


def test_s_ops_is_given_the_declared_baseline_and_sits_out_where_there_is_none(tmp_path, capsys):
    assert COMPARED[-1] == "s-ops" and label_of("s-ops") == "S-OPS with a baseline"
    chosen = Options(baseline_share=0.25)
    cmdp, imported = make_cmdp(chosen)
    learner, env = build(chosen, "s-ops", cmdp, imported, 2)
    rule = tc.baseline(cmdp, margin=0.25 * slater_gap(cmdp))
    assert torch.allclose(learner.baseline_policy, rule.policy.expand(2, -1, -1, -1)) and learner.streams.seed == env.seed
    assert main([*SMALL, "--baseline-share", "0.25", "--logdir", str(tmp_path)]) == 0
    assert "S-OPS's baseline is the best policy that is safe by 0.25 of that." in capsys.readouterr().out
    tight = tc.random_cmdp((1, 2, 1), 2, 1, 0, feasibility="tight")
    assert players(chosen, cmdp) == COMPARED and players(chosen, tight) == COMPARED[:-1]


def test_a_learner_is_added_to_an_experiment_that_was_finished_without_it(tmp_path, capsys, monkeypatch):
    """As by those who update: what the others played stays."""
    monkeypatch.setattr("train.run.COMPARED", COMPARED[:-1])
    assert main([*SMALL, "--logdir", str(tmp_path)]) == 0
    stamp = (tmp_path / "main" / "wc-ops" / "checkpoint.pt").stat().st_mtime_ns
    monkeypatch.undo()
    assert main([*SMALL, "--logdir", str(tmp_path), "--resume"]) == 0 and "S-OPS with a baseline" in capsys.readouterr().out
    assert (tmp_path / "main" / "wc-ops" / "checkpoint.pt").stat().st_mtime_ns == stamp


def test_tensorboard_has_pictures_once_and_the_table_in_words(tmp_path, capsys):
    assert main([*SMALL, "--logdir", str(tmp_path)]) == 0
    for _ in range(2):  # also of a job that was repeated
        events = read(tmp_path / "main")
        assert set(events.Tags()["images"]) == {"Figures/curves", "Figures/growth", "Figures/balance"}
        assert all(len(events.Images(tag)) == 1 for tag in events.Tags()["images"])
        words = events.Tensors("About this experiment/text_summary")[0].tensor_proto.string_val[0].decode()
        assert words.startswith((tmp_path / "main" / "summary.md").read_text().strip()) and "| episodes | `30` |" in words
        assert all(read(tmp_path / "main" / name).Tags()["images"] == [] for name in COMPARED)
        main([*SMALL, "--logdir", str(tmp_path)])


def test_json_is_all_that_is_printed(tmp_path, capsys):
    assert main([*SMALL, "--logdir", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    (table,) = json.loads(captured.out)["tables"]
    result = tc.load(tmp_path / "main" / "wc-ops")
    assert table["columns"] == ["learner", "regret", "violation", "positive violation", "unsafe episodes"]
    assert [row["learner"] for row in table["rows"]] == [label_of(name) for name in COMPARED]
    row = table["rows"][0]
    assert row["regret"]["mean"] == pytest.approx(float(result.regret[:, -1].mean()), abs=0.06) and row["regret"]["ci95"] >= 0
    assert row["unsafe episodes"]["mean"] == pytest.approx(float(result.unsafe_share[:, -1].mean()), abs=6e-4)
    assert "Pictures" in captured.err
    main([*SMALL, "--logdir", str(tmp_path)])
    assert capsys.readouterr().out.startswith("| learner")  # the next command prints as ever


def test_json_of_one_learner(tmp_path, capsys):
    assert main([*SMALL, "--learner", "greedy", "--logdir", str(tmp_path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    values = {row["what"]: row["value"] for row in table["rows"]}
    assert {"mean", "ci95"} == set(values["regret"]) and "positive violation" in values


def test_one_learner_writes_its_files_and_prints_its_table(tmp_path, capsys):
    assert main(small(tmp_path, "--name", "first")) == 0
    folder = tmp_path / "first"
    assert written(folder) == {*PICTURES, "summary.txt", "wc-ops"}
    assert {"config.json", "metrics.csv", "checkpoint.pt"} < {file.name for file in (folder / "wc-ops").iterdir()}
    out = capsys.readouterr().out
    for words in (
        "regret",
        "violation",
        "positive violation",
        "unsafe episodes",
        "+-",
        "safe optimum",
        "elastic",
        "python -m train tensorboard --logdir",
    ):
        assert words in out
    assert (folder / "summary.txt").read_text().strip() in out


def test_a_second_call_repeats_the_summary_without_playing(tmp_path, capsys):
    main(small(tmp_path))
    first = capsys.readouterr().out
    checkpoint = tmp_path / "alone" / "wc-ops" / "checkpoint.pt"
    stamp = checkpoint.stat().st_mtime_ns
    assert main(small(tmp_path)) == 0
    assert capsys.readouterr().out == first and checkpoint.stat().st_mtime_ns == stamp


def test_other_settings_need_fresh_or_another_name(tmp_path, capsys):
    main(small(tmp_path))
    capsys.readouterr()
    assert main(small(tmp_path, "--eta", "0.5")) == 2
    assert "learner.eta" in one_sentence(capsys)
    assert main(small(tmp_path, "--eta", "0.5", "--name", "other")) == 0
    assert main(small(tmp_path, "--eta", "0.5", "--fresh")) == 0


def test_a_checkpoint_whose_content_was_changed_is_refused_and_stays(tmp_path, capsys):
    main(small(tmp_path))
    capsys.readouterr()
    path = tmp_path / "alone" / "wc-ops" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["tracker"]["sums"] += 1
    torch.save(state, path)
    before = path.read_bytes()
    assert main(small(tmp_path)) == 2
    assert "the checksum differs" in one_sentence(capsys) and path.read_bytes() == before


def test_resume_needs_something_to_resume(tmp_path, capsys):
    assert main(small(tmp_path, "--resume")) == 2
    assert "no checkpoint" in one_sentence(capsys)
    main(small(tmp_path))
    assert main(small(tmp_path, "--resume")) == 0


def test_options_reach_the_learner(tmp_path):
    options = "--eta 0.3 --gamma 0.2 --bonus-scale 0.5 --radius-scale 0.4 --threshold-scale 0.1 --cap-scale 2"
    options += " --confidence bernstein --delta 0.05 --seed 3 --dtype float32 --log-every 7"
    assert main(small(tmp_path, *options.split())) == 0
    config = json.loads((tmp_path / "alone" / "wc-ops" / "config.json").read_text())
    learner = config["learner"]
    found = [learner[name] for name in ("eta", "gamma", "bonus_scale", "radius_scale", "threshold_scale", "cap_scale", "delta")]
    assert found == pytest.approx([0.3, 0.2, 0.5, 0.4, 0.1, 2, 0.05])
    assert (learner["confidence"], learner["dtype"], learner["runs"], learner["horizon"]) == ("bernstein", "float32", 2, 30)
    assert (config["env"]["seed"], config["env"]["widths"], config["log_every"]) == (3, [1, 2, 1], 7)


LAKE = ["--env", "FrozenLake-v1", "--steps", "4", "--episodes", "3", "--runs", "2"]


@pytest.mark.parametrize("learner", [*LEARNERS, PRACTICAL])
def test_every_learner_plays_every_environment(learner, tmp_path, capsys):
    for env, steps in (("CliffWalking-v1", 4), ("random", None)):
        player, simulator = built(env=env, steps=steps, learner=learner)
        for _ in range(2):
            player.update(simulator.rollout(player.policy))
    assert main([*LAKE, "--learner", learner, "--logdir", str(tmp_path)]) == 0
    assert (tmp_path / "FrozenLake-v1-alone" / learner / "checkpoint.pt").exists()
    out = capsys.readouterr().out
    assert ("elastic" in out) == (
        learner in ("wc-ops", "uob-reps", "s-ops", "ma-ops", PRACTICAL)
    ) and "its return in the environment" in out


def test_the_environment_and_its_budget_reach_the_cmdp():
    from torchcmdp.adapters.tabular import fell_in_a_hole, from_gymnasium

    _, env = built(env="FrozenLake-v1", steps=6, budget=0.2)
    expected = from_gymnasium("FrozenLake-v1", 6, fell_in_a_hole, 0.2).cmdp
    assert torch.equal(env.cmdp.costs, expected.costs) and torch.equal(env.cmdp.transitions, expected.transitions)


def test_settings_reach_the_learners_that_have_them():
    names, _ = get_args(get_type_hints(Options)["learner"])
    assert list(get_args(names)) == [*LEARNERS, PRACTICAL]
    learner, env = built(learner="opt-cmdp", bonus_scale=0.5)
    assert learner.bonus_scale.tolist() == [0.5, 0.5] and learner.radius_scale.tolist() == [1.0, 1.0]
    primal_dual, env = built(learner="opt-primal-dual")
    assert primal_dual.slater_gap.tolist() == pytest.approx([float(slater_gap(env.cmdp))] * 2)
    assert {"eta", "solver", "radius_scale"} < settings_of("uob-reps") and "eta" not in settings_of("greedy")
    assert not {"bonus_scale", "threshold_scale", "cap_scale"} & settings_of("uob-reps")


def one_sentence(capsys) -> str:
    """What was written to stderr, which must be one line and no traceback, and nothing on stdout."""
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("WC-OPS, ")]
    assert captured.out == "" and len(lines) == 1 and lines[0][-1] in ".?"
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--episodez", "3"], "--episodez is not an option of python -m train; did you mean --episodes?"),
        (["--bogus"], "--bogus is not an option of python -m train; see python -m train --help."),
        (["--episodes", "abc"], "--episodes got 'abc'; expected a whole number."),
        (["--episodes"], "--episodes got no value; expected a whole number."),
        (["--eta", "x"], "--eta got 'x'; expected a number."),
        (["--widths", "1", "a", "1"], "--widths got '1 a 1'; expected whole numbers separated by spaces."),
        (["--episodes", "-5"], "--episodes is -5; it must be greater than zero."),
        (["--runs", "0"], "--runs is 0; it must be greater than zero."),
        (["--eta", "nan"], "--eta is nan; it must be a finite number."),
        (["--solver", "foo"], "--solver got 'foo'; expected one of newton, cvxpy."),
        (["--device", "cdua"], "--device cdua cannot be used here"),
        (["--device", "meta"], "--device meta holds no numbers"),
        (["--name", "../x"], "--name '../x' must be one plain folder name"),
        (["--name", ".."], "--name '..' must be one plain folder name"),
        (["--name", ""], "--name '' must be one plain folder name"),
        (["--widths", "2", "3", "1"], "must start and end with 1"),
        (["--delta", "2"], "delta is 2.0"),
        (["--resume", "--fresh"], "contradict"),
        (["--steps", "5"], "--steps belongs to a Gymnasium environment, such as --env FrozenLake-v1, and --env is random."),
        (["--env", "FrozenLake-v1", "--actions", "2"], "--actions belongs to --env random, and --env is FrozenLake-v1."),
        (["--env", "FrozenLake-v1", "--budget", "-1"], "--budget is -1; it must be greater than zero."),
        (["--env", "Taxi-v4"], "--env got 'Taxi-v4'; expected one of random, FrozenLake-v1, CliffWalking-v1."),
        (["--learner", "greedy", "--eta", "1"], "--eta is not a setting of greedy, which takes none of these settings."),
        (
            ["--learner", "opt-cmdp", "--solver", "cvxpy"],
            "--solver is not a setting of opt-cmdp, which takes --bonus-scale, --radius-scale, --confidence.",
        ),
        (["--eta", "1"], "--eta is a setting of one learner; say whose, such as --learner wc-ops."),
        (
            ["--learner", "wc-ops-practical", "--eta", "1"],
            "--eta is not a setting of wc-ops-practical, which takes --solver.",
        ),
        (
            ["--learner", "greedy", "--baseline-share", "0.5"],
            "--baseline-share belongs to s-ops, ma-ops and dope, and --learner is greedy.",
        ),
        (["--baseline-share", "1.5"], "--baseline-share is 1.5; it must be greater than zero and at most 1."),
        (["--fresh", "yes"], "'yes' is not an option"),
        (["rnu"], "'rnu' is not a command of python -m train; did you mean run?"),
    ],
)
def test_a_mistake_gets_one_sentence_and_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcmdp.run_split", lambda *_, **__: pytest.fail("the job was started"))
    assert main(arguments) == 2
    assert words in one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_gets_one_sentence(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "--device cuda cannot be used here" in one_sentence(capsys)


def test_help_teaches_with_examples(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    for words in ("python -m train --episodes 500", "--json", "--bonus-scale", "--fresh", "--solver"):
        assert words in out


def test_help_lists_the_commands(capsys):
    for arguments in (["--help"], ["help"], ["help", "run"], ["help", "bench", "scale"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out = capsys.readouterr().out
        assert end.value.code == 0 and "--seed" in out
        listed = all(f"  {name:<12}{purpose}" in out for name, purpose in COMMANDS.items())
        assert listed == (len(arguments) == 1)
    assert "--repeats" in out  # of bench scale
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"torchcmdp {tc.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_their_parts_and_options(shell, capsys):
    assert main(["completion", "--shell", shell]) == 0
    script = capsys.readouterr().out
    assert all(words in script for words in (*COMMANDS, "sensitivity", "--bonus-scale", "--final-seeds"))


def test_every_command_is_a_module_with_a_main():
    for command in COMMANDS:
        assert callable(importlib.import_module(f"train.{command}").main)


def test_programs_leave_the_threads_as_they_were(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr("torchcmdp.run_split", lambda *_, **__: seen.append(torch.get_num_threads()) or 1 / 0)
    try:
        torch.set_num_threads(2)
        with pytest.raises(ZeroDivisionError):
            main(small(tmp_path))
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_ctrl_c_exits_with_130_and_the_same_command_continues(tmp_path):
    command = [sys.executable, "-m", "train", *small(tmp_path), "--episodes", "100000", "--log-every", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    table = tmp_path / "alone" / "wc-ops" / "metrics.csv"
    while process.poll() is None and not table.exists():  # the first point: the loop is running
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "Interrupted in WC-OPS, after" in err and "the same command continues" in err and "Traceback" not in err
    assert torch.load(table.with_name("checkpoint.pt"), weights_only=True)["played"] >= 1


def test_the_other_projection_runs_and_invents_no_iterations(tmp_path, capsys):
    assert main(small(tmp_path, "--solver", "cvxpy", "--episodes", "3")) == 0
    assert "not counted by this solver" in capsys.readouterr().out
