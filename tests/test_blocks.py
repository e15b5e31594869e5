"""Compiled blocks of episodes against the torch path, and against themselves however they are cut, resumed and shared out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcmdp as tc
from torchcmdp.errors import InvalidInput
from torchcmdp.kernels import threads as threads_room
from torchcmdp.kernels.engine import using
from torchcmdp.run import blocks as blocks_room
from torchcmdp.run import session as session_room
from torchcmdp.run.session import Session

RAGGED = (1, 3, 2, 4, 1)
CURVES = ("regret", "anytime_regret", "alpha_regret", "violation_by_constraint", "positive_violation_by_constraint")
LEARNERS: dict[str, tuple[type[tc.Learner], dict[str, Any]]] = {
    "wc-ops": (tc.WCOPS, {}),
    "wc-ops, bernstein": (tc.WCOPS, {"confidence": "bernstein", "radius_scale": 0.1}),
    "wc-ops, l1": (tc.WCOPS, {"confidence": "l1"}),
    "wc-ops, empirical": (tc.WCOPS, {"violation_threshold": "empirical", "threshold_scale": 0.01}),
    "uob-reps": (tc.UOBREPS, {}),
    "opt-primal-dual": (tc.OptPrimalDual, {}),
    "opt-primal-dual, matched": (tc.OptPrimalDual, {"radii": "matched", "multiplier_cap": 2.0, "bonus_scale": 0.1}),
    "pdb-ps": (tc.PDBPS, {}),
    "pdb-ps, entrywise": (tc.PDBPS, {"confidence": "entrywise"}),
    "greedy": (tc.Greedy, {}),  # not compiled: both engines play it alike
}


def recorded(cmdp: tc.LayeredCMDP) -> tuple[Any, Any]:
    """Sequences long enough for the runs below."""
    numbers = torch.rand(400, 1, 1, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return tc.Replay(numbers[:, 0] * cmdp.rewards), tc.Replay(numbers * cmdp.costs)


def adversary(cmdp: tc.LayeredCMDP) -> tuple[Any, Any]:
    caps = tc.safe_caps(cmdp, 0.1)
    costs = tc.OGDAdversary(cmdp.costs, sign=1, step=0.2, schedule="sqrt_T", horizon=300, low=-1.0, high=caps)
    return tc.OGDAdversary(cmdp.rewards, sign=-1, step=0.3), costs


PROCESSES: dict[str, Callable[[tc.LayeredCMDP], tuple[Any, Any]]] = {
    "bernoulli": lambda cmdp: (tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1)),
    "fixed": lambda cmdp: (tc.Fixed(cmdp.rewards), tc.Fixed(cmdp.costs)),
    "switching": lambda cmdp: (
        tc.Switching([cmdp.rewards, 0.5 * cmdp.rewards], at=[50], noise="bernoulli"),
        tc.Switching([cmdp.costs, -cmdp.costs], at=[70]),
    ),
    "cyclic": lambda cmdp: (tc.Bernoulli(cmdp.rewards), tc.Cyclic([cmdp.costs, -cmdp.costs], 7, noise="bernoulli", low=-1)),
    "adversary": adversary,
    "replay": recorded,
}


def parts(learner: str, process: str, runs: int = 3, first_run: int = 0, horizon: int = 300) -> tuple[tc.Learner, tc.Simulator]:
    """A learner of the paper's constants, scaled where the name says so, and a simulator, both new."""
    cmdp = tc.random_cmdp(RAGGED, actions=3, constraints=2, seed=3)
    env = tc.Simulator(cmdp, *PROCESSES[process](cmdp), runs=runs, seed=5, first_run=first_run)
    kind, options = LEARNERS[learner]
    return kind.for_env(env, horizon=horizon, **options), env


def played(engine: str, learner: str, process: str, episodes: int, **options: Any) -> tc.RunResult:
    settings: dict[str, Any] = {"log_every": 25, "progress": False, **options}
    return tc.run(*parts(learner, process, horizon=episodes), episodes, engine=engine, **settings)


def check_same(learner: str, process: str, episodes: int) -> None:
    expected, found = (played(engine, learner, process, episodes) for engine in ("torch", "auto"))
    for name in CURVES:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9, equal_nan=True)
    assert list(found.diagnostics) == list(expected.diagnostics)
    for tag, value in expected.diagnostics.items():
        if tag != "Solver/iterations":  # how many a solver needs may hang on the last bit
            torch.testing.assert_close(found.diagnostics[tag], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("learner", LEARNERS)
def test_both_engines_measure_the_same_of_every_learner(learner: str) -> None:
    check_same(learner, "bernoulli", 300)


@pytest.mark.parametrize("process", [name for name in PROCESSES if name != "bernoulli"])
def test_both_engines_measure_the_same_of_every_process(process: str) -> None:
    check_same("wc-ops", process, 300)


def perturbed(learner: str, process: str, episodes: int, seed: int) -> tc.RunResult:
    """The same run with 1e-15 of luck in the learner's first occupancy."""
    player, env = parts(learner, process, horizon=episodes)
    noise = torch.randn(player.log_occupancy.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    player.log_occupancy = player.log_occupancy * (1 + 1e-15 * noise)
    return tc.run(player, env, episodes, log_every=25, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learner", "process"),
    [*(("wc-ops", process) for process in ("bernoulli", "switching", "cyclic", "adversary")), ("uob-reps", "bernoulli"),
     ("opt-primal-dual", "bernoulli"), ("pdb-ps", "bernoulli")],
)  # fmt: skip
def test_both_engines_measure_the_same_for_long_up_to_what_rounding_does(learner: str, process: str) -> None:
    """A projection amplifies the last bit from episode to episode: the engines may differ by no more than such a bit makes."""
    expected, found = (played(engine, learner, process, 2_000) for engine in ("torch", "auto"))
    moved = (
        [perturbed(learner, process, 2_000, seed) for seed in range(3)]
        if hasattr(parts(learner, process)[0], "log_occupancy")
        else []
    )
    for name in CURVES:
        curve = getattr(found, name)
        bit = max((float((getattr(run, name) - curve).abs().nan_to_num().max()) for run in moved), default=0.0)
        torch.testing.assert_close(curve, getattr(expected, name), rtol=1e-9, atol=1e-9 + 5 * bit, equal_nan=True)


@pytest.mark.parametrize("process", ["bernoulli", "adversary"])
@pytest.mark.parametrize("learner", ["wc-ops", "uob-reps", "opt-primal-dual", "pdb-ps"])
def test_blocks_leave_what_their_episodes_would_leave_one_at_a_time(learner: str, process: str) -> None:
    """State dictionaries of learner, simulator, tracker and diagnostics, to the bit, however the episodes are cut into blocks."""
    states = []
    for lengths in ([40], [1] * 40, [7, 26, 7]):
        parts_of_run = Session(*parts(learner, process), 40, 40, tc.distributed.Crew(3, alone=True))
        parts_of_run._pace = 1
        for length in lengths:
            assert blocks_room.can_play(parts_of_run.learner, parts_of_run.env, parts_of_run.tracker, parts_of_run.diagnostics)
            parts_of_run._pace = length
            assert parts_of_run.advance(length) == length
        states.append(parts_of_run.state())
    for state in states[1:]:
        for name in ("learner", "env", "tracker", "diagnostics"):
            same_state(state[name], states[0][name])


def same_state(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name, value in expected.items():
            same_state(found[name], value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(torch.nan_to_num(found, nan=-5.0), torch.nan_to_num(expected, nan=-5.0))
    else:
        assert found == expected


@pytest.mark.parametrize("process", ["bernoulli", "adversary"])
@pytest.mark.parametrize("learner", ["wc-ops", "opt-primal-dual", "pdb-ps"])
def test_a_resumed_run_is_the_run_to_the_bit(learner: str, process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = played("compiled", learner, process, 100, logdir=tmp_path / "whole")
    monkeypatch.setattr(session_room, "BLOCK_SECONDS", 1e-9)  # blocks of one episode, so that the run stops anywhere
    real, calls = blocks_room.Blocks.play, []

    def play(self: Any, episodes: int) -> None:
        if len(calls) == 37:
            raise RuntimeError("the power is gone")
        calls.append(episodes)
        real(self, episodes)

    monkeypatch.setattr(blocks_room.Blocks, "play", play)
    with pytest.raises(RuntimeError, match="power"):
        played("compiled", learner, process, 100, logdir=tmp_path / "cut", checkpoint_episodes=10)
    monkeypatch.undo()
    again = played("compiled", learner, process, 100, logdir=tmp_path / "cut")
    assert (tmp_path / "cut" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()
    assert torch.equal(again.violation, whole.violation)


def test_runs_know_neither_their_neighbours_nor_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(threads_room, "available", lambda threads=threads: threads)
        curves.append(tc.run(*parts("wc-ops", "bernoulli", runs=7), 60, progress=False, engine="compiled").violation)
    assert torch.equal(curves[0], curves[1]) and torch.equal(curves[0], curves[2])
    tail = tc.run(*parts("wc-ops", "bernoulli", runs=2, first_run=5), 60, progress=False, engine="compiled").violation
    assert torch.equal(tail, curves[0][5:])


class Louder(tc.WCOPS):
    """A subclass, whose update might be anything."""


def test_what_is_not_ours_is_played_a_step_at_a_time() -> None:
    learner, env = parts("wc-ops", "bernoulli")
    other = Louder.for_env(env, horizon=300)
    expected = tc.run(learner, env, 60, progress=False, engine="torch")
    _, env = parts("wc-ops", "bernoulli")
    found = tc.run(other, env, 60, progress=False)
    torch.testing.assert_close(found.violation, expected.violation, rtol=1e-9, atol=1e-9)
    with pytest.raises(InvalidInput, match="engine is"):
        tc.run(Louder.for_env(env, horizon=300), env, 60, progress=False, engine="compiled")


def test_single_updates_are_the_blocks_to_the_bit() -> None:
    learner, env = parts("wc-ops", "bernoulli")
    block, there = parts("wc-ops", "bernoulli")
    session = Session(block, there, 30, 30, tc.distributed.Crew(3, alone=True))
    session._pace = 1
    for _ in range(30):
        session.advance(1)
        learner.update(env.rollout(learner.policy))
        torch.testing.assert_close(learner.log_occupancy, block.log_occupancy, rtol=1e-9, atol=1e-9)
        assert torch.equal(learner.visits, block.visits)


@pytest.mark.parametrize("name", ["states", "actions", "next_states"])
@pytest.mark.parametrize("value", [-1, 5])
def test_a_step_that_does_not_exist_is_refused(name: str, value: int) -> None:
    learner, env = parts("pdb-ps", "bernoulli")
    trajectory = env.rollout(learner.policy)
    getattr(trajectory, name)[1, 2] = value
    with pytest.raises(InvalidInput, match="run 1 cannot go on"):
        learner.update(trajectory)


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInput, match="engine is 'fast'"), using("fast"):
        pass


def test_a_differentiated_learner_is_left_to_torch() -> None:
    _, env = parts("wc-ops", "bernoulli")
    eta = torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True)
    learner = tc.WCOPS.for_env(env, horizon=300, eta=eta)
    for _ in range(2):
        learner.update(env.rollout(learner.policy))
    learner.occupancy.square().sum().backward()
    assert eta.grad is not None and eta.grad.abs().sum() > 0
