"""Where an episode of WC-OPS spends its time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torchcmdp as tc
from train.program import Count, Whole, bar, begin, publish, table

PARTS = ("policy", "rollout", "upper occupancy", "counts and costs", "safe set", "projection", "metrics")


@dataclass
class Options:
    """Split the time of an episode of WC-OPS among its parts, and compare with the projection through cvxpylayers.

    The runs are those of `python -m train` midway: 1-4-4-4-1 states, 3 actions, 2 constraints, the paper's constants.

    Examples:
      python -m train bench episode
      python -m train bench episode --batches 10 --episodes 500
    """

    batches: tuple[Count, ...] = (1, 10, 128, 1024)  # How many runs are played at once.
    episodes: Count = 200  # Episodes timed, after as many untimed ones.
    cvxpy_episodes: Whole = 3  # Episodes timed with the projection through cvxpylayers; 0 leaves it out.
    seed: int = 0  # Of the CMDP and of all random numbers.
    name: str = "bench"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.


def timed(parts: dict[str, float], part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with the time it takes added to `parts[part]`."""

    def wrapper(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            parts[part] += time.perf_counter() - start

    return wrapper


def play(runs: int, episodes: int, warmup: int, seed: int, projection: str) -> dict[str, float]:
    """Seconds of each part over `episodes` episodes, and of all of it under "total"."""
    cmdp = tc.random_cmdp(seed=seed)
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=runs, seed=seed)
    learner = tc.WCOPS(cmdp.layout, cmdp.constraints, horizon=20_000, runs=runs, solver=projection)
    tracker = tc.Tracker(env)
    parts: dict[str, float] = defaultdict(float)
    for method, part in (
        ("observe", "upper occupancy"),
        ("_count", "counts and costs"),
        ("safe_set", "safe set"),
        ("_project", "projection"),
    ):
        setattr(learner, method, timed(parts, part, getattr(learner, method)))
    read_policy = timed(parts, "policy", lambda: learner.policy)
    rollout, update = timed(parts, "rollout", env.rollout), timed(parts, "metrics", tracker.update)
    for episode in range(warmup + episodes):
        if episode == warmup:
            parts.clear()
            start = time.perf_counter()
        policy = read_policy()
        trajectory = rollout(policy)
        update(policy, trajectory)
        learner.update(trajectory)
    parts["total"] = time.perf_counter() - start
    return parts


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    options, folder = begin(Options, arguments, "bench episode")
    rows = []
    for runs in bar(options.batches, "timing", leave=False):
        parts = play(runs, options.episodes, options.episodes, options.seed, "newton")
        total = parts["total"]
        rest = total - sum(parts[part] for part in PARTS)
        row = [str(runs), f"{1e3 * total / options.episodes:.2f}", f"{runs * options.episodes / total:,.0f}"]
        row += [f"{parts[part] / total:.0%}" for part in PARTS] + [f"{rest / total:.0%}"]
        if options.cvxpy_episodes > 0:
            slow = play(runs, options.cvxpy_episodes, 1, options.seed, "cvxpy")
            row.append(f"{slow['total'] / options.cvxpy_episodes / (total / options.episodes):.0f}x")
        rows.append(row)
    header = ["runs", "ms per episode", "run-episodes per s", *PARTS, "rest"]
    header += ["whole run through cvxpylayers"] if options.cvxpy_episodes > 0 else []
    publish(folder / "episode.md", table(header, rows))
    return 0
