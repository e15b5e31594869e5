"""The contracts of a learner, a process and an environment, to be called in the tests of anybody who writes one.

Each check makes the thing several times, plays a few episodes with it, and raises an AssertionError of one sentence at the first
promise that is broken::

    def test_mine() -> None:
        tc.testing.check_learner(lambda layout, constraints, **options: Mine(layout, constraints, horizon=100, **options))
        tc.testing.check_process(lambda cmdp, runs: MyRewards(cmdp.rewards), "rewards")
        tc.testing.check_environment(lambda runs: MyEnvironment(runs, seed=0))
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import check_dtype, check_kind, check_tensor, choice, not_negative, switch, whole_number
from torchcmdp.instances import random_cmdp
from torchcmdp.layout import Layout
from torchcmdp.processes import Bernoulli
from torchcmdp.simulator import Simulator
from torchcmdp.trajectory import Trajectory

__all__ = ["check_environment", "check_learner", "check_policy", "check_process"]

RUNS = 3
# By how much the rows of a policy may miss a sum of one, in the types that are checked by default.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
# Midpoints of the unit interval over which feedback is averaged, and how near to its mean the average has to be.
MIDPOINTS, NEAR = 1000, 0.01
CONTINUES = "does not continue bit for bit from its state_dict"
STRAYED = "left the device that it was made on"


def check_learner(
    make: Callable[..., Any],
    cmdp: LayeredCMDP | None = None,
    *,
    episodes: int = 6,
    dtypes: Sequence[torch.dtype] = tuple(ROUNDING),
    tolerance: float = 1e-9,
    meta: Callable[..., Any] | None = None,
) -> None:
    """Valid policies, the same bits again, runs of their own, states that continue, types, and JSON.

    Args:
        make: `make(layout, constraints, runs=, dtype=, device=)` gives a fresh learner, each time the same; with `first_run=` too
            where it has random numbers of its own, which an attribute of that name says.
        cmdp: What it plays; by default a small one with padding and two constraints.
        episodes: How many it plays.
        dtypes: The floating-point types that it supports; most is checked in the first.
        tolerance: By how much a run's policy may depend on its batch: a solver stops earlier or later by its company.
        meta: As `make`, for a learner whose episodes read no value: they are played on the meta device, which has none.
    """
    cmdp = _asked(make, cmdp, episodes, dtypes)
    not_negative("tolerance", tolerance)
    check_kind("meta", meta, Callable | None, "None, or a function as make is")
    for dtype in dtypes:
        _check_playing(make, cmdp.to(dtype=dtype), episodes)
    seen = _play(_learner(make, cmdp, RUNS), _simulator(cmdp, RUNS), episodes)
    _check_learners_runs(make, cmdp, seen, tolerance)
    pair = _learner(make, cmdp, RUNS), _learner(make, cmdp, RUNS)
    _check_state(*pair, seen, "update", _looked)
    if meta is not None:
        away = cmdp.to("meta")
        learner = _learner(meta, away, RUNS)
        _play(learner, _simulator(away, RUNS), 1)
        _hold(learner.policy.device.type == "meta", learner, STRAYED)


def check_process(
    make: Callable[[LayeredCMDP, int], Any],
    kind: str = "costs",
    cmdp: LayeredCMDP | None = None,
    *,
    episodes: int = 6,
    dtypes: Sequence[torch.dtype] = tuple(ROUNDING),
    meta: bool = True,
) -> None:
    """Values and feedback in their range and of their shape, runs of their own, states that continue, types, and JSON.

    Args:
        make: `make(cmdp, runs)` gives a fresh process for that CMDP, each time and for each run the same.
        kind: "rewards" or "costs".
        cmdp: By default a small one with padding and two constraints.
        episodes: How many the process lives through.
        dtypes: The floating-point types that it supports; most is checked in the first.
        meta: Whether its episodes read no value, so that they can be played on the meta device.
    """
    cmdp = _asked(make, cmdp, episodes, dtypes)
    choice("kind", kind, ("rewards", "costs"))
    switch("meta", meta)
    policies = [_random_policy(cmdp.layout, RUNS, seed) for seed in range(episodes)]
    for dtype in dtypes:
        process = make(cmdp.to(dtype=dtype), RUNS)
        for policy in policies:
            _check_values(process, kind, cmdp, dtype)
            process.advance(policy.to(dtype))
    own = cmdp.rewards.shape if kind == "rewards" else cmdp.costs.shape
    _check_processes_runs(make, cmdp, policies, own)
    pair = make(cmdp, RUNS), make(cmdp, RUNS)
    _check_state(*pair, policies, "advance", lambda process: process.values.expand(RUNS, *own))
    if meta:
        process = make(cmdp.to("meta"), RUNS)
        for policy in policies[:2]:
            process.advance(policy.to("meta"))
        _hold(process.values.device.type == "meta", process, STRAYED)


def check_environment(make: Callable[[int], Any], *, episodes: int = 4, meta: Callable[[int], Any] | None = None) -> None:
    """Connected episodes of the policy that was given, runs of their own, states that continue, and JSON.

    Args:
        make: `make(runs)` gives a fresh environment of that many runs; the first of many are those of few.
        episodes: How many are played.
        meta: As `make`, for an environment on the meta device, which has no values to read.
    """
    _asked(make, None, episodes)
    check_kind("meta", meta, Callable | None, "None, or a function as make is")
    env = make(RUNS)
    layout: Layout = env.layout
    policies = [_random_policy(layout, RUNS, seed).to(env.device, env.dtype) for seed in range(episodes)]
    seen = [env.rollout(policy) for policy in policies]
    for trajectory in seen:
        _check_trajectory(env, trajectory)
    last = layout.pair_mask(env.device).cumsum(-1).argmax(-1)  # the last action that a state has
    certain = torch.nn.functional.one_hot(last, layout.actions).to(policies[0]) * layout.pair_mask(env.device)
    played = env.rollout(certain)
    fits = played.actions == last[torch.arange(layout.layers, device=env.device), played.states]
    _hold(fits.all(), env, "played an action of probability zero")
    again, few, stirred = make(RUNS), make(RUNS - 1), make(RUNS)
    for policy, trajectory in zip(policies, seen, strict=True):
        _hold(_equal(again.rollout(policy), trajectory), env, "gave other episodes when it was made again")
        other, alone = stirred.rollout(torch.cat([policy[:-1], policies[0][:1].flip(-1)])), few.rollout(policy[:-1])
        own = _runs(trajectory, slice(RUNS - 1))
        _hold(_equal(_runs(other, slice(RUNS - 1)), own), env, "let the policy of one run change the episodes of another")
        _hold(_equal(alone, own), env, "gave a run other episodes in a smaller batch")
    straight, resumed = make(RUNS), make(RUNS)
    straight.rollout(policies[0])
    for policy in policies[:2]:
        resumed.rollout(policy)
    resumed.load_state_dict(_stored(straight.state_dict()))
    for policy, trajectory in zip(policies[1:], seen[1:], strict=True):
        _hold(_equal(resumed.rollout(policy), trajectory), env, CONTINUES)
    _check_config(make(RUNS), make(RUNS))
    if meta is not None:
        away = meta(RUNS)
        trajectory = away.rollout(policies[0].to("meta"))
        _hold(trajectory.states.device.type == "meta", away, STRAYED)


def check_policy(
    policy: Tensor,
    layout: Layout,
    runs: int,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    of: object = "a learner",
) -> None:
    """Probabilities `(runs x L x S x A)`: not negative, rows that sum to one up to the tolerance, zero in the padding."""
    check_tensor("policy", policy)
    check_kind("layout", layout, Layout, "a Layout")
    check_dtype(dtype)
    not_negative("tolerance", tolerance)
    shape = (whole_number("runs", runs, least=1), *layout.pair_shape)
    _hold(tuple(policy.shape) == shape, of, f"has a policy of shape {tuple(policy.shape)}; expected (runs x L x S x A) = {shape}")
    _hold(policy.dtype == dtype, of, f"has a policy of {policy.dtype}; expected {dtype}")
    _hold((policy >= 0).all(), of, "has a policy with a negative entry or NaN")
    _hold((policy[:, ~layout.pair_mask(policy.device)] == 0).all(), of, "has a policy that is not zero in the padding")
    excess = (policy.sum(-1) - layout.state_mask(policy.device).to(dtype)).abs().max()
    _hold(excess < tolerance, of, f"has a policy with a row that misses a sum of one by {float(excess):g}")


def _check_playing(make: Callable[..., Any], cmdp: LayeredCMDP, episodes: int) -> None:
    """What a learner shows in every episode."""
    learner, env, rounding = _learner(make, cmdp, RUNS), _simulator(cmdp, RUNS), ROUNDING.get(cmdp.dtype, 1e-2)
    for _ in range(episodes):
        policy = learner.policy
        check_policy(policy, cmdp.layout, RUNS, cmdp.dtype, rounding, learner)
        if hasattr(learner, "mixture"):
            _check_mixture(learner, cmdp.layout, cmdp.dtype, rounding)
        kept = policy.clone()
        learner.update(env.rollout(policy))
        _hold(torch.equal(policy, kept), learner, "wrote into a policy that it had handed out")
        for tag, value in getattr(learner, "diagnostics", dict)().items():
            _hold(tuple(value.shape) == (RUNS,), learner, f"has diagnostics {tag} of shape {tuple(value.shape)}; expected (runs,)")
    check_policy(learner.policy, cmdp.layout, RUNS, cmdp.dtype, rounding, learner)


def _check_learners_runs(make: Callable[..., Any], cmdp: LayeredCMDP, seen: list[Trajectory], tolerance: float) -> None:
    """The same trajectories give the same bits, and no run sees another."""
    first, second, stirred = (_learner(make, cmdp, RUNS) for _ in range(3))
    for trajectory in seen:
        _looked(second)
        rewards, costs = trajectory.rewards.clone(), trajectory.costs.clone()
        rewards[0], costs[0] = 1 - rewards[0], -costs[0]
        first.update(trajectory)
        second.update(trajectory)
        stirred.update(replace(trajectory, rewards=rewards, costs=costs))
    _hold(torch.equal(first.policy, second.policy), first, "learned something else from the same trajectories")
    apart = (first.policy - stirred.policy)[1:].abs().max()
    _hold(apart <= tolerance, first, "let the feedback of one run change the policy of another")
    for j in range(RUNS):
        alone = _learner(make, cmdp, 1, {"first_run": j} if hasattr(first, "first_run") else {})
        own = _play(alone, _simulator(cmdp, 1, first_run=j), len(seen))
        same = all(torch.equal(a.actions[0], b.actions[j]) for a, b in zip(own, seen, strict=True))
        near = (alone.policy[0] - first.policy[j]).abs().max() <= tolerance
        _hold(same and near, first, f"gave run {j} another policy alone than in a batch of {RUNS}")


def _check_state(straight: Any, resumed: Any, seen: Sequence[Any], step: str, shown: Callable[[Any], Tensor]) -> None:
    """A state goes through a file, into a thing that has seen others, and continues to the last bit; and what it says of itself."""
    half = len(seen) // 2
    for each in seen[:half]:
        getattr(straight, step)(each)
    for each in seen[-2:]:
        getattr(resumed, step)(each)
    shown(resumed)  # whatever it has computed before must be forgotten
    resumed.load_state_dict(_stored(straight.state_dict()))
    for each in seen[half:]:
        _hold(torch.equal(shown(straight), shown(resumed)), straight, CONTINUES)
        getattr(straight, step)(each)
        getattr(resumed, step)(each)
    _hold(_equal(straight.state_dict(), resumed.state_dict()), straight, CONTINUES)
    _check_config(straight, resumed)


def _looked(learner: Any) -> Tensor:
    """The policy, after a look at the diagnostics, which must not change anything."""
    getattr(learner, "diagnostics", dict)()
    policy: Tensor = learner.policy
    return policy


def _check_values(process: Any, kind: str, cmdp: LayeredCMDP, dtype: torch.dtype) -> None:
    """The values of an episode, and the feedback that they give."""
    low, shape = (0.0, cmdp.rewards.shape) if kind == "rewards" else (-1.0, cmdp.costs.shape)
    values: Tensor = process.values
    wanted = (tuple(shape), (RUNS, *shape))
    _hold(tuple(values.shape) in wanted, process, f"has values of shape {tuple(values.shape)}; expected {wanted[0]} or {wanted[1]}")
    _hold(values.dtype == dtype, process, f"has values of {values.dtype}; expected {dtype}")
    _hold(((values >= low) & (values <= 1)).all(), process, f"has values outside of [{low:g}, 1]")
    _hold((values[..., ~cmdp.layout.pair_mask()] == 0).all(), process, "has values that are not zero in the padding")
    real = values[..., cmdp.layout.pair_mask()].flatten()
    uniforms = ((torch.arange(MIDPOINTS, dtype=torch.float64) + 0.5) / MIDPOINTS)[:, None].expand(-1, len(real))
    feedback = process.observe(real.expand(MIDPOINTS, -1), uniforms)
    fits = feedback.shape == uniforms.shape and feedback.dtype == dtype
    _hold(fits, process, "gives feedback of another shape or type than its values")
    _hold(((feedback >= low) & (feedback <= 1)).all(), process, f"gives feedback outside of [{low:g}, 1]")
    _hold((feedback.mean(0) - real).abs().max() < NEAR, process, "gives feedback whose mean is not its value")
    _hold((feedback <= process.largest(real) + NEAR).all(), process, "gives feedback above what it says is the largest")


def _check_processes_runs(make: Callable[..., Any], cmdp: LayeredCMDP, policies: list[Tensor], own: torch.Size) -> None:
    """Values that were handed out stay, stationary ones are, and no run sees another."""
    together, stirred, alone = make(cmdp, RUNS), make(cmdp, RUNS), make(cmdp, 1)
    first = together.values.clone()
    for policy in policies:
        values, kept = together.values, together.values.clone()
        together.advance(policy)
        stirred.advance(torch.cat([policy[:1].flip(-1), policy[1:]]))
        alone.advance(policy[-1:])
        _hold(torch.equal(values, kept), together, "wrote into values that it had handed out")
        _hold(not together.stationary or torch.equal(together.values, first), together, "is called stationary and changed")
        here, there = together.values.expand(RUNS, *own), stirred.values.expand(RUNS, *own)
        _hold(torch.equal(here[1:], there[1:]), together, "let the policy of one run change the values of another")
        _hold(torch.equal(here[-1], alone.values.expand(1, *own)[0]), together, "gave a run other values alone than in a batch")


def _check_trajectory(env: Any, trajectory: Trajectory) -> None:
    """Shapes, types, and a path from the first state to the last through states that exist."""
    steps, layout = (RUNS, env.layout.layers), env.layout
    wanted = {"states": steps, "actions": steps, "next_states": steps, "rewards": steps, "costs": (*steps, env.constraints)}
    for name, shape in wanted.items():
        tensor = getattr(trajectory, name)
        dtype = env.dtype if name in ("rewards", "costs") else torch.int64
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        fits = tuple(tensor.shape) == shape and tensor.dtype == dtype
        _hold(fits, env, f"has {name} of {found}; expected {dtype} of shape {shape}")
        _hold(not tensor.requires_grad, env, f"has {name} that carry a gradient")
    connected = torch.equal(trajectory.states[:, 1:], trajectory.next_states[:, :-1])
    ends = (trajectory.states[:, 0] == 0).all() and (trajectory.next_states[:, -1] == 0).all()
    _hold(connected and ends, env, "has states that are no path from the first state to the last")
    states, actions, widths = trajectory.states, trajectory.actions, torch.tensor(layout.widths[:-1], device=env.device)
    real = (states >= 0) & (states < widths) & (actions >= 0) & (actions < layout.actions)
    _hold(real.all(), env, "was in a state, or took an action, that does not exist")
    rewards, costs = trajectory.rewards, trajectory.costs
    _hold(((rewards >= 0) & (rewards <= 1)).all(), env, "gave rewards outside of [0, 1]")
    _hold((costs.abs() <= 1).all(), env, "gave costs outside of [-1, 1]")


def _check_config(one: Any, two: Any) -> None:
    """JSON that says the same of things made alike; it is what decides whether a run may be resumed."""
    config = one.config()
    try:
        plain = json.loads(json.dumps(config))
    except (TypeError, ValueError):
        plain = None
    _hold(plain == config, one, "has a config() that JSON does not give back as it was")
    _hold(two.config() == config, one, "has another config() when it is made again")


def _hold(holds: Any, subject: object, sentence: str) -> None:
    """Raised by hand, so that the checks hold under `python -O` and without a test runner."""
    if not bool(holds):
        name = subject if isinstance(subject, str) else type(subject).__name__
        raise AssertionError(f"{name} {sentence}.")


def _asked(make: object, cmdp: LayeredCMDP | None, episodes: int, dtypes: Sequence[torch.dtype] = (torch.float64,)) -> LayeredCMDP:
    """What is played, in the first of the types; refused if the check is not asked for in the way it is written."""
    check_kind("make", make, Callable, "a function that makes what is checked")
    whole_number("episodes", episodes, least=2)
    check_kind("dtypes", dtypes, list | tuple, "a list of floating-point types")
    check_kind("dtypes", dtypes or None, list | tuple, "a list of at least one floating-point type")
    for dtype in dtypes:
        check_dtype(dtype)
    cmdp = random_cmdp((1, 3, 2, 4, 1), actions=3, constraints=2, seed=3) if cmdp is None else cmdp
    check_kind("cmdp", cmdp, LayeredCMDP, "a LayeredCMDP, such as random_cmdp() gives")
    return cmdp.to(dtype=dtypes[0])


def _learner(make: Callable[..., Any], cmdp: LayeredCMDP, runs: int, luck: dict[str, int] | None = None) -> Any:
    return make(cmdp.layout, cmdp.constraints, runs=runs, dtype=cmdp.dtype, device=cmdp.device, **(luck or {}))


def _check_mixture(learner: Any, layout: Layout, dtype: torch.dtype, rounding: float) -> None:
    """What a learner says that it draws its policy from: probabilities, policies, and the one that it plays among them."""
    weights, policies, played = learner.mixture.weights, learner.mixture.policies, learner.policy
    fits = (weights >= 0).all() and ((weights.sum(-1) - 1).abs() < rounding).all()
    _hold(fits, learner, "has a mixture whose weights are no probabilities")
    for each in policies.unbind(1):
        check_policy(each, layout, RUNS, dtype, rounding, learner)
    drawn = (policies == played.unsqueeze(1)).flatten(2).all(-1) & (weights > 0)
    _hold(drawn.any(-1).all(), learner, "plays a policy that is not in its mixture")


def _simulator(cmdp: LayeredCMDP, runs: int, first_run: int = 0) -> Simulator:
    costs = Bernoulli(cmdp.costs, low=-1) if cmdp.constraints else None
    return Simulator(cmdp, Bernoulli(cmdp.rewards), costs, runs=runs, first_run=first_run)


def _play(learner: Any, env: Simulator, episodes: int) -> list[Trajectory]:
    seen = []
    for _ in range(episodes):
        seen.append(env.rollout(learner.policy))
        learner.update(seen[-1])
    return seen


def _random_policy(layout: Layout, runs: int, seed: int) -> Tensor:
    weights = torch.rand(runs, *layout.pair_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    weights = torch.where(layout.pair_mask() | ~layout.state_mask()[..., None], weights, 0.0)
    return weights / weights.sum(-1, keepdim=True) * layout.pair_mask()


def _stored(state: Any) -> Any:
    """A state as it comes back from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _equal(one: Any, two: Any) -> bool:
    """Whether two states, trajectories or tensors are the same to the last bit."""
    if isinstance(one, Trajectory):
        return all(torch.equal(getattr(one, field.name), getattr(two, field.name)) for field in fields(one))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    return torch.equal(one, two) if isinstance(one, Tensor) else bool(one == two)


def _runs(trajectory: Trajectory, runs: slice) -> Trajectory:
    return Trajectory(*(getattr(trajectory, field.name)[runs] for field in fields(trajectory)))
