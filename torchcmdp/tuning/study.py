"""Regret and violation of a learner as functions of its hyperparameters, with unbiased derivatives in forward and reverse mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.costs import CostModel
from torchcmdp.errors import InvalidInput, brief, check_delta, check_kind, choice, not_negative, number, whole_number
from torchcmdp.hyperparameters import connected
from torchcmdp.learners.base import Learner
from torchcmdp.learners.wcops import WCOPS
from torchcmdp.metrics import episode_regret
from torchcmdp.occupancy import expected_value, occupancy_of
from torchcmdp.planning import safe_optimum
from torchcmdp.simulator import Simulator
from torchcmdp.trajectory import Trajectory
from torchcmdp.tuning.evidence import expected_evidence, fade
from torchcmdp.tuning.unroll import Played, Unroll

# What of WC-OPS can be tuned, each a multiple of the paper's constant, so that it means the same at another horizon or size.
SCALES = ("eta_scale", "gamma_scale", "bonus_scale", "radius_scale", "threshold_scale", "cap_scale")
FEEDBACKS = ("sampled", "expected", "mixed")


@dataclass(frozen=True, eq=False)
class Study:
    """A learner on a distribution of instances, judged by (regret + weight * positive violation) / horizon.

    The positive violation is summed over the constraints, so that the objective is a sum over episodes. The regret is against the
    best policy that is safe for the CMDP's costs; where processes change, the CMDP has their means over the horizon.

    Attributes:
        environment: Makes a fresh simulator: called with the instance of each run, `(runs,)` int64, and a seed. Its processes may
            change over time; no derivative goes through processes that look at the policy, but the smoothed one does.
        instances: How many instances there are.
        horizon: Episodes of a run.
        weight: Of the positive violation in the objective.
        delta: Failure probability.
        options: Further arguments of the learner, such as its cost model, and the scales that are not tuned.
        learner: The class of the learner; WC-OPS by default.
    """

    environment: Callable[[Tensor, int], Simulator]
    instances: int
    horizon: int
    weight: float = 1.0
    delta: float = 0.01
    options: Mapping[str, Any] = field(default_factory=dict)
    learner: type[Learner] = WCOPS

    def __post_init__(self) -> None:
        check_kind("environment", self.environment, Callable, "a function of the instance of each run and a seed")
        whole_number("instances", self.instances, least=1)
        whole_number("horizon", self.horizon, least=1)
        not_negative("weight", self.weight)
        check_delta(self.delta)
        check_kind("options", self.options, Mapping, "further arguments of the learner by name")
        if not (isinstance(self.learner, type) and issubclass(self.learner, Learner)):
            raise InvalidInput(f"learner is {brief(self.learner)}; it must be a class of learners, such as WCOPS.")

    @property
    def names(self) -> tuple[str, ...]:
        """What can be tuned: the learner's hyperparameters, multiples of their defaults, and the margin of its cost model."""
        margin = ("margin",) if "costs" in self.learner.__signature__.parameters else ()
        return (*self.learner.multiples(), *self.learner.hyperparameters, *margin)

    def check(self, scales: Mapping[str, Any]) -> dict[str, Any]:
        """The scales, if there are some and all of them can be tuned."""
        check_kind("the scales", scales, Mapping, "numbers by the name of their scale")
        if not scales:
            raise InvalidInput("there are no scales; name at least one.")
        for name in scales:
            choice("a scale", name, self.names)
        return dict(scales)

    def make(self, env: Simulator, scales: Mapping[str, Tensor | float]) -> Learner:
        """A fresh learner for an environment, with some of `names`, floats or `(runs,)`; the rest are those of `options`."""
        options = {**self.options, **self.check(scales)}
        if "margin" in options:
            costs: CostModel = options.get("costs") or self._usual_costs()
            options["costs"] = type(costs)(**{**costs.settings(), "margin": options.pop("margin")})
        return self.learner.for_env(env, horizon=self.horizon, delta=self.delta, **options)

    def _usual_costs(self) -> CostModel:
        """The cost model that the learner has where none is asked for; another with a margin would be another learner."""
        usual: type[CostModel] | None = getattr(self.learner, "usual_costs", None)
        if usual is None:
            raise InvalidInput(
                f"margin is a setting of a cost model, and {self.learner.__name__} has none unless asked; name one in options, "
                'such as {"costs": PriorCosts()}.'
            )
        return usual()

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
        distinct_runs: int | None = None,
        tick: Callable[[], Any] | None = None,
    ) -> Played:
        """Play whole runs; derivatives flow to `scales` in either mode. Where they carry none, blocks are played in compiled code.

        Args:
            scales: Some of `names`, floats or `(runs,)`; the rest are those of `options`, or defaults.
            instances: The instance of each run, `(runs,)` int64.
            seed: Of the trajectories.
            feedback: "sampled": values and derivatives of sampled trajectories. "expected": the expectation of an episode in place
                of a sample, so that nothing is random. "mixed": the values of sampled trajectories, with the derivatives of the
                expectation of what an episode adds to the learner's state. Those of "sampled" are unbiased, but over hundreds of
                episodes their variance explodes; those of "mixed" are biased and stay useful.
            memory: The share of the state's derivatives that survives an episode; less than one is biased, and stable.
            groups: Which runs have the same expectation and so may be each other's baseline, `(runs,)` int64; by default those of
                the same instance, which is right where all have the same scales.
            distinct_runs: If given, run i has the random numbers of run i % distinct_runs.
            tick: Called after every episode.
        """
        choice("feedback", feedback, FEEDBACKS)
        memory = number("memory", memory, "a number between 0 and 1", lambda found: 0 <= found <= 1)
        _check_whole("instances", instances, self.instances)
        if groups is not None:
            _check_whole("groups", groups, len(instances), len(instances))
        check_kind("tick", tick, Callable | None, "a function without arguments, or None")
        env = self.environment(instances, whole_number("seed", seed, least=0))
        if distinct_runs is not None:
            env.share_streams(distinct_runs)
        learner = self.make(env, scales)
        if feedback == "sampled" and not any(isinstance(x, Tensor) and connected(x) for x in scales.values()):
            whole = Unroll(learner, env, self.horizon)
            whole.advance(self.horizon, tick)
            return whole.played()
        if not isinstance(learner, WCOPS) and feedback != "sampled":
            raise InvalidInput(f'feedback is {feedback!r}, which only WCOPS has; of {type(learner).__name__} take "sampled".')
        groups = torch.unique(instances if groups is None else groups, return_inverse=True)[1].to(env.device)
        return _play(learner, env, self.horizon, feedback, memory, groups, tick)


def _of_others(values: Tensor, groups: Tensor) -> Tensor:
    """For every run the mean over the others of its group, from 0 on: `(runs x n)` to `(runs x n)`; zero where it is alone."""
    others = (torch.bincount(groups)[groups] - 1).unsqueeze(-1)
    sums = torch.zeros_like(values).index_add(0, groups, values)
    return (sums[groups] - values) * (others > 0) / others.clamp_min(1)


def _play(
    learner: Learner, env: Simulator, horizon: int, feedback: str, memory: float, groups: Tensor, tick: Callable[[], Any] | None
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
            score = score + (parts - _of_others(parts, groups)) * log_likelihood.unsqueeze(-1)
            log_likelihood = memory * log_likelihood + _log_likelihood(policy, trajectory)
            learner.update(trajectory)
        else:
            assert isinstance(learner, WCOPS)
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
        names: Some of `study.names`, P of them.
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
        played = study.play(named(names, dual), instances, seed, **options)
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
    played = study.play(named(names, leaf), instances, seed, **options)

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


def named(names: tuple[str, ...], log_scales: Tensor) -> dict[str, Tensor]:
    """By name the scales of every run, of their logarithms `(runs x P)`."""
    return {name: log_scales[:, j].exp() for j, name in enumerate(names)}


def _without_derivatives(played: Played) -> Played:
    return Played(*(x.detach() for x in (played.regret, played.positive_violation, played.violation, played.score)))
