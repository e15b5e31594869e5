"""The main job: WC-OPS on a small random CMDP, many runs at once, with curves, a table and TensorBoard files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import torchcmdp as tc
from torchcmdp import plotting
from torchcmdp.metrics import mean_and_interval
from train import DTYPES, check_device, check_positive, experiment_folder, parse


@dataclass
class Options:
    """Play WC-OPS in a random CMDP with safety constraints, and draw its regret and violation.

    Everything goes into LOGDIR/NAME: regret.png, violation.png and summary.txt, and in wc-ops/ the TensorBoard events,
    metrics.csv, config.json and checkpoint.pt. Running the same command again continues an interrupted run and repeats the
    summary of a finished one.

    Examples:
      python -m train
      python -m train --episodes 2000 --runs 8 --name quick
      python -m train --bonus-scale 0.1 --width-scale 0.1 --name narrow
      python -m train --widths 1 6 6 1 --actions 4 --constraints 3 --seed 7 --name wide
      tensorboard --logdir runs
    """

    episodes: int = 20_000
    """How many episodes every run has; also the horizon that the step sizes are made for."""
    runs: int = 32
    """Independent runs, played as one batch; the bands are 95% intervals over them."""
    seed: int = 0
    """Of the CMDP and of all random numbers."""
    name: str = "main"
    """Folder of this experiment inside LOGDIR."""
    logdir: str = "runs"
    """Folder of all experiments; point TensorBoard at it."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    dtype: Literal["float32", "float64"] = "float64"
    """Floating-point type."""
    projection: Literal["newton", "cvxpy"] = "newton"
    """Solver of the projection: our Newton method, or a general cone solver through cvxpylayers."""
    resume: bool = False
    """Insist on continuing: refuse if there is nothing to continue. A run that can be continued is continued anyway."""
    fresh: bool = False
    """Forget what the folder holds and start over."""
    widths: tuple[int, ...] = (1, 4, 4, 4, 1)
    """States in each layer, beginning and ending with 1."""
    actions: int = 3
    """Actions in each state."""
    constraints: int = 2
    """Safety constraints; 0 for none."""
    delta: float = 0.01
    """Failure probability of the confidence sets."""
    eta: float | None = None
    """Step size; the paper's by default."""
    gamma: float | None = None
    """Implicit exploration; the paper's by default."""
    bonus_scale: float = 1.0
    """Multiplies the bonus on the costs; 1 is the paper's."""
    width_scale: float = 1.0
    """Multiplies the widths of the transition intervals; 1 is the paper's."""
    threshold_scale: float = 1.0
    """Multiplies the violation at which the cost estimate starts to forget; 1 is the paper's."""
    cap_scale: float = 1.0
    """Multiplies the violation at which it forgets no faster; 1 is the paper's."""
    confidence: Literal["entrywise", "l1", "bernstein"] = "entrywise"
    """Kind of transition confidence set; entrywise is the paper's."""
    log_every: int | None = None
    """Episodes between logging points; about 200 points by default."""


def main(arguments: Sequence[str]) -> int:
    """Run the main job; returns the exit code."""
    options = parse(Options, arguments, prog="python -m train")
    folder = _check(options)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the tensors of an episode are too small to share among threads; the projection has its own
    learner, env = build(options)
    print(f"WC-OPS, {options.runs} runs of {options.episodes:,} episodes, into {folder}", file=sys.stderr)
    sub_run = folder / learner.name.lower()
    result = tc.run(
        learner,
        env,
        options.episodes,
        logdir=sub_run,
        log_every=options.log_every,
        progress=sys.stderr.isatty(),
        fresh=options.fresh,
    )
    if not result.completed:
        played = f"{int(result.episodes[-1]):,} of {options.episodes:,} episodes"
        command = "the same command without --fresh" if options.fresh else "the same command"
        print(f"Interrupted after {played}; {command} continues from there.", file=sys.stderr)
        return 130
    for name, figure in plotting.figures({learner.name: result}).items():
        plotting.save(folder / f"{name}.png", figure)
    table = summary(result, env)
    (folder / "summary.txt").write_text(table + "\n")
    print(table)
    print(f"\nCurves: {folder / 'regret.png'}, {folder / 'violation.png'}; numbers: {sub_run / 'metrics.csv'}")
    print(f"TensorBoard: make tensorboard, or tensorboard --logdir {options.logdir}")
    return 0


def build(options: Options) -> tuple[tc.WCOPS, tc.Simulator]:
    """The learner and the simulator that the options describe."""
    dtype, device = DTYPES[options.dtype], check_device(options.device)
    cmdp = tc.random_cmdp(options.widths, options.actions, options.constraints, options.seed, dtype=dtype, device=device)
    costs = tc.Bernoulli(cmdp.costs, low=-1)
    env = tc.Simulator(cmdp, rewards=tc.Bernoulli(cmdp.rewards), costs=costs, runs=options.runs, seed=options.seed)
    learner = tc.WCOPS(
        cmdp.layout,
        constraints=options.constraints,
        horizon=options.episodes,
        delta=options.delta,
        runs=options.runs,
        eta=options.eta,
        gamma=options.gamma,
        bonus_scale=options.bonus_scale,
        width_scale=options.width_scale,
        threshold_scale=options.threshold_scale,
        cap_scale=options.cap_scale,
        confidence=options.confidence,
        projection=options.projection,
        dtype=dtype,
        device=device,
    )
    return learner, env


def summary(result: tc.RunResult, env: tc.Simulator) -> str:
    """The table a person reads first: final values with their 95% intervals over runs, and what they are measured against."""
    value, slater = float(tc.safe_optimum(env.cmdp).value), float(tc.slater_gap(env.cmdp))
    rows = [("after episode", f"{int(result.episodes[-1]):,}")]
    for label, curve in (
        ("regret", result.regret),
        ("violation", result.violation),
        ("positive violation", result.positive_violation),
    ):
        mean, half = (float(x) for x in mean_and_interval(curve[:, -1]))
        rows.append((label, f"{mean:,.1f}" if half != half else f"{mean:,.1f} +- {half:,.1f}"))
    iterations = result.mean_iterations
    rows += [
        ("safe optimum per episode", f"{value:.4f}"),
        ("Slater gap", f"{slater:.4f}"),
        ("elastic projections", f"{result.elastic_fraction:.2%}"),
        ("solver iterations", "not counted by this solver" if iterations != iterations else f"{iterations:.2f} per projection"),
        ("time", f"{result.seconds:.1f} s"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _check(options: Options) -> Path:
    """What no part of the library would refuse in the words of the command line; returns the experiment's folder."""
    check_positive(episodes=options.episodes, runs=options.runs, actions=options.actions, log_every=options.log_every)
    check_positive(eta=options.eta, gamma=options.gamma)
    folder = experiment_folder(options.logdir, options.name)
    if options.resume and options.fresh:
        raise tc.InvalidInput("--resume and --fresh contradict each other; give one of them.")
    if options.resume and not (folder / "wc-ops" / "checkpoint.pt").exists():
        raise tc.InvalidInput(f"--resume finds no checkpoint in {folder / 'wc-ops'}; leave it out to start a new run.")
    return folder
