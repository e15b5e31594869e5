"""What a run says once: past the horizon, with a warm learner, where no policy is safe, where the solver gave up."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hedge import RUNS, Hedge, interrupt, make_env, table
from torch import Tensor

import torchcmdp as tc


def play(learner: Any, env: tc.Simulator, episodes: int = 6, folder: Path | None = None) -> tuple[tc.RunResult, list[str]]:
    """A run, and what it said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = tc.run(learner, env, episodes, folder, 2, progress=False, images=False)
    assert all(warning.filename == __file__ for warning in caught)
    return result, [str(warning.message) for warning in caught]


def wcops(env: tc.Simulator, horizon: int = 6) -> tc.WCOPS:
    return tc.WCOPS.for_env(env, horizon=horizon)


def test_a_run_past_the_horizon_says_so_once_and_counts_the_episodes(tmp_path: Path) -> None:
    env = make_env()
    result, said = play(wcops(env, 4), env, folder=tmp_path)
    assert len(said) == 1 and "horizon of 4 episodes" in said[0] and "make it with horizon=6" in said[0]
    assert result.counts["Learner/past_horizon"].tolist() == [2] * RUNS
    assert [float(row["Learner/past_horizon"]) for row in table(tmp_path)] == [0, 0, 1]


def test_a_run_within_the_horizon_says_nothing_and_has_no_such_tag() -> None:
    env = make_env()
    result, said = play(wcops(env), env)
    assert said == [] and result.count("Learner/past_horizon") is None
    assert play(Hedge(env.layout), make_env())[1] == []


def test_a_learner_that_has_played_says_so_and_does_not_reuse_the_folder_of_a_new_one(tmp_path: Path) -> None:
    env = make_env()
    play(wcops(env, 20), env, folder=tmp_path)
    warm, env = wcops(env, 20), make_env()
    for _ in range(3):
        warm.update(make_env().rollout(warm.policy))
    with pytest.raises(tc.RunFolderError, match="its learner had played 0 episodes, but this one has played 3"):
        play(warm, env, folder=tmp_path)
    result, said = play(warm, env)
    assert len(said) == 1 and "WCOPS has learned from 3 episodes before this run" in said[0]
    assert int(warm.episode) == 9 and result.episodes.tolist() == [2, 4, 6]


def test_a_warm_learner_reaches_its_horizon_earlier() -> None:
    env = make_env()
    warm = wcops(env)
    warm.update(make_env().rollout(warm.policy))
    result, said = play(warm, env)
    assert len(said) == 2 and "ends with its episode 7" in said[0]
    assert result.counts["Learner/past_horizon"].tolist() == [1] * RUNS


def test_an_interrupted_learner_that_goes_on_is_not_called_warm(tmp_path: Path) -> None:
    env = make_env()
    learner = wcops(env)
    update = learner.update

    def interrupted(trajectory: tc.Trajectory) -> None:
        update(trajectory)
        if int(learner.episode) == 3:
            interrupt()

    learner.update = interrupted  # type: ignore[method-assign]
    assert not play(learner, env, folder=tmp_path)[0].completed
    result, said = play(learner, env, folder=tmp_path)
    assert result.completed and said == []


@pytest.mark.parametrize("changing", [False, True])
def test_where_no_policy_is_safe_the_run_says_so_and_has_a_column(tmp_path: Path, changing: bool) -> None:
    plain = make_env().cmdp
    costs = torch.stack([plain.costs, torch.ones_like(plain.costs) * plain.layout.pair_mask(), plain.costs])
    cmdp = tc.stack_cmdps([plain] * RUNS)
    cmdp = tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, costs)
    process: tc.Process = tc.Switching([costs, costs], [3]) if changing else tc.Fixed(costs)
    result, said = play(Hedge(plain.layout), tc.Simulator(cmdp, tc.Fixed(cmdp.rewards), process, runs=RUNS), folder=tmp_path)
    assert len(said) == 1 and "no policy is safe in 0.333 of the runs" in said[0]
    assert [float(row["Metrics/no_safe_policy"]) for row in table(tmp_path)] == pytest.approx([1 / 3] * 3)
    assert result.unsafe_runs == 1 and result.regret[:, -1].isnan().tolist() == [False, True, False]


class Failing(Hedge):
    """Reports that its solver gave up in one run of the fourth episode, and met NaN in the sixth."""

    def diagnostics(self) -> dict[str, Tensor]:
        here = torch.tensor([0.0, 1.0, 0.0])
        return {"Solver/max_iterations": here * (self.count == 4), "Solver/invalid": here * (self.count == 6)}


def test_a_solver_that_gives_up_is_heard_once_with_advice(tmp_path: Path) -> None:
    env = make_env()
    result, said = play(Failing(env.layout), env, 12, tmp_path)
    assert len(said) == 2
    for sentence, status in zip(said, (tc.Status.MAX_ITERATIONS, tc.Status.INVALID), strict=True):
        assert f"0.167 ended with status {status.name}" in sentence and status.advice in sentence
    assert result.count("Solver/max_iterations") == result.count("Solver/invalid") == 1
    assert [float(row["Solver/invalid"]) for row in table(tmp_path)] == pytest.approx([0, 0, 1 / 6, 0, 0, 0])


@pytest.mark.parametrize("value", [3, None, torch.zeros(5)])
def test_diagnostics_that_are_no_numbers_of_the_runs_get_a_sentence(value) -> None:
    env = make_env()
    learner = Hedge(env.layout)
    learner.diagnostics = lambda: {"Own/number": value}  # type: ignore[method-assign]
    with pytest.raises(tc.InvalidInput, match="diagnostics have Own/number = .*one value a run"):
        tc.run(learner, env, 3, progress=False)
