"""Compiled blocks of episodes against the torch path, and against themselves however they are cut, resumed and shared out."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import LEARNERS, PROCESSES, RAGGED, TIED, parts

import torchcmdp as tc
from torchcmdp.errors import InvalidInput
from torchcmdp.kernels import threads as threads_room
from torchcmdp.kernels.engine import using
from torchcmdp.run import blocks as blocks_room
from torchcmdp.run import session as session_room
from torchcmdp.run.session import Session

CURVES = ("regret", "anytime_regret", "alpha_regret", "violation_by_constraint", "positive_violation_by_constraint", "unsafe_share")


def played(engine: str, learner: str, process: str, episodes: int, **options: Any) -> tc.RunResult:
    settings: dict[str, Any] = {"log_every": 25, "progress": False, **options}
    return tc.run(*parts(learner, process, horizon=episodes), episodes, engine=engine, **settings)


def check_same(learner: str, process: str, episodes: int) -> None:
    expected, found = (played(engine, learner, process, episodes) for engine in ("torch", "auto"))
    for name in CURVES:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9, equal_nan=True)
    assert list(found.diagnostics) == list(expected.diagnostics)
    for tag, value in expected.diagnostics.items():
        # how many iterations a projection needs hangs on the last bit, but in few episodes of a hundred
        slack = 0.03 if tag == "Solver/iterations" and hasattr(parts(learner, process)[0], "log_occupancy") else 1e-9
        torch.testing.assert_close(found.diagnostics[tag], value, rtol=1e-9, atol=slack)


@pytest.mark.parametrize("learner", LEARNERS)
def test_both_engines_measure_the_same_of_every_learner(learner: str) -> None:
    check_same(learner, "fixed" if learner in TIED else "bernoulli", 300)


@pytest.mark.parametrize("learner", sorted(TIED))
def test_a_compiled_update_believes_what_the_torch_one_does(learner: str) -> None:
    """Costs that are -1 or 1 as well, and drift tests that ring; the plans may be any of those that tie, and are made the same."""
    (expected, env), (found, _) = (parts(learner, "cyclic") for _ in range(2))
    rung = 0.0
    for _ in range(200):
        trajectory = env.rollout(expected.policy)
        with using("torch"):
            expected.update(trajectory)
        found.update(trajectory)
        for name, value in expected.state_dict().items():
            if name not in ("plan", "planned"):
                torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-12, atol=1e-12)
        told = expected.diagnostics()
        for tag, value in found.diagnostics().items():
            if tag not in ("Solver/iterations", "Learner/max_multiplier"):
                torch.testing.assert_close(value, told[tag], rtol=1e-9, atol=1e-9)
        assert found.diagnostics().keys() == told.keys()
        rung += float(told.get("Learner/drift_alarms", torch.zeros(1)).sum())
        found.plan, found.planned = expected.plan, expected.planned
    assert (rung > 0) == (expected.costs.drift is not None)


@pytest.mark.parametrize("process", [name for name in PROCESSES if name != "bernoulli"])
def test_both_engines_measure_the_same_of_every_process(process: str) -> None:
    check_same("wc-ops", process, 300)


@pytest.mark.parametrize("process", [name for name in PROCESSES if name not in ("recorders", "replay")])
def test_both_engines_record_the_same_values_of_every_process(process: str) -> None:
    """In shape as well: what is the same for all runs stays one value."""
    sequences = []
    for engine in ("torch", "compiled"):
        cmdp = tc.random_cmdp(RAGGED, actions=3, constraints=2, seed=3)
        recorders = [tc.Recorder(who, episodes) for who, episodes in zip(PROCESSES[process](cmdp), (60, 90), strict=True)]
        env = tc.Simulator(cmdp, *recorders, runs=3, seed=5)
        tc.run(tc.OptPrimalDual.for_env(env, horizon=80), env, 80, log_every=25, progress=False, engine=engine)
        assert [recorder.episode for recorder in recorders] == [80, 80]
        sequences.append([recorder.sequence for recorder in recorders])
    assert [len(sequence) for sequence in sequences[1]] == [60, 80]
    for expected, found in zip(*sequences, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


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
     ("opt-primal-dual", "bernoulli"), ("pdb-ps", "bernoulli"), ("opt-cmdp", "bernoulli"), ("greedy", "bernoulli")],
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


@pytest.mark.parametrize("process", ["bernoulli", "adversary", "recorders"])
@pytest.mark.parametrize(
    "learner",
    ["wc-ops", "wc-ops, prior, margin, drift", "uob-reps", "opt-primal-dual", "pdb-ps", "opt-cmdp",
     "opt-cmdp, prior, margin, drift", "greedy"],
)  # fmt: skip
def test_blocks_leave_what_their_episodes_would_leave_one_at_a_time(learner: str, process: str) -> None:
    """State dictionaries of learner, simulator, tracker and diagnostics, to the bit, however the episodes are cut into blocks."""
    states = []
    for lengths in ([40], [1] * 40, [7, 26, 7]):
        parts_of_run = Session(*parts(learner, process), 40, 40, tc.distributed.Crew(3, alone=True))
        parts_of_run._pace = 1
        for length in lengths:
            assert parts_of_run.obstacle == ""
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
@pytest.mark.parametrize("learner", ["wc-ops", "opt-primal-dual", "pdb-ps", "opt-cmdp"])
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


def test_ctrl_c_ends_the_run_with_its_block_and_the_rest_is_the_run_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = played("compiled", "opt-primal-dual", "adversary", 100, logdir=tmp_path / "whole")
    real, lengths = blocks_room.Blocks.play, []

    def play(self: Any, episodes: int) -> None:
        real(self, episodes)
        lengths.append(episodes)
        if len(lengths) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(blocks_room.Blocks, "play", play)
    cut = played("compiled", "opt-primal-dual", "adversary", 100, logdir=tmp_path / "cut")
    monkeypatch.undo()
    assert not cut.completed and len(lengths) == 3
    again = played("compiled", "opt-primal-dual", "adversary", 100, logdir=tmp_path / "cut")
    assert again.completed and torch.equal(again.violation, whole.violation)
    assert (tmp_path / "cut" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_a_block_lasts_a_tenth_of_a_second_whatever_an_episode_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is heard inside a block, so that its length is how late ctrl-C may be heard."""
    session = Session(*parts("opt-primal-dual", "bernoulli"), 10**6, 10**6, tc.distributed.Crew(3, alone=True))
    clock, lasted = [0.0], []

    def play(self: Any, episodes: int) -> None:
        clock[0] += 0.001 * episodes if len(lasted) < 20 else 0.03 * episodes
        lasted.append(episodes)

    monkeypatch.setattr(blocks_room.Blocks, "play", play)
    monkeypatch.setattr(session_room.time, "monotonic", lambda: clock[0])
    for _ in range(40):
        session.advance(10**6)
    assert lasted[0] == 1 and max(lasted[:20]) <= 100 and lasted[19] >= 99
    # the block in which episodes became slower is longer, as no one can know before
    assert min(lasted[21:]) >= 2 and max(lasted[21:]) <= 3


def test_memory_does_not_grow_with_the_blocks() -> None:
    session = Session(*parts("opt-primal-dual", "adversary"), 10**6, 10**6, tc.distributed.Crew(3, alone=True))

    def tensors_after(blocks: int) -> int:
        for _ in range(blocks):
            session._pace = 2
            session.advance(2)
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    tensors_after(5)
    assert abs(tensors_after(30) - tensors_after(120)) < 20


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


def test_float32_is_left_to_torch_and_both_engines_say_so() -> None:
    """Kernels are compiled for float64 alone: a second set would double what everybody waits for the first time."""
    cmdp = tc.random_cmdp(RAGGED, actions=3, constraints=2, seed=3, dtype=torch.float32)
    curves = []
    for engine in ("auto", "torch"):
        env = tc.Simulator(cmdp, *PROCESSES["bernoulli"](cmdp), runs=3, seed=5)
        learner = tc.WCOPS.for_env(env, horizon=8)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            curves.append(tc.run(learner, env, 8, progress=False, engine=engine).violation)
        told = [str(warning.message) for warning in said if "WCOPS is in torch.float32" in str(warning.message)]
        assert len(told) == (engine == "auto")
    assert torch.equal(*curves)
    with pytest.raises(InvalidInput, match="but WCOPS is in torch.float32, and kernels compute in torch.float64"):
        tc.run(tc.WCOPS.for_env(env, horizon=8), env, 8, progress=False, engine="compiled")


def test_what_cannot_be_compiled_is_named() -> None:
    class Own(tc.Bernoulli):
        """A process that might do anything."""

    cmdp = tc.random_cmdp(RAGGED, actions=3, constraints=2, seed=3)
    rewards, costs = PROCESSES["bernoulli"](cmdp)
    env, foreign = tc.Simulator(cmdp, rewards, costs), tc.Simulator(cmdp, Own(cmdp.rewards), costs)
    ours = tc.WCOPS.for_env(env, horizon=4)
    for learner, there, why in (
        (Louder.for_env(env, horizon=4), env, "Louder has no kernels"),
        (tc.WCOPS.for_env(env, horizon=4, solver=tc.Newton(backend="torch")), env, "its solver is Newton"),
        (tc.WCOPS.for_env(env, horizon=4, eta=torch.ones(1, dtype=torch.float64, requires_grad=True)), env, "differentiates"),
        (ours, foreign, "a process is not"),
    ):
        session = Session(learner, there, 4, 4, tc.distributed.Crew(1, alone=True))
        assert why in session.obstacle
        with using("compiled"), pytest.raises(InvalidInput, match=why):
            session.advance(1)
    with using("torch"):
        assert Session(ours, env, 4, 4, tc.distributed.Crew(1, alone=True)).obstacle == 'engine is "torch"'


class Watching(tc.Simulator):
    """A simulator that looks at policies and changes nothing."""

    plays_in_blocks = True

    def watch(self, policy: torch.Tensor) -> None:
        self.seen = [*getattr(self, "seen", ()), (self.episode, policy.clone())]


def test_a_simulator_that_only_watches_is_played_in_blocks_and_sees_where_they_begin() -> None:
    learner, plain = parts("opt-primal-dual", "bernoulli")
    _, env = parts("opt-primal-dual", "bernoulli")
    env.__class__ = Watching
    expected = tc.run(learner, plain, 40, log_every=10, progress=False, engine="torch")
    watched = parts("opt-primal-dual", "bernoulli")[0]
    found = tc.run(watched, env, 40, log_every=10, progress=False, engine="compiled")
    torch.testing.assert_close(found.violation, expected.violation, rtol=1e-9, atol=1e-9)
    assert {0, 10, 20, 30} <= {episode for episode, _ in env.seen}
    assert torch.equal(env.seen[0][1], parts("opt-primal-dual", "bernoulli")[0].policy)


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
