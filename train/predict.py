"""Predict, then optimise: a network predicts losses from a context, and the safe layer turns them into a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.metrics import worst_constraint
from torchcmdp.nn import SafeOccupancy
from torchcmdp.occupancy import expected_value

from .comparison import REWARD, UNSAFE, Curves, SeedNetworks, learn, rounded
from .program import Count, Positive, begin, look_at, publish, table

METHODS = ("end to end", "squared error")
CONTEXT = 6
POINTS = 8
ETAS = (1.0, 3.0, 10.0, 30.0, 100.0)
CAP = 1e4  # on the safety multipliers, which grow with the step size


@dataclass
class Options:
    """Train a network that predicts the losses of an episode from its context, in two ways, and compare the safe policies.

    The mean loss of a pair is sigmoid(u + c (|u| - 0.8)), where u is linear in the context and c is the curvature; the network is
    linear, so the further c is from zero the less it can represent. The layer knows the transitions and the costs, and makes the
    predicted losses into a safe policy. Both ways see the same contexts, each with one noisy loss, 0 or 1, for every pair:
    "end to end" maximises the realised reward of the layer's policy, by gradients through the layer;
    "squared error" fits the losses, and then takes the layer's step size that earns most on the same contexts.
    Both are measured by the expected reward on contexts that neither has seen. Into LOGDIR/NAME go predict.png, predict.md and a
    folder of TensorBoard events for each way.

    Examples:
      python -m train predict
      python -m train predict --curvature 0 --name straight
      python -m train tensorboard
    """

    curvature: float = 3.0  # How far the losses are from what the network can represent.
    steps: Count = 300  # Gradient steps of each way.
    contexts: Count = 300  # Contexts to learn from.
    held_out: Count = 100  # Contexts to measure on.
    batch: Count = 32  # Contexts a gradient step.
    runs: Count = 8
    """Independent repetitions, each with losses, contexts and a network of its own; the intervals are 95% over them."""
    learning_rate: Positive = 0.03  # Of Adam.
    eta: Positive = 10.0  # Step size of the layer, end to end.
    seed: int = 0  # Of the CMDP, the losses, the contexts and the networks.
    name: str = "predict"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments; point TensorBoard at it.


class Data(NamedTuple):
    """Contexts of every run and what belongs to them."""

    contexts: Tensor  # (runs x n x d)
    rewards: Tensor  # one minus the mean losses, (runs x n x L x S x A)
    realised: Tensor  # one noisy reward, 0 or 1, for each of them


def main(arguments: Sequence[str]) -> None:
    """Train both ways and write what came of it."""
    options, folder = begin(Options, arguments, "predict")
    cmdp = tc.random_cmdp(seed=options.seed)
    seen, unseen = draw(cmdp, options, options.contexts, 0), draw(cmdp, options, options.held_out, 1)
    curves = {method: train(method, cmdp, options, seen, unseen, folder / method.replace(" ", "-")) for method in METHODS}
    optimum = best_safe_reward(cmdp, unseen)
    where = f"Curves: {folder / 'predict.png'}; {look_at(options.logdir)}"
    publish(folder / "predict.md", report(curves, optimum, options), where, tc.plotting.draw(panels(curves, optimum)))


def panels(curves: dict[str, Curves], optimum: Tensor) -> list[tc.plotting.Panel]:
    """How far each way falls short of the best safe policy, and how unsafe it is, over its training."""
    short = {name: (curve.steps, optimum[:, None] - curve[REWARD]) for name, curve in curves.items()}
    unsafe = {name: (curve.steps, curve[UNSAFE]) for name, curve in curves.items()}
    end, best = min(((float(values[:, -1].mean()), name) for name, (_, values) in short.items()), key=lambda pair: pair[0])
    most = max(1e-9, *(float(values[:, -1].mean()) for _, values in unsafe.values()))
    said = f"{best.capitalize()} falls short least: {end:.3f}", f"Neither is unsafe by more than {most:.1g} an episode"
    return [
        tc.plotting.Panel(short, "reward an episode short of the best safe", said[0], xlabel="gradient step"),
        tc.plotting.Panel(unsafe, "violation an episode (cost)", said[1], xlabel="gradient step"),
    ]


def draw(cmdp: tc.LayeredCMDP, options: Options, count: int, part: int) -> Data:
    """Contexts, and losses that depend on them in a way that is different in every run."""
    directions = SeedNetworks((CONTEXT, cmdp.rewards.numel()), options.runs, options.seed + 1)
    generator = torch.Generator().manual_seed(options.seed * 2 + part)
    contexts = torch.randn(options.runs, count, CONTEXT, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        u = directions(contexts).unflatten(-1, cmdp.layout.pair_shape)
    rewards = (1 - torch.sigmoid(u + options.curvature * (u.abs() - 0.8))) * cmdp.layout.pair_mask()
    noise = torch.rand(rewards.shape, generator=generator, dtype=torch.float64)
    return Data(contexts, rewards, (noise < rewards).to(torch.float64))


def train(method: str, cmdp: tc.LayeredCMDP, options: Options, seen: Data, unseen: Data, folder: Path | None) -> Curves:
    """Train one network a run in one way; the curves are those of the held-out contexts."""
    network = SeedNetworks((CONTEXT, cmdp.rewards.numel()), options.runs, options.seed, gain=0.1)
    known = {"transitions": cmdp.transitions, "costs": cmdp.costs}
    layer = SafeOccupancy(cmdp.layout, cmdp.constraints, **known, eta=options.eta, solver=tc.Newton(multiplier_cap=CAP))
    generator = torch.Generator().manual_seed(options.seed)
    real = cmdp.layout.pair_mask()

    def losses(contexts: Tensor) -> Tensor:
        return network(contexts).unflatten(-1, cmdp.layout.pair_shape) * real

    def play() -> tuple[Tensor, Callable[[], dict[str, Tensor]]]:
        batch = torch.randint(options.contexts, (options.batch,), generator=generator)
        predicted, realised = losses(seen.contexts[:, batch]), seen.realised[:, batch]
        if method == "end to end":
            return -expected_value(realised, layer(predicted).occupancy.sum(-1)).mean(1), held_out
        return (predicted - (1 - realised))[..., real].square().mean((1, 2)), held_out

    def held_out() -> dict[str, Tensor]:
        eta = torch.full((options.runs, 1), options.eta, dtype=torch.float64)
        if method == "squared error":
            eta = best_eta(layer, losses(seen.contexts), seen.realised)
        return measure(layer(losses(unseen.contexts), eta=eta).occupancy, cmdp, unseen)

    return learn(network, options, POINTS, method, folder, play)


def best_eta(layer: SafeOccupancy, losses: Tensor, realised: Tensor) -> Tensor:
    """The step size, `(runs x 1)`, with which predicted losses earn most on the contexts that they were fitted to."""
    earned = [expected_value(realised, layer(losses, eta=eta).occupancy.sum(-1)).mean(1) for eta in ETAS]
    return torch.tensor(ETAS, dtype=torch.float64)[torch.stack(earned).argmax(0)].unsqueeze(1)


def measure(occupancy: Tensor, cmdp: tc.LayeredCMDP, data: Data) -> dict[str, Tensor]:
    """Expected reward and violation of an occupancy for every context, in the mean over contexts."""
    pair = occupancy.sum(-1)
    unsafe = worst_constraint(expected_value(cmdp.costs, pair.unsqueeze(-4))).clamp_min(0)
    return {REWARD: expected_value(data.rewards, pair).mean(1), UNSAFE: unsafe.mean(1)}


def best_safe_reward(cmdp: tc.LayeredCMDP, data: Data) -> Tensor:
    """What the best safe policies for the true losses of every context earn, in the mean over contexts: `(runs,)`."""
    shape = data.rewards.shape[:2]
    transitions, costs = (tensor.expand(*shape, *tensor.shape) for tensor in (cmdp.transitions, cmdp.costs))
    return tc.safe_optimum(tc.LayeredCMDP(cmdp.layout, transitions, data.rewards, costs)).value.mean(1)


def report(curves: dict[str, Curves], optimum: Tensor, options: Options) -> str:
    """The table and what to read it against."""
    first, second = rewards = [curve[REWARD][:, -1] for curve in curves.values()]
    rows = [
        [name, rounded(reward), rounded(optimum - reward), rounded(curve[UNSAFE][:, -1])]
        for (name, curve), reward in zip(curves.items(), rewards, strict=True)
    ]
    rows.append(["true losses known", rounded(optimum), "0", "0"])
    header = ["losses", "reward", "short of the best safe policy", "violation"]
    return (
        f"{table(header, rows)}\n\nPer episode on {options.held_out} held-out contexts, mean over {options.runs} repetitions +- "
        f"95% interval. End to end minus squared error, run by run: {rounded(first - second)}."
    )
