"""A policy network behind a shield: trained by policy gradient through the safe layer, beside two networks without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.metrics import worst_constraint
from torchcmdp.nn import SafeOccupancy
from torchcmdp.occupancy import expected_value

from .comparison import REWARD, UNSAFE, Curves, SeedNetworks, learn, rounded
from .program import Count, Positive, begin, look_at, publish, table

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
      python -m train tensorboard
    """

    steps: Count = 1_000  # Gradient steps.
    episodes: Count = 16  # Episodes that each network plays for a step.
    runs: Count = 16  # Independent networks, trained as one batch; the intervals are 95% over them.
    learning_rate: Positive = 0.01  # Of Adam, for the networks.
    multiplier_rate: Positive = 0.05  # Of the Lagrange multipliers.
    seed: int = 0  # Of the CMDP, the features, the networks and the episodes.
    name: str = "shield"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments; point TensorBoard at it.


def main(arguments: Sequence[str]) -> None:
    """Train all three and write what came of it."""
    options, folder = begin(Options, arguments, "shield")
    cmdp = tc.random_cmdp(seed=options.seed)
    curves = {method: train(method, cmdp, options, folder / method) for method in METHODS}
    where = f"Curves: {folder / 'shield.png'}; {look_at(options.logdir)}"
    publish(folder / "shield.md", report(curves, cmdp), where, tc.plotting.draw(panels(curves)))


def train(method: str, cmdp: tc.LayeredCMDP, options: Options, folder: Path | None) -> Curves:
    """Train one network a run in one way; the curves are over the episodes that each has played."""
    runs, batch = options.runs, options.episodes
    generator = torch.Generator().manual_seed(options.seed)
    features = torch.randn(*cmdp.layout.pair_shape[:2], FEATURES, generator=generator, dtype=torch.float64)
    network = SeedNetworks((FEATURES, HIDDEN, cmdp.layout.actions), runs, options.seed)
    shield = SafeOccupancy(cmdp.layout, cmdp.constraints, transitions=cmdp.transitions, costs=cmdp.costs)
    feedback = (tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1))
    env = tc.Simulator(cmdp, *feedback, runs=runs * batch, seed=options.seed)
    multipliers = torch.zeros(runs, cmdp.constraints, dtype=torch.float64)

    def play() -> tuple[Tensor, Callable[[], dict[str, Tensor]]]:
        nonlocal multipliers
        logits = network(features.expand(runs, *features.shape))
        policy = shield(logits=logits).policy if method == "shield" else logits.softmax(-1) * cmdp.layout.pair_mask()
        occupancy = tc.pair_occupancy_of(policy, cmdp.transitions)
        costs = expected_value(cmdp.costs, occupancy.unsqueeze(-4))
        trajectory = env.rollout(policy.repeat_interleave(batch, 0))
        loss = -reinforce(policy, trajectory)
        if method == "penalty":
            loss = loss + (multipliers * costs).sum(-1)
            multipliers = (multipliers + options.multiplier_rate * costs.detach()).clamp_min(0)
        unsafe = worst_constraint(costs).clamp_min(0)
        return loss, lambda: {REWARD: expected_value(cmdp.rewards, occupancy), UNSAFE: unsafe}

    return learn(network, options, POINTS, method, folder, play, each=batch)


def panels(curves: dict[str, Curves]) -> list[tc.plotting.Panel]:
    """What the three earned, and how unsafe they were, over the episodes played."""
    drawn = []
    for tag, pick, label, words in (
        (REWARD, max, "expected reward an episode", "earns most, {:.2f}"),
        (UNSAFE, min, "violation an episode (cost)", "violates least, {:.2g}"),
    ):
        best, mean = pick(((name, float(curve[tag].mean())) for name, curve in curves.items()), key=lambda pair: pair[1])
        values = {name: (curve.steps, curve[tag]) for name, curve in curves.items()}
        finding = f"While training {best} {words.format(mean)} an episode"
        drawn.append(tc.plotting.Panel(values, label, finding, xlabel="episodes played by each network"))
    return drawn


def reinforce(policy: Tensor, trajectory: tc.Trajectory) -> Tensor:
    """Something whose gradient estimates that of the expected reward: ln pi of what was done, times how well it went, `(runs,)`.

    Each of the policies `(runs x L x S x A)` has played as many of the episodes.
    """
    parts = (trajectory.states, trajectory.actions, trajectory.rewards)
    states, actions, rewards = (x.unflatten(0, (len(policy), -1)) for x in parts)
    pairs = (states * policy.shape[-1] + actions).transpose(1, 2)
    taken = policy.flatten(-2).gather(-1, pairs).log()
    to_go = rewards.flip(-1).cumsum(-1).flip(-1).transpose(1, 2)
    return (taken * (to_go - to_go.mean(-1, keepdim=True))).mean(-1).sum(-1)


def report(curves: dict[str, Curves], cmdp: tc.LayeredCMDP) -> str:
    """The table and what to read it against."""
    rows = []
    for name, curve in curves.items():
        reward, unsafe = curve[REWARD], curve[UNSAFE]
        last = slice(-max(1, reward.shape[1] // 10), None)
        columns = (reward, unsafe, reward[:, last], unsafe[:, last], (unsafe > 1e-6).double())
        rows.append([name, *[rounded(column.mean(1)) for column in columns]])
    when = ("while training", "at the end")
    header = ["policy", *[f"{what} {time}" for time in when for what in ("reward", "violation")], "unsafe share"]
    optima = f"{float(tc.safe_optimum(cmdp).value):.3f}; without constraints {float(tc.unconstrained_optimum(cmdp).value):.3f}"
    played = f"mean over {len(reward)} networks +- 95% interval; {int(curve.steps[-1]):,} episodes each"
    return f"{table(header, rows)}\n\nPer episode, {played}; at the end: the last tenth. Best safe reward: {optima}."
