"""How many episodes of WC-OPS a second: compiled, in torch, and through cvxpylayers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torchcmdp as tc
from torchcmdp.distributed import Crew
from torchcmdp.kernels.engine import using
from torchcmdp.kernels.threads import available
from torchcmdp.run.session import Session

from ..program import Count, Positive, Whole, bar, begin, publish, table
from . import BenchOptions

# Run-episodes per second of the torch path on one core, before anything but the projection was compiled.
BEFORE = {1: 300, 10: 2_700, 32: 5_400, 128: 11_000, 1024: 24_000}


@dataclass
class Options(BenchOptions):
    """Time whole episodes of WC-OPS, play, measure and learn, by both engines in the same process.

    The runs are those of `python -m train`: 1-4-4-4-1 states, 3 actions, 2 constraints, the paper's constants.

    Examples:
      python -m train bench episode
      python -m train bench episode --batches 10 --seconds 5
    """

    batches: tuple[Count, ...] = (1, 10, 32, 128, 1024)  # How many runs are played at once.
    episodes: Count = 50  # Episodes before anything is timed, and at least timed.
    seconds: Positive = 2.0  # How long each engine is timed, in turns of a tenth of that.
    cvxpy_episodes: Whole = 0  # Episodes timed with the projection through cvxpylayers; 0 leaves it out.


def session_of(cmdp: tc.LayeredCMDP, runs: int, seed: int, solver: str = "newton") -> Session:
    """A run of WC-OPS that nobody logs."""
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=runs, seed=seed)
    learner = tc.WCOPS.for_env(env, horizon=20_000, solver=solver)
    return Session(learner, env, 10**9, 10**9, Crew(runs, alone=True))


def play(session: Session, engine: str, episodes: int, seconds: float) -> float:
    """Run-episodes per second over at least so many episodes and seconds."""
    played, start = session.played, time.perf_counter()
    with using(engine):
        while session.played - played < episodes or time.perf_counter() - start < seconds:
            session.advance(10**9)
    return session.env.runs * (session.played - played) / (time.perf_counter() - start)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    options, folder = begin(Options, arguments, "bench episode")
    rows, cmdp = [], tc.random_cmdp(seed=options.seed)
    for runs in bar(options.batches, "timing", leave=False):
        sessions = {engine: session_of(cmdp, runs, options.seed) for engine in ("compiled", "torch")}
        for engine, session in sessions.items():
            play(session, engine, options.episodes, 0.0)
        # in turns, and the best of each: who else is on the machine then matters to both alike
        speeds = [
            {engine: play(session, engine, options.episodes, options.seconds / 10) for engine, session in sessions.items()}
            for _ in range(10)
        ]
        compiled, slow = (max(speed[engine] for speed in speeds) for engine in ("compiled", "torch"))
        before = f"{BEFORE[runs]:,}" if runs in BEFORE else "-"
        row = [str(runs), f"{compiled:,.0f}", f"{slow:,.0f}", f"{compiled / slow:.1f}x", before]
        if options.cvxpy_episodes > 0:
            row.append(f"{play(session_of(cmdp, runs, options.seed, 'cvxpy'), 'torch', options.cvxpy_episodes, 0.0):,.1f}")
        rows.append(row)
    header = ["runs", f"compiled, {available()} threads", "torch", "ratio", "before, one core"]
    header += ["through cvxpylayers"] if options.cvxpy_episodes > 0 else []
    publish(folder / "episode.md", "Run-episodes per second.\n\n" + table(header, rows))
    return 0
