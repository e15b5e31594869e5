"""A step of our Gymnasium environments beside one of Gymnasium's own FrozenLake, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchcmdp import Bernoulli, random_cmdp

from ..program import Count, begin, publish, table
from . import BenchOptions, median_seconds

AIM = 2.0


@dataclass
class Options(BenchOptions):
    """Time steps with random actions, resets included, without wrappers.

    Examples:
      python -m train bench env
      python -m train bench env --steps 2000
    """

    steps: Count = 20_000  # Steps of a measurement.
    repeats: Count = 5  # Measurements of each environment; medians count.
    num_envs: Count = 128  # Runs of the vector environment.


def player(env: Any, steps: int, seed: int) -> Callable[[], None]:
    """Plays so many steps in an environment, with actions drawn beforehand."""
    actions = np.random.default_rng(seed).integers(env.action_space.n, size=steps).tolist()

    def play() -> None:
        env.reset(seed=seed)
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return play


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    options, folder = begin(Options, arguments, "bench env")
    import gymnasium

    from torchcmdp.adapters.gymnasium import CMDPEnv, CMDPVectorEnv

    cmdp = random_cmdp((1, 4, 4, 4, 1), 3, 1, seed=options.seed)
    feedback = {"rewards": Bernoulli(cmdp.rewards), "costs": Bernoulli(cmdp.costs, low=-1)}
    single = {"FrozenLake-v1": gymnasium.make("FrozenLake-v1").unwrapped, "CMDPEnv": CMDPEnv(cmdp, **feedback)}
    seconds = {
        name: median_seconds(player(env, options.steps, options.seed), least=options.repeats) / options.steps
        for name, env in single.items()
    }
    many = CMDPVectorEnv(cmdp, options.num_envs, **feedback)
    many.reset(seed=options.seed)
    batches = max(1, options.steps // options.num_envs)
    actions = np.random.default_rng(options.seed).integers(3, size=(batches, options.num_envs))
    whole = median_seconds(lambda: [many.step(row) for row in actions], least=options.repeats)
    seconds[f"CMDPVectorEnv, {options.num_envs} runs"] = whole / actions.size
    base = seconds["FrozenLake-v1"]
    rows = [[name, f"{1e6 * time:.2f}", f"{time / base:.2f}"] for name, time in seconds.items()]
    met = "met" if seconds["CMDPEnv"] <= AIM * base else "missed"
    words = (
        f"Medians of {options.repeats}, resets included; of the vector environment the time of a step of one of its runs. Below 1 "
        f"is faster than FrozenLake. Aim: a step of CMDPEnv takes at most {AIM:g} times FrozenLake's time, {met}."
    )
    report = table(["environment", "us a step", "time / FrozenLake's"], rows)
    publish(folder / "env.md", f"{report}\n\n{words}")
