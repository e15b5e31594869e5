"""Whether learners that promise to be safe from the first episode are: unsafe mixtures counted on random instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any

import torch
from matplotlib.figure import Figure

import torchcmdp as tc
from torchcmdp.metrics import is_unsafe

from ..program import Among, Count, Positive, bar, begin, guarded, protection, publish, table
from ..tune.evaluate import stage

WIDTHS, ACTIONS, CONSTRAINTS, SEEDS = (1, 3, 3, 1), 3, 2, 80_000
GAPS = (0.03, 0.3)  # Slater gaps of even and of odd instances
REWARDS = ("stochastic", "cyclic", "adversary")
SAFE = tuple(filter(guarded, tc.LEARNERS))
POINTS = 25  # of the curves
CURVES = {
    "regret": "cumulative regret (reward)",
    "unsafe": "unsafe episodes so far (% of all)",
    "weight": "weight of the baseline so far (%)",
}


@dataclass
class Options:
    """Count the episodes whose expected cost, of the mixture and under the true CMDP, is above zero for some constraint.

    Random CMDPs (1-3-3-1 states, 3 actions, 2 constraints; every other one with a Slater gap of 0.03, the rest with 0.3), one a
    run, with stochastic costs, and rewards that are stochastic, cyclic, or flee from the policy; DOPE, made for the first,
    plays those alone. With the theory's constants (scale 1) there must be none, up to a run in a hundred (delta); smaller scales
    show what is risked. Into LOGDIR/NAME go report.md and, with the curves of the first kind of rewards, report.png. The same
    command continues an interrupted study. The exit code is 1 if a promise was broken.

    Examples:
      python -m train study safe
      python -m train study safe --instances 100 --episodes 10000 --scales 1 0.1 0.03
    """

    instances: Count = 100  # Random CMDPs, one a run.
    episodes: Count = 10_000  # Episodes of every run; also the horizon.
    scales: tuple[Positive, ...] = (1.0,)  # Multiples of the theory's bonuses and radii.
    shares: tuple[Positive, ...] = (0.5,)  # Margins of the baseline, as shares of the Slater gap.
    learners: Annotated[tuple[str, ...], Among(SAFE)] = SAFE  # By name.
    rewards: Annotated[tuple[str, ...], Among(REWARDS)] = REWARDS  # Where rewards come from.
    seed: int = 0  # Of all random numbers of the episodes.
    name: str = "study-safe"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.


def main(arguments: Sequence[str]) -> int:
    """Play what is left and count; returns the exit code."""
    options, folder = begin(Options, arguments, "study safe")
    jobs = product(options.scales, options.shares, options.learners, options.rewards)
    rows, broken, curves = [], False, {}
    for scale, share, key, kind in bar([job for job in jobs if job[2] != "dope" or job[3] == REWARDS[0]], "safe"):
        name, job = tc.LEARNERS[key].name, (key, kind, share, scale)
        config = {"instances": options.instances, "episodes": options.episodes, "seed": options.seed, "points": POINTS}
        found = stage(folder, "_".join(map(str, job)), {**config, "job": job}, partial(count, options, *job))
        played, runs = options.instances * options.episodes, round(found["runs"] * options.instances)
        broken |= scale >= 1 and found["runs"] > 0.01
        cells = [f"{played:,}", f"{round(found['unsafe'] * played):,}", f"{runs}", f"{found['worst']:.3g}"]
        if kind == options.rewards[0] and share == options.shares[0]:
            curves[name, scale] = found["curves"]
        rows.append([name, *map(str, job[1:]), *cells, f"{found['weight']:.3f}", f"{found['regret']:.3f}"])
    head = ["learner", "rewards", "margin", "scale", "run-episodes", "unsafe", "runs with one", "worst cost", "mean lambda"]
    tc.plotting.save(folder / "report.png", figure(curves))
    publish(folder / "report.md", table([*head, "regret an episode"], rows))
    return 1 if broken else 0


def instances(options: Options) -> tc.LayeredCMDP:
    """The CMDPs, by seeds that are written here."""
    size, how = (WIDTHS, ACTIONS, CONSTRAINTS), {"feasibility": "binding"}
    return tc.stack_cmdps([tc.random_cmdp(*size, SEEDS + j, margin=GAPS[j % 2], **how) for j in range(options.instances)])


def count(options: Options, key: str, kind: str, share: float, scale: float) -> dict[str, Any]:
    """Of one learner in one setting: unsafe run-episodes and runs with one, as shares, the largest cost, lambda, regret, curves."""
    cmdp = instances(options)
    rewards: tc.Process = tc.Bernoulli(cmdp.rewards)
    if kind == "adversary":
        rewards = tc.OGDAdversary(cmdp.rewards, sign=-1, step=0.1)
    elif kind == "cyclic":
        blocks = [cmdp.rewards, (1 - cmdp.rewards) * cmdp.layout.pair_mask()]
        rewards = tc.Cyclic(blocks, max(1, options.episodes // 10), noise="bernoulli")
    env = tc.Simulator(cmdp, rewards, tc.Bernoulli(cmdp.costs, low=-1), runs=options.instances, seed=options.seed)
    given: dict[str, Any] = {"bonus_scale": scale, "radius_scale": scale, **protection(key, cmdp, share, seed=options.seed)}
    learner: Any = tc.LEARNERS[key](cmdp.layout, CONSTRAINTS, options.episodes, runs=options.instances, **given)
    tracker, worst = tc.Tracker(env), torch.full((options.instances,), -torch.inf, dtype=torch.float64)
    sums = torch.zeros(2, options.instances, dtype=torch.float64)  # unsafe episodes, weights of the baseline
    points, shares = {options.episodes * (j + 1) // POINTS for j in range(POINTS)}, []
    for t in range(1, options.episodes + 1):
        mixture = learner.mixture
        costs = (cmdp.costs * mixture.occupancy(cmdp.transitions, cmdp.layout).unsqueeze(1)).sum((-3, -2, -1))
        worst = torch.maximum(worst, costs.amax(-1))
        sums = sums + torch.stack([is_unsafe(costs).double(), mixture.weights[:, 0]])
        trajectory = env.rollout(learner.policy)
        tracker.update(mixture, trajectory)
        learner.update(trajectory)
        if t in points:
            tracker.record()
            shares.append(sums / t)
    ends = dict(zip(CURVES, (tracker.regret[:, -1], *sums), strict=True))
    curves = dict(zip(CURVES, (tracker.regret, *torch.stack(shares, -1)), strict=True))
    return {
        **{name: float(value.mean()) / options.episodes for name, value in ends.items()},
        "runs": float((sums[0] > 0).double().mean()),
        "worst": float(worst.max()),
        "curves": {"episodes": tracker.episodes.tolist(), **{name: values.tolist() for name, values in curves.items()}},
    }


def figure(curves: Mapping[tuple[str, float], Mapping[str, Any]]) -> Figure:
    """Regret, unsafe episodes and the weight of the baseline against episodes, of every learner and scale."""
    several = len({scale for _, scale in curves}) > 1
    named = {f"{name} at {scale:g}" if several else name: found for (name, scale), found in curves.items()}
    values = {label: {x: torch.tensor(found[x], dtype=torch.float64) for x in CURVES} for label, found in named.items()}
    ends = {label: {name: float(curve[:, -1].mean()) for name, curve in own.items()} for label, own in values.items()}
    least, most = (pick(ends, key=lambda label: ends[label]["weight"]) for pick in (min, max))
    best = min(ends, key=lambda label: ends[label]["regret"])
    without = [label for label in ends if ends[label]["unsafe"] == 0]
    titles = {
        "regret": f"Least regret: {best}, {ends[best]['regret']:,.0f}, with {ends[best]['unsafe']:.1%} of its episodes unsafe",
        "unsafe": f"Without an unsafe episode: {', '.join(without) or 'none'}",
        "weight": f"The baseline's weight is {ends[most]['weight']:.0%} in {most}, {ends[least]['weight']:.0%} in {least}",
    }
    scales = "at: multiple of the theory's bonuses and radii" if several else ""
    panels = []
    for name, ylabel in CURVES.items():
        factor = 1 if name == "regret" else 100
        drawn = {label: (found["episodes"], factor * values[label][name]) for label, found in named.items()}
        panels.append(tc.plotting.Panel(drawn, ylabel, titles[name], note=scales, of="instance"))
    return tc.plotting.draw(panels)
