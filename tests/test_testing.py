"""The contracts hold for what keeps them, and each goes red on a class that breaks just it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import simulator
from torch import Tensor, nn

import torchcmdp as tc
from torchcmdp.testing import check_environment, check_learner, check_process


class Hedge(nn.Module):
    """A learner that keeps the contract: exponential weights on the rewards it saw, and their counts."""

    def __init__(self, layout: tc.Layout, constraints: int, runs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layout, self.runs = layout, runs
        self.register_buffer("scores", torch.zeros(runs, *layout.pair_shape, dtype=dtype, device=device))

    @property
    def policy(self) -> Tensor:
        return self.scores.softmax(-1) * self.layout.pair_mask(self.scores.device)

    def update(self, trajectory: tc.Trajectory) -> None:
        runs, layers = trajectory.states.shape
        device = self.scores.device
        index = (torch.arange(runs, device=device)[:, None], torch.arange(layers, device=device))
        rewards = trajectory.rewards.to(self.scores.dtype)
        self.scores = self.scores.index_put((*index, trajectory.states, trajectory.actions), rewards, accumulate=True)

    def diagnostics(self) -> dict[str, Tensor]:
        return {"Hedge/largest": self.scores.amax((-1, -2, -3))}

    def config(self) -> dict[str, Any]:
        return {"name": "Hedge", "widths": list(self.layout.widths)}


class OneRunShort(Hedge):
    policy = property(lambda self: Hedge.policy.fget(self)[1:])


class Padded(Hedge):
    policy = property(lambda self: self.scores.softmax(-1))


class Unnormalised(Hedge):
    policy = property(lambda self: Hedge.policy.fget(self) * 0.9)


class Negative(Hedge):
    policy = property(lambda self: Hedge.policy.fget(self) + torch.tensor([0.5, -0.5, 0.0]) * self.layout.pair_mask()[..., :1])


class AlwaysDouble(Hedge):
    policy = property(lambda self: Hedge.policy.fget(self).double())


class Overwriting(Hedge):
    """Hands out its own buffer, and writes into it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("kept", Hedge.policy.fget(self))

    policy = property(lambda self: self.kept)

    def update(self, trajectory: tc.Trajectory) -> None:
        super().update(trajectory)
        self.kept.copy_(Hedge.policy.fget(self))


class ScalarDiagnostics(Hedge):
    def diagnostics(self) -> dict[str, Tensor]:
        return {"Hedge/largest": self.scores.max()}


class Curious(Hedge):
    """Reading the policy moves it."""

    @property
    def policy(self) -> Tensor:
        self.scores = self.scores * 0.99
        return Hedge.policy.fget(self)


class Sharing(Hedge):
    """Every run learns from the mean feedback of all."""

    def update(self, trajectory: tc.Trajectory) -> None:
        super().update(replace(trajectory, rewards=trajectory.rewards.mean(0).expand_as(trajectory.rewards)))


class SlowerInCompany(Hedge):
    """A rate that depends on the number of runs."""

    policy = property(lambda self: (self.scores / self.runs).softmax(-1) * self.layout.pair_mask())


class Remembering(Hedge):
    """Counts what is not in its state."""

    count = 0

    def update(self, trajectory: tc.Trajectory) -> None:
        self.count += 1
        super().update(replace(trajectory, rewards=trajectory.rewards / self.count))


class TensorConfig(Hedge):
    def config(self) -> dict[str, Any]:
        return {"rate": torch.ones(2)}


class RandomConfig(Hedge):
    def config(self) -> dict[str, Any]:
        return {"id": id(self)}


class Reading(Hedge):
    def update(self, trajectory: tc.Trajectory) -> None:
        if float(trajectory.rewards.sum()) >= 0:
            super().update(trajectory)


BROKEN_LEARNERS = {
    OneRunShort: "has a policy of shape",
    Padded: "not zero in the padding",
    Unnormalised: "misses a sum of one by 0.1",
    Negative: "negative entry",
    AlwaysDouble: "expected torch.float32",
    Overwriting: "wrote into a policy",
    ScalarDiagnostics: "has diagnostics Hedge/largest of shape",
    Curious: "something else from the same trajectories",
    Sharing: "the feedback of one run change the policy of another",
    SlowerInCompany: "alone than in a batch of 3",
    Remembering: "does not continue bit for bit",
    TensorConfig: "JSON does not give back",
    RandomConfig: "another config",
}


class Drift(tc.Process):
    """A process that keeps the contract: costs that fade where the policy played."""

    def __init__(self, cmdp: tc.LayeredCMDP, runs: int) -> None:
        self.base = self.current = cmdp.costs
        self.episode = 0

    values = property(lambda self: self.current)

    def advance(self, policy: Tensor) -> None:
        self.episode += 1
        self.current = self.current * (1 - 0.1 * policy.to(self.base.dtype).unsqueeze(-4))

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self.episode, "values": self.current}

    def load_state_dict(self, state: Any) -> None:
        self.episode, self.current = state["episode"], state["values"]


class Widened(Drift):
    values = property(lambda self: self.current[..., :1])


class Above(Drift):
    values = property(lambda self: self.current * 3)


class Dirty(Drift):
    values = property(lambda self: self.current + 0.01 * (self.current == 0))


class DoubleValues(Drift):
    values = property(lambda self: self.current.double())


class Biased(Drift):
    def observe(self, values: Tensor, uniforms: Tensor) -> Tensor:
        return values * 0.5


class BadlyBounded(Drift):
    def observe(self, values: Tensor, uniforms: Tensor) -> Tensor:
        return tc.Bernoulli.observe(tc.Bernoulli(self.base, low=-1), values, uniforms)


class InPlace(Drift):
    def __init__(self, cmdp: tc.LayeredCMDP, runs: int) -> None:
        super().__init__(cmdp, runs)
        self.current = cmdp.costs.expand(runs, *cmdp.costs.shape).clone()

    def advance(self, policy: Tensor) -> None:
        self.current *= 1 - 0.1 * policy.to(self.base.dtype).unsqueeze(-4)


class CalledStationary(Drift):
    stationary = True


class Crowd(Drift):
    """Follows the mean policy of all runs."""

    def advance(self, policy: Tensor) -> None:
        super().advance(policy.mean(0, keepdim=True).expand_as(policy))


class Forgetful(Drift):
    def load_state_dict(self, state: Any) -> None:
        self.episode = state["episode"]


class Unready(Drift):
    def config(self) -> dict[str, Any]:
        return {"name": {"Unready"}}


BROKEN_PROCESSES = {
    Widened: "has values of shape",
    Above: r"has values outside of \[-1, 1\]",
    Dirty: "not zero in the padding",
    DoubleValues: "expected torch.float32",
    Biased: "mean is not its value",
    BadlyBounded: "above what it says is the largest",
    InPlace: "wrote into values",
    CalledStationary: "stationary and changed",
    Crowd: "the policy of one run change the values of another",
    Forgetful: "does not continue bit for bit",
    Unready: "JSON does not give back",
}


def changed(**parts: Callable[[tc.Trajectory, Tensor], Tensor]) -> Callable[[tc.Simulator, Tensor], tc.Trajectory]:
    """A rollout in which some of the trajectory is replaced."""

    def rollout(self: tc.Simulator, policy: Tensor) -> tc.Trajectory:
        seen = tc.Simulator.rollout(self, policy)
        return replace(seen, **{name: part(seen, policy) for name, part in parts.items()})

    return rollout


def unsaved(self: tc.Simulator, state: Any) -> None:
    """Forgets to load the number of episodes."""


def first_policy(self: tc.Simulator, policy: Tensor) -> tc.Trajectory:
    return tc.Simulator.rollout(self, policy[:1].expand(self.runs, -1, -1, -1) if policy.dim() == 4 else policy)


def by_size(self: tc.Simulator, policy: Tensor) -> tc.Trajectory:
    self.episode += self.runs
    return tc.Simulator.rollout(self, policy)


def by_identity(self: tc.Simulator, policy: Tensor) -> tc.Trajectory:
    self.episode = id(self) % 1000
    return tc.Simulator.rollout(self, policy)


BROKEN_ENVIRONMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "float states": ({"rollout": changed(states=lambda t, _: t.states.double())}, "has states of torch.float64"),
    "one cost": ({"rollout": changed(costs=lambda t, _: t.costs[..., 0])}, "has costs of"),
    "gradient": ({"rollout": changed(rewards=lambda t, _: t.rewards.requires_grad_())}, "carry a gradient"),
    "jumps": ({"rollout": changed(next_states=lambda t, _: t.next_states.flip(0).roll(1, 1))}, "no path"),
    "no such action": ({"rollout": changed(actions=lambda t, _: t.actions + 3)}, "does not exist"),
    "rewards of two": ({"rollout": changed(rewards=lambda t, _: t.rewards + 2)}, "rewards outside"),
    "costs of two": ({"rollout": changed(costs=lambda t, _: t.costs * 2)}, "costs outside"),
    "own actions": ({"rollout": changed(actions=lambda t, _: t.actions * 0)}, "probability zero"),
    "never the same": ({"rollout": by_identity}, "when it was made again"),
    "batch": ({"rollout": by_size}, "in a smaller batch"),
    "last policy": (
        {"rollout": changed(rewards=lambda t, p: t.rewards * p.flatten()[-3:].amax())},
        "policy of one run",
    ),
    "unsaved": ({"load_state_dict": unsaved}, "does not continue bit for bit"),
    "config": ({"config": lambda self: {"device": self.device}}, "JSON does not give back"),
}


def test_what_keeps_a_contract_passes(cmdp: tc.LayeredCMDP) -> None:
    check_learner(Hedge, meta=Hedge)
    check_process(Drift)
    check_environment(lambda runs: simulator(cmdp, runs))


@pytest.mark.parametrize("broken", BROKEN_LEARNERS, ids=lambda cls: cls.__name__)
def test_a_broken_learner_gets_a_sentence(broken: type[Hedge]) -> None:
    with pytest.raises(AssertionError, match=rf"^{broken.__name__} .*{BROKEN_LEARNERS[broken]}.*\.$"):
        check_learner(broken)


def test_a_learner_that_reads_values_is_found_on_the_meta_device() -> None:
    check_learner(Reading)
    with pytest.raises(RuntimeError, match="meta"):
        check_learner(Reading, meta=Reading)


@pytest.mark.parametrize("broken", BROKEN_PROCESSES, ids=lambda cls: cls.__name__)
def test_a_broken_process_gets_a_sentence(broken: type[Drift]) -> None:
    with pytest.raises(AssertionError, match=rf"^{broken.__name__} .*{BROKEN_PROCESSES[broken]}.*\.$"):
        check_process(broken)


@pytest.mark.parametrize("name", BROKEN_ENVIRONMENTS)
def test_a_broken_environment_gets_a_sentence(name: str, cmdp: tc.LayeredCMDP) -> None:
    parts, message = BROKEN_ENVIRONMENTS[name]
    broken = type("Broken", (tc.Simulator,), parts)
    rewards, costs = tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1)
    with pytest.raises(AssertionError, match=rf"^Broken .*({message}).*\.$"):
        check_environment(lambda runs: broken(cmdp, rewards, costs, runs=runs))
