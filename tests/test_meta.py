"""Ready for a GPU without having one: whole episodes on the meta device, which has no values to read and mixes with no other.

`pytest --device cuda tests/test_meta.py` plays the same episodes on a real device and compares them with the CPU's, and so does
`NUMBA_ENABLE_CUDASIM=1 pytest --device simulator tests/test_meta.py` with the blocks of episodes that kernels play.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import ON_META, SETTINGS
from torch import Tensor

import torchcmdp as tc
from torchcmdp.learners import LEARNERS
from torchcmdp.run.blocks import Blocks
from torchcmdp.run.diagnostics import Diagnostics

RUNS, EPISODES, CONSTRAINTS = 3, 3, 2
Processes = Callable[[tc.LayeredCMDP], tuple[tc.Process, tc.Process]]


def adversaries(cmdp: tc.LayeredCMDP) -> tuple[tc.Process, tc.Process]:
    high = tc.safe_caps(cmdp, 0.1)
    rewards = tc.OGDAdversary(cmdp.rewards, sign=-1, step=0.5)
    return rewards, tc.OGDAdversary(cmdp.costs, sign=1, step=0.5, schedule="sqrt_T", horizon=EPISODES, low=-1, high=high)


def sequences(cmdp: tc.LayeredCMDP) -> tuple[tc.Process, tc.Process]:
    return tc.Replay(torch.stack([cmdp.rewards] * EPISODES)), tc.Replay(torch.stack([cmdp.costs] * EPISODES))


PROCESSES: dict[str, Processes] = {
    "Bernoulli": lambda cmdp: (tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1)),
    "Fixed": lambda cmdp: (tc.Fixed(cmdp.rewards), tc.Fixed(cmdp.costs)),
    "OGDAdversary": adversaries,
    "Switching": lambda cmdp: (
        tc.Switching([cmdp.rewards, 1 - cmdp.rewards], at=[1], noise="bernoulli"),
        tc.Switching([cmdp.costs, -cmdp.costs], at=[2], noise="bernoulli", low=-1),
    ),
    "Cyclic": lambda cmdp: (tc.Cyclic([cmdp.rewards, 1 - cmdp.rewards], 1), tc.Cyclic([cmdp.costs, -cmdp.costs], 2)),
    "Recorder": lambda cmdp: (tc.Recorder(tc.Fixed(cmdp.rewards), EPISODES), tc.Recorder(adversaries(cmdp)[1], EPISODES)),
    "Replay": sequences,
}


class Playing:
    """A learner, a simulator and the metrics of both, on one device."""

    def __init__(self, learner: tc.Learner, env: tc.Simulator) -> None:
        self.learner, self.env, self.tracker = learner, env, tc.Tracker(env)

    def step(self) -> None:
        """One whole episode, as `run` plays it."""
        policy = self.learner.policy
        trajectory = self.env.rollout(policy)
        self.tracker.update(policy, trajectory)
        self.learner.update(trajectory)


def playing(key: str, kind: str, device: torch.device, *, own: bool = False, **settings: Any) -> Playing:
    """A learner in a CMDP, shared by the runs or one for each of its `own`, with everything on one device."""
    cmdp = tc.random_cmdp((1, 2, 3, 1), actions=2, constraints=CONSTRAINTS, seed=0, feasibility="strict").to(device)
    rewards, costs = PROCESSES[kind](cmdp)
    env = tc.Simulator(tc.stack_cmdps([cmdp] * RUNS) if own else cmdp, rewards, costs, runs=RUNS, seed=1)
    options = {**SETTINGS[key], **settings, "device": device}
    return Playing(LEARNERS[key](cmdp.layout, CONSTRAINTS, EPISODES, runs=RUNS, **options), env)


def tensors(game: Playing) -> dict[str, Tensor]:
    """What an episode leaves behind, by name."""
    state = {f"learner.{name}": value for name, value in game.learner.state_dict().items()}
    tracked = {f"tracker.{name}": getattr(game.tracker, name) for name in ("sums", "comparator", "rho")}
    values = {"env.rewards": game.env.reward_values, "env.costs": game.env.cost_values, "policy": game.learner.policy}
    return {**state, **tracked, **values, **game.learner.diagnostics()}


COMPILED = ("wc-ops", "uob-reps", "opt-cmdp", "greedy", "opt-primal-dual", "pdb-ps")
every_learner = pytest.mark.parametrize("key", LEARNERS)
every_process = pytest.mark.parametrize("kind", PROCESSES)


def test_every_process_is_here() -> None:
    kinds = {cls.__name__ for cls in vars(tc).values() if isinstance(cls, type) and issubclass(cls, tc.Process)}
    assert kinds == {"Process", *PROCESSES}


@every_process
@every_learner
def test_an_episode_reads_nothing_and_stays_on_its_device(key: str, kind: str) -> None:
    """Rollout, metrics, estimates, upper occupancy, solver, diagnostics: the meta device refuses whatever would be a host read."""
    game = playing(key, kind, torch.device("meta"), own=kind == "Bernoulli", **ON_META.get(key, {}))
    game.step()
    for name, value in tensors(game).items():
        assert value.device.type == "meta", name
    assert game.learner.policy.shape == (RUNS, *game.env.layout.pair_shape)
    assert game.env.rollout(game.learner.policy).costs.shape == (RUNS, 3, CONSTRAINTS)


@pytest.mark.parametrize("options", [{"confidence": "bernstein"}, {"confidence": "l1"}, {"violation_threshold": "empirical"}])
def test_the_variants_of_wc_ops_read_nothing_either(options: dict[str, Any]) -> None:
    game = playing("wc-ops", "Bernoulli", torch.device("meta"), **ON_META["wc-ops"], **options)
    game.step()
    assert game.learner.policy.device.type == "meta"


@pytest.mark.parametrize(("key", "kind"), [*((key, "OGDAdversary") for key in COMPILED), ("wc-ops", "Switching")])
def test_what_kernels_on_a_gpu_are_given_is_on_the_device(key: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array of a launch is a tensor there: one of numpy would be copied to the device and back."""
    meta = torch.device("meta")
    game = playing(key, kind, meta, own=True)
    assert game.env.is_packable
    blocks = Blocks(game.learner, game.env, game.tracker, Diagnostics(RUNS, meta))
    monkeypatch.setattr(game.learner, "episode", torch.zeros((), dtype=torch.int64))  # a count, which is read on the host
    packed, _, records = blocks.pack(1)
    found = list(leaves(blocks.gpu_arguments(packed, 1, records)))
    assert sum(isinstance(value, Tensor) for value in found) > 60
    for value in found:
        assert isinstance(value, int | float) or (value.device == meta and value.is_contiguous())
    assert records[1].sums is game.tracker.sums


def leaves(value: Any) -> Iterator[Any]:
    """All that is no tuple in a record of records."""
    for part in value if isinstance(value, tuple) else ():
        yield from leaves(part)
    if not isinstance(value, tuple):
        yield value


def test_the_meta_device_would_notice() -> None:
    """What the tests above rest on: a read and a mixture are refused."""
    game = playing("uob-reps", "Fixed", torch.device("meta"), **ON_META["uob-reps"])
    with pytest.raises(RuntimeError):
        bool((game.learner.policy > 0).any())
    with pytest.raises(RuntimeError):
        game.learner.policy + torch.zeros(game.learner.policy.shape, dtype=torch.float64)


@pytest.mark.parametrize(("key", "kind"), [*((key, "Bernoulli") for key in LEARNERS), *(("wc-ops", kind) for kind in PROCESSES)])
def test_the_chosen_device_plays_as_the_cpu_does(key: str, kind: str, device: torch.device) -> None:
    """With the solvers in torch, converged, on --device, against the CPU's own: the same numbers, up to the solvers' tolerance."""
    torch_options = {name: replace(solver, fixed_iterations=None) for name, solver in ON_META.get(key, {}).items()}
    there = playing(key, kind, device, own=kind == "Bernoulli", **torch_options)
    here = playing(key, kind, torch.device("cpu"), own=kind == "Bernoulli")
    for _ in range(EPISODES):
        there.step()
        here.step()
    expected = tensors(here)
    for name, value in tensors(there).items():
        assert value.device.type == device.type and value.isfinite().all(), name
        if name != "Solver/iterations":
            torch.testing.assert_close(value.cpu(), expected[name], rtol=0, atol=1e-6, msg=name)
    there.tracker.record()
    assert there.tracker.regret.isfinite().all() and there.tracker.violation.shape == (RUNS, 1)


@pytest.mark.parametrize(
    ("key", "kind"), [*((key, "Bernoulli") for key in COMPILED), *(("wc-ops", kind) for kind in PROCESSES if kind != "Recorder")]
)
def test_kernels_on_the_chosen_device_play_as_torch_does_on_the_cpu(
    key: str, kind: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Whole runs, in blocks of episodes."""
    there, here = (playing(key, kind, place, own=kind == "Bernoulli") for place in (device, torch.device("cpu")))
    engine = "cuda" if request.config.getoption("--device") == "simulator" else "auto"
    found = tc.run(there.learner, there.env, EPISODES, engine=engine, progress=False)
    expected = tc.run(here.learner, here.env, EPISODES, engine="torch", progress=False)
    for name in ("regret", "violation", "realised_violation"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=0, atol=1e-6, equal_nan=True)
    state = here.learner.state_dict()
    for name, value in there.learner.state_dict().items():
        assert value.device == there.env.device, name
        torch.testing.assert_close(value.cpu(), state[name], rtol=0, atol=1e-6, msg=name)
