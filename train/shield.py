"""A policy network behind a shield: trained by policy gradient through the safe layer, beside two networks without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp import plotting
from torchcmdp.metrics import worst_constraint
from torchcmdp.nn import SafeOccupancy
from torchcmdp.occupancy import expected_value
from train import check_positive, experiment_folder, parse
from train.bench import table
from train.comparison import Curves, SeedNetworks, steps_of, with_interval

METHODS = ("shield", "penalty", "unprotected")
FEATURES, HIDDEN = 8, 32
POINTS = 100


@dataclass
class Options:
    """Train a policy network three ways on one random CMDP, and compare what it earns and how unsafe it is while it learns.

    The network sees features of a state and gives logits. All three ways estimate the gradient of the reward from the same number
    of played episodes (REINFORCE), and all know the transitions and the mean costs, but no rewards:
    "shield" projects the logits' policy to the nearest safe one in KL and differentiates through the projection;
    "penalty" adds the exact expected costs with Lagrange multipliers, which rise while a constraint is broken;
    "unprotected" only wants reward.
    Into LOGDIR/NAME go shield.png, shield.md and a folder of TensorBoard events for each way.

    Examples:
      python -m train shield
      python -m train shield --steps 200 --runs 4 --name quick
      tensorboard --logdir runs
    """

    steps: int = 1_000
    """Gradient steps."""
    episodes: int = 16
    """Episodes that each network plays for a step."""
    runs: int = 16
    """Independent networks, trained as one batch; the intervals are 95% over them."""
    learning_rate: float = 0.01
    """Of Adam, for the networks."""
    multiplier_rate: float = 0.05
    """Of the Lagrange multipliers."""
    seed: int = 0
    """Of the CMDP, the features, the networks and the episodes."""
    name: str = "shield"
    """Folder of the results inside LOGDIR."""
    logdir: str = "runs"
    """Folder of all experiments; point TensorBoard at it."""


def main(arguments: Sequence[str]) -> int:
    """Train all three and write what came of it; returns the exit code."""
    options = parse(Options, arguments, prog="python -m train shield")
    check_positive(steps=options.steps, episodes=options.episodes, runs=options.runs)
    check_positive(learning_rate=options.learning_rate, multiplier_rate=options.multiplier_rate)
    folder = experiment_folder(options.logdir, options.name)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the tensors are small
    cmdp = tc.random_cmdp(seed=options.seed)
    curves = {method: train(method, cmdp, options, folder / method) for method in METHODS}
    figure = plotting.draw(
        [
            plotting.Panel({name: (c.steps, c["Metrics/EpRet"]) for name, c in curves.items()}, "expected reward an episode"),
            plotting.Panel({name: (c.steps, c["Violation/positive"]) for name, c in curves.items()}, "violation an episode"),
        ]
    )
    plotting.save(folder / "shield.png", figure)
    text = report(curves, cmdp)
    (folder / "shield.md").write_text(text + "\n")
    print(text)
    print(f"\nCurves: {folder / 'shield.png'}; TensorBoard: tensorboard --logdir {options.logdir}")
    return 0


def train(method: str, cmdp: tc.LayeredCMDP, options: Options, folder: Path | None) -> Curves:
    """Train one network a run in one way; the curves are over the episodes that each has played."""
    runs, batch = options.runs, options.episodes
    generator = torch.Generator().manual_seed(options.seed)
    features = torch.randn(*cmdp.layout.pair_shape[:2], FEATURES, generator=generator, dtype=torch.float64)
    network = SeedNetworks((FEATURES, HIDDEN, cmdp.layout.actions), runs, options.seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=options.learning_rate)
    shield = SafeOccupancy(cmdp.layout, cmdp.constraints, transitions=cmdp.transitions, costs=cmdp.costs)
    feedback = (tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1))
    env = tc.Simulator(cmdp, *feedback, runs=runs * batch, seed=options.seed)
    multipliers = torch.zeros(runs, cmdp.constraints, dtype=torch.float64)
    curves = Curves(folder)
    for step in steps_of(options.steps, method, quiet=not sys.stderr.isatty()):
        logits = network(features.expand(runs, *features.shape))
        if method == "shield":
            policy = shield(logits=logits).policy
        else:
            policy = logits.softmax(-1) * cmdp.layout.pair_mask()
        occupancy = tc.pair_occupancy_of(policy, cmdp.transitions)
        costs = expected_value(cmdp.costs, occupancy.unsqueeze(-4))
        trajectory = env.rollout(policy.repeat_interleave(batch, 0))
        loss = -reinforce(policy, trajectory)
        if method == "penalty":
            loss = loss + (multipliers * costs).sum(-1)
            multipliers = (multipliers + options.multiplier_rate * costs.detach()).clamp_min(0)
        optimiser.zero_grad()
        loss.sum().backward()
        optimiser.step()
        if step % max(1, options.steps // POINTS) == 0 or step + 1 == options.steps:
            measured = {"Metrics/EpRet": expected_value(cmdp.rewards, occupancy), "Violation/positive": violation(costs)}
            curves.add((step + 1) * batch, measured)
    curves.close()
    return curves


def reinforce(policy: Tensor, trajectory: tc.Trajectory) -> Tensor:
    """Something whose gradient estimates that of the expected reward: ln pi of what was done, times how well it went, `(runs,)`.

    Args:
        policy: `(runs x L x S x A)`, which has played the same number of episodes in every run, `(runs episodes x L)`.
    """
    states, actions, rewards = (
        x.unflatten(0, (len(policy), -1)) for x in (trajectory.states, trajectory.actions, trajectory.rewards)
    )
    pairs = (states * policy.shape[-1] + actions).transpose(1, 2)
    taken = policy.flatten(-2).gather(-1, pairs).log()
    to_go = rewards.flip(-1).cumsum(-1).flip(-1).transpose(1, 2)
    return (taken * (to_go - to_go.mean(-1, keepdim=True))).mean(-1).sum(-1)


def violation(costs: Tensor) -> Tensor:
    """By how much the worst constraint is broken: `(runs,)` from `(runs x m)`, zero where none is."""
    return worst_constraint(costs).clamp_min(0)


def report(curves: dict[str, Curves], cmdp: tc.LayeredCMDP) -> str:
    """The table and what to read it against."""
    rows = []
    for name, curve in curves.items():
        reward, unsafe = curve["Metrics/EpRet"], curve["Violation/positive"]
        last = slice(-max(1, reward.shape[1] // 10), None)
        columns = (
            reward.mean(1),
            unsafe.mean(1),
            reward[:, last].mean(1),
            unsafe[:, last].mean(1),
            (unsafe > 1e-6).double().mean(1),
        )
        rows.append([name, *[with_interval(column) for column in columns]])
    header = [
        "policy",
        "reward while training",
        "violation while training",
        "reward at the end",
        "violation at the end",
        "unsafe share",
    ]
    optima = f"{float(tc.safe_optimum(cmdp).value):.3f}; without constraints {float(tc.unconstrained_optimum(cmdp).value):.3f}"
    runs = len(next(iter(curves.values()))["Metrics/EpRet"])
    played = int(next(iter(curves.values())).steps[-1])
    return (
        f"{table(header, rows)}\n\nPer episode, mean over {runs} networks +- 95% interval; {played:,} episodes each; "
        f"at the end: the last tenth. Best safe reward: {optima}."
    )
