"""Regret and violation of WC-OPS as functions of its hyperparameters, with unbiased derivatives in forward and reverse mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.errors import (
    InvalidInput,
    brief,
    check_callable,
    check_delta,
    check_kind,
    choice,
    not_negative,
    number,
    whole_number,
)
from torchcmdp.learners.wcops import WCOPS
from torchcmdp.metrics import episode_regret, worst_constraint
from torchcmdp.occupancy import expected_value, occupancy_of
from torchcmdp.planning import safe_optimum
from torchcmdp.simulator import Simulator
from torchcmdp.trajectory import Trajectory
from torchcmdp.tuning.evidence import expected_evidence, fade

# What can be tuned, each a positive multiple of the paper's constant, so that it means the same at another horizon or size.
SCALES = ("eta_scale", "gamma_scale", "bonus_scale", "radius_scale", "threshold_scale", "cap_scale")
FEEDBACKS = ("sampled", "expected", "mixed")


@dataclass(frozen=True, eq=False)
class Played:
    """What whole runs came to, differentiable in the hyperparameters.

    Attributes:
        regret: Final regret against the best policy that is safe for the CMDP's costs, `(runs,)`.
        positive_violation: Sum over the episodes of [<g_i, q>]^+, `(runs x m)`.
        violation: Sum over the episodes of <g_i, q>, `(runs x m)`.
        score: `(runs x 2)`; meaningless in itself, but its derivative is what the two parts of the objective, the regret and the
            positive violation summed over the constraints, owe to the way the hyperparameters change which trajectories are
            likely. Zero but with sampled feedback.
    """

    regret: Tensor
    positive_violation: Tensor
    violation: Tensor
    score: Tensor

    @property
    def parts(self) -> Tensor:
        """Regret, and positive violation summed over the constraints: `(runs x 2)`."""
        return torch.stack([self.regret, self.positive_violation.sum(-1)], dim=-1)

    @property
    def worst_violation(self) -> Tensor:
        """The violation of the worst constraint, `(runs,)`."""
        return worst_constraint(self.violation)

    @property
    def worst_positive_violation(self) -> Tensor:
        """The positive violation of the worst constraint, `(runs,)`."""
        return worst_constraint(self.positive_violation)


@dataclass(frozen=True, eq=False)
class Study:
    """WC-OPS on a distribution of instances, judged by (regret + weight * positive violation) / horizon.

    The positive violation is summed over the constraints, so that the objective is a sum over episodes.

    Attributes:
        environment: Makes a fresh simulator: called with the instance of each run, `(runs,)` int64, and a seed. Its processes may
            change over time, but must not look at the policy, since no derivative goes through them.
        instances: How many instances there are.
        horizon: Episodes of a run.
        weight: Of the positive violation in the objective.
        delta: Failure probability.
        options: Further arguments of `WCOPS`, and the scales that are not tuned.
    """

    environment: Callable[[Tensor, int], Simulator]
    instances: int
    horizon: int
    weight: float = 1.0
    delta: float = 0.01
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_callable("environment", self.environment, "a function of the instance of each run and a seed")
        whole_number("instances", self.instances, least=1)
        whole_number("horizon", self.horizon, least=1)
        not_negative("weight", self.weight)
        check_delta(self.delta)
        check_kind("options", self.options, Mapping, "further arguments of WCOPS by name")

    def objective(self, parts: Tensor) -> Tensor:
        """(regret + weight * positive violation) / horizon of `(... x 2)`: `(...)`."""
        return (parts[..., 0] + self.weight * parts[..., 1]) / self.horizon

    def play(
        self,
        scales: Mapping[str, Tensor | float],
        instances: Tensor,
        seed: int,
        *,
        feedback: str = "sampled",
        memory: float = 1.0,
        groups: Tensor | None = None,
        tick: Callable[[], Any] | None = None,
    ) -> Played:
        """Play whole runs; derivatives flow to `scales` in either mode.

        Args:
            scales: Some of `SCALES`, floats or `(runs,)`; the rest are those of `options`, or one.
            instances: The instance of each run, `(runs,)` int64.
            seed: Of the trajectories.
            feedback: "sampled": values and derivatives of sampled trajectories. "expected": the expectation of an episode in place
                of a sample, so that nothing is random. "mixed": the values of sampled trajectories, with the derivatives of the
                expectation of what an episode adds to the learner's state. Those of "sampled" are unbiased, but over hundreds of
                episodes their variance explodes; those of "mixed" are biased and stay useful.
            memory: The share of the state's derivatives that survives an episode; less than one is biased, and stable.
            groups: Which runs have the same expectation and so may be each other's baseline, `(runs,)` int64; by default those of
                the same instance, which is right where all have the same scales.
            tick: Called after every episode.
        """
        choice("feedback", feedback, FEEDBACKS)
        memory = number("memory", memory, "a number between 0 and 1", lambda found: 0 <= found <= 1)
        _check_whole("instances", instances, self.instances)
        if groups is not None:
            _check_whole("groups", groups, len(instances), len(instances))
        if tick is not None:
            check_callable("tick", tick, "a function without arguments, or None")
        env = self.environment(instances, seed)
        size: dict[str, Any] = {"runs": env.runs, "dtype": env.dtype, "device": env.device}
        options = {**size, **self.options, **check_scales(scales)}
        learner = WCOPS.scaled(env.cmdp.layout, env.cmdp.constraints, self.horizon, self.delta, **options)
        groups = instances if groups is None else groups
        return _play(learner, env, self.horizon, feedback, memory, _Baseline(groups.to(env.device)), tick)


class _Baseline:
    """Leave-one-out means over groups of runs; zero for a run that is alone."""

    def __init__(self, groups: Tensor) -> None:
        self._index = torch.unique(groups, return_inverse=True)[1]
        sizes = torch.bincount(self._index)
        self._others = (sizes[self._index] - 1).unsqueeze(-1)
        self._groups = len(sizes)

    def __call__(self, values: Tensor) -> Tensor:
        """The mean over the other runs of its group, for every run: `(runs x n)` to `(runs x n)`."""
        sums = values.new_zeros(self._groups, values.shape[-1]).index_add(0, self._index, values)
        return (sums[self._index] - values) * (self._others > 0) / self._others.clamp_min(1)


def _play(
    learner: WCOPS, env: Simulator, horizon: int, feedback: str, memory: float, baseline: _Baseline, tick: Callable[[], Any] | None
) -> Played:
    """All episodes. In forward mode nothing but the current state carries a tangent, so memory does not grow with the horizon."""
    m = env.cmdp.constraints
    comparator = safe_optimum(env.cmdp).occupancy.sum(-1)
    like: dict[str, Any] = {"dtype": env.dtype, "device": env.device}
    regret, score = torch.zeros(env.runs, **like), torch.zeros(env.runs, 2, **like)
    positive, violation = torch.zeros(env.runs, m, **like), torch.zeros(env.runs, m, **like)
    log_likelihood = torch.zeros(env.runs, **like)  # of the trajectories so far: its derivative is the score
    for _ in range(horizon):
        policy = learner.policy
        trajectory = env.rollout(policy)
        occupancy = occupancy_of(policy, env.cmdp.transitions, env.layout)
        pairs = occupancy.sum(-1)
        episode_loss = episode_regret(env.reward_values, comparator, pairs)
        costs = expected_value(env.cost_values, pairs.unsqueeze(-4))
        regret, positive, violation = regret + episode_loss, positive + costs.clamp_min(0), violation + costs.detach()
        if feedback == "sampled":
            # what an episode comes to in expectation depends on the trajectories before it, and on no others (the causal form)
            parts = torch.stack([episode_loss, costs.clamp_min(0).sum(-1)], dim=-1).detach()
            score = score + (parts - baseline(parts)) * log_likelihood.unsqueeze(-1)
            log_likelihood = memory * log_likelihood + _log_likelihood(policy, trajectory)
            learner.update(trajectory)
        else:
            sample = trajectory if feedback == "mixed" else None
            learner.learn(expected_evidence(learner, occupancy, env.reward_values, env.cost_values, sample))
        if memory < 1:
            fade(learner, memory)
        if tick is not None:
            tick()
    return Played(regret, positive, violation, score)


def _log_likelihood(policy: Tensor, trajectory: Trajectory) -> Tensor:
    """Sum over the layers of ln pi at what was played, `(runs,)`; transitions and feedback do not depend on the learner."""
    chosen = (trajectory.states * policy.shape[-1] + trajectory.actions).unsqueeze(-1)
    return policy.flatten(-2).gather(-1, chosen).squeeze(-1).log().sum(-1)


@dataclass(frozen=True, eq=False)
class Derivative:
    """Derivatives of whole runs.

    Attributes:
        played: The runs, without derivatives.
        pathwise: Of regret and positive violation along the trajectories that were sampled, `(runs x 2 [x P])`.
        score: What is added because other trajectories become likely, `(runs x 2 [x P])`. The sum of the two is unbiased.
    """

    played: Played
    pathwise: Tensor
    score: Tensor


def forward_derivative(
    study: Study, names: tuple[str, ...], log_scales: Tensor, directions: Tensor, instances: Tensor, seed: int, **options: Any
) -> Derivative:
    """The derivative of every run along a direction of its own, in forward mode: memory does not depend on the horizon.

    Args:
        names: Some of `SCALES`, P of them.
        log_scales: Their logarithms, `(runs x P)`.
        directions: `(runs x P)`.
        instances, seed, options: As in `Study.play`.

    Returns:
        Derivatives without the axis of parameters.
    """
    _check_point(study, names, log_scales)
    _check_point(study, names, directions, "directions")
    if directions.shape != log_scales.shape:
        raise InvalidInput(f"directions is {brief(directions)}; it must have the shape of log_scales, {tuple(log_scales.shape)}.")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(log_scales.detach().clone(), directions.clone())
        played = study.play(_named(names, dual), instances, seed, **options)
        parts, pathwise = forward_ad.unpack_dual(played.parts)
        tangent = forward_ad.unpack_dual(played.score).tangent
        plain = _without_derivatives(played)
    zeros = torch.zeros_like(parts)
    return Derivative(plain, zeros if pathwise is None else pathwise, zeros if tangent is None else tangent)


def reverse_derivative(
    study: Study, names: tuple[str, ...], log_scales: Tensor, instances: Tensor, seed: int, **options: Any
) -> Derivative:
    """The derivative of every run in all its parameters, in reverse mode: memory grows with the horizon, so for short ones.

    The arguments are those of `forward_derivative`; the derivatives have an axis of parameters, `(runs x 2 x P)`.
    """
    _check_point(study, names, log_scales)
    leaf = log_scales.detach().clone().requires_grad_()
    played = study.play(_named(names, leaf), instances, seed, **options)

    def gradient(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(tensor.sum(), leaf, retain_graph=True)[0]

    # runs are independent of each other, so the gradient of a sum over runs holds the gradient of each
    pathwise, score = (torch.stack([gradient(x[:, j]) for j in (0, 1)], dim=1) for x in (played.parts, played.score))
    return Derivative(_without_derivatives(played), pathwise, score)


def check_study(study: object) -> None:
    """Refuse what is no study."""
    check_kind("study", study, Study, "a Study")


def _check_point(study: object, names: Any, values: object, what: str = "log_scales") -> None:
    """Refuse what is not one value of each of the names for every run."""
    check_study(study)
    check_kind("names", names, list | tuple, "a tuple of names of scales")
    if not isinstance(values, Tensor) or not values.is_floating_point() or tuple(values.shape[1:]) != (len(names),):
        raise InvalidInput(f"{what} is {brief(values)}; it must be a floating-point tensor (runs x P) with P = {len(names)}.")


def _check_whole(name: str, values: object, below: int, length: int | None = None) -> None:
    """Refuse what is not one whole number from 0 to `below` - 1 for every run."""
    if (
        not isinstance(values, Tensor)
        or (values.dtype, values.dim(), values.device.type == "meta") != (torch.int64, 1, False)
        or length not in (None, len(values))
        or not len(values)
        or not bool(((values >= 0) & (values < below)).all())
    ):
        raise InvalidInput(f"{name} is {brief(values)}; it must be a tensor (runs,) of int64 from 0 to {below - 1}.")


def check_scales(scales: Mapping[str, Any]) -> dict[str, Any]:
    """The scales, if there are some and all of them exist."""
    check_kind("the scales", scales, Mapping, "numbers by the name of their scale")
    if not scales:
        raise InvalidInput("there are no scales; name at least one.")
    for name in scales:
        choice("a scale", name, SCALES)
    return dict(scales)


def _named(names: tuple[str, ...], log_scales: Tensor) -> dict[str, Tensor]:
    return {name: log_scales[:, j].exp() for j, name in enumerate(names)}


def _without_derivatives(played: Played) -> Played:
    return Played(*(x.detach() for x in (played.regret, played.positive_violation, played.violation, played.score)))
