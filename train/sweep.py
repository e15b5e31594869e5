"""A sweep: the grid of a learner's hyperparameters times the seeds as one batch, and the front of regret against violation."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

import torchcmdp as tc
from torchcmdp.distributed import local_device, process_rank
from torchcmdp.events import EVENTS, HALF_WIDTH, RunWriter
from torchcmdp.plotting.results import unbeaten
from torchcmdp.plotting.style import GREY, INK, PALETTE, SMALL, blank, cross, thousands, tidy, zero_line

from . import program
from .program import Count, NotNegative, Positive, Share, plus_minus

HYPERPARAMETERS = ("eta", "gamma", "bonus_scale", "radius_scale", "threshold_scale", "cap_scale")
POINTS = 20
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
MEASURES = {"Regret/cumulative": "regret", "Violation/cumulative": "violation", "Violation/positive": "positive_violation"}
# What else the table has of the learners that report it.
SHARES = {"Solver/elastic": "elastic_fraction", "Learner/on_baseline": "baseline_fraction"}
Grid = Sequence[dict[str, float]]


@dataclass
class Options:
    """Play a learner with every combination of the hyperparameters given, and find those that no other beats in both measures.

    All combinations times all seeds are one batch, played in chunks that fit MEMORY. Every combination meets the same seeds, so
    that their differences are not luck. Into LOGDIR/NAME go sweep.csv with a row a combination, sweep.md, front.png, and a
    TensorBoard run for each, which the HParams tab compares. The same command continues an interrupted sweep and repeats the table
    of a finished one. S-OPS, MA-OPS and DOPE are given a baseline; scales below 1 weaken their promise, and the column of the
    positive violation shows what was risked.

    Examples:
      python -m train sweep --eta 0.01 0.03 0.1 --bonus-scale 0.1 0.3 1 --seeds 20
      python -m train sweep --radius-scale 0.01 0.1 1 --episodes 2000 --seeds 8 --name widths
      python -m train sweep --learner s-ops --bonus-scale 0.03 0.1 1 --radius-scale 0.03 0.1 1 --episodes 2000 --name safe
      python -m train tensorboard
    """

    learner: Literal["wc-ops", "uob-reps", "opt-cmdp", "opt-primal-dual", "pdb-ps", "s-ops", "ma-ops", "dope"] = "wc-ops"
    """Who plays; the following are refused where it has none such. opt-primal-dual is told the true Slater gap."""
    eta: tuple[Positive, ...] = ()  # Step sizes; the learner's own by default. This and the following: one value or several.
    gamma: tuple[Positive, ...] = ()  # Implicit exploration; the learner's own by default.
    bonus_scale: tuple[NotNegative, ...] = ()  # Multiplies the bonus on the costs; 1, the paper's, by default.
    radius_scale: tuple[NotNegative, ...] = ()  # Multiplies the widths of the transition intervals; 1 by default.
    threshold_scale: tuple[NotNegative, ...] = ()
    """Multiplies the violation at which the cost estimate starts to forget; 1, the paper's, by default."""
    cap_scale: tuple[NotNegative, ...] = ()  # Multiplies the violation at which it forgets no faster; 1 by default.
    baseline_share: Share = 0.5
    """Of s-ops, ma-ops and dope: the margin of the baseline that they are given, as a share of the Slater gap, at most 1."""
    seeds: Count = 20  # Runs of every combination; the intervals are 95% over them.
    episodes: Count = 5_000  # Episodes of every run; also the horizon that the step sizes are made for.
    memory: Positive = 2.0
    """GiB that the tensors of the runs may take, estimated from the layout; more runs than fit are played in chunks."""
    seed: int = 0  # Of the CMDP and of all random numbers.
    name: str = "sweep"  # Folder of this sweep inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments; point TensorBoard at it.
    device: str = "cpu"  # Where to compute: cpu, cuda, cuda:1, ...
    dtype: Literal["float32", "float64"] = "float64"  # Floating-point type.
    fresh: bool = False  # Forget what the folder holds and start over.
    widths: tuple[int, ...] = (1, 4, 4, 4, 1)  # States in each layer, beginning and ending with 1.
    actions: Count = 3  # Actions in each state.
    constraints: int = 2  # Safety constraints; 0 for none.
    delta: float = 0.01  # Failure probability of the confidence sets.


def main(arguments: Sequence[str]) -> int:
    """Play the sweep and say what came of it; returns the exit code."""
    options, folder = program.begin(Options, arguments, "sweep")
    program.check_settings(options.learner, program.typed(arguments), HYPERPARAMETERS)
    dtype, device = program.DTYPES[options.dtype], program.check_device(local_device(options.device))
    cmdp = tc.random_cmdp(options.widths, options.actions, options.constraints, options.seed, dtype=dtype, device=device)
    grid = make_grid(options, cmdp)
    if len(grid) < 2:
        raise tc.InvalidInput("there is one combination only; give an option several values, such as --eta 0.01 0.03 0.1.")
    runs, size = len(grid) * options.seeds, program.bytes_per_run(cmdp.layout, cmdp.constraints, POINTS) / 2**30
    if size > options.memory:
        raise tc.InvalidInput(f"--memory {options.memory:g} GiB is too little for one run, which takes about {size:.2g} GiB.")
    chunks = -(-runs // int(options.memory // size))
    chunk = -(-runs // chunks)  # so that they are about alike
    leads = process_rank() == 0
    if leads:
        kept = ("memory", "name", "logdir", "device", "fresh")
        program.claim(folder, {name: value for name, value in asdict(options).items() if name not in kept}, options.fresh)
        print(
            f"{tc.LEARNERS[options.learner].name}, {len(grid)} combinations x {options.seeds} seeds = {runs:,} runs of "
            f"{options.episodes:,} episodes, about {runs * size:.2g} GiB, in {-(-runs // chunk)} chunk(s) of at most "
            f"{options.memory:g} GiB, into {folder}",
            file=sys.stderr,
        )
    results = []
    for first in range(0, runs, chunk):
        result = play(options, cmdp, grid, first, min(chunk, runs - first), folder)
        if not result.completed:
            return program.interrupted(f" in the chunk of run {first}", options.fresh) if leads else 130
        results.append(result)
    if leads:
        _report(folder, options, grid, results)
    return 0


def make_grid(options: Options, cmdp: tc.LayeredCMDP) -> list[dict[str, float]]:
    """Every combination of the values given, with the learner's own where none is."""
    names = [name for name in HYPERPARAMETERS if name in program.settings_of(options.learner)]
    usual, _ = build(options, cmdp, [{}], 0, 1)
    values = [tuple(dict.fromkeys(getattr(options, name))) or (float(usual.hyperparameter(name)[0]),) for name in names]
    return [dict(zip(names, combination, strict=True)) for combination in itertools.product(*values)]


def play(options: Options, cmdp: tc.LayeredCMDP, grid: Grid, first: int, runs: int, folder: Path) -> tc.RunResult:
    """Runs `first` to `first + runs - 1` of the sweep, divided over torchrun's processes if there are any."""
    place, label = folder / "chunks" / f"{first}-{first + runs - 1}", f"runs {first} to {first + runs - 1}"
    leads, how = process_rank() == 0, {"fresh": options.fresh, "log_every": max(1, options.episodes // POINTS)}
    with program.bar(None, label, total=options.episodes, unit="ep", disable=not leads) as shown:
        make = lambda count, offset: build(options, cmdp, grid, first + offset, count)  # noqa: E731
        result = program.play_split(make, runs, options.episodes, place, shown if leads else None, **how)
    if result.completed and leads:  # in TensorBoard the mean over different settings means nothing
        for file in place.glob(EVENTS):
            file.unlink()
    return result


def build(options: Options, cmdp: tc.LayeredCMDP, grid: Grid, first: int, runs: int) -> tuple[tc.Learner, tc.Simulator]:
    """The learner and the simulator of some runs: run i has combination i // seeds and the random numbers of i % seeds."""
    processes = (tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1))
    env = tc.Simulator(cmdp, *processes, runs=runs, seed=options.seed, first_run=first, distinct_runs=options.seeds)
    like: dict[str, Any] = {"dtype": cmdp.dtype, "device": cmdp.device}
    points = [grid[run // options.seeds] for run in range(first, first + runs)]
    values: dict[str, Any] = {name: torch.tensor([point[name] for point in points], **like) for name in points[0]}
    luck = {"seed": options.seed, "first_run": first, "distinct_runs": options.seeds}
    told = program.told(options.learner, cmdp, options.baseline_share, **luck)
    size = (cmdp.layout, cmdp.constraints, options.episodes, options.delta, runs)
    return tc.LEARNERS[options.learner](*size, **values, **told, **like), env


def pareto_front(points: Tensor) -> list[int]:
    """Which of the points, `(n x 2)`, no other beats: none is at most as large in both and smaller in one; by the second column."""
    known = {j: (x, y) for j, (x, y) in enumerate(points.tolist()) if math.isfinite(x + y)}
    return sorted(unbeaten(known), key=lambda j: known[j][::-1])


def _report(folder: Path, options: Options, grid: Grid, results: Sequence[tc.RunResult]) -> None:
    """The table, the figure, the CSV file and TensorBoard's runs."""
    shape = (len(grid), options.seeds, -1)
    curves = [torch.cat([getattr(r, name) for r in results]).reshape(shape) for name in MEASURES.values()]
    shares = {column: [r.diagnostics[tag] for r in results if tag in r.diagnostics] for tag, column in SHARES.items()}
    means = {column: torch.cat(found).reshape(shape[:2]).mean(1) for column, found in shares.items() if found}
    bands = [tc.mean_and_interval(curve.transpose(0, 1)) for curve in curves]  # (combinations x points) each
    front = pareto_front(torch.stack([mean[:, -1] for mean, _ in bands[:2]], dim=1))
    rows = []
    for j, point in enumerate(grid):
        row: dict[str, Any] = dict(point)
        for name, (mean, half) in zip(MEASURES.values(), bands, strict=True):
            row[name], row[f"{name}_ci95"] = float(mean[j, -1]), float(half[j, -1])
        row |= {column: float(mean[j]) for column, mean in means.items()}
        rows.append({**row, "front": front.index(j) + 1 if j in front else ""})
    program.write_table(folder / "sweep.csv", rows)
    swept = [name for name in grid[0] if len({point[name] for point in grid}) > 1]
    _write_tensorboard(folder, options, grid, swept, results[0].episodes, bands)
    cells = []  # the front from the safest to the most rewarding
    for number, j in enumerate(front, 1):
        values = [plus_minus(rows[j][name], rows[j][f"{name}_ci95"]) for name in MEASURES.values()]
        cells.append([str(number), *[f"{rows[j][name]:g}" for name in swept], *values])
    text = program.table([name.replace("_", " ") for name in ("", *swept, *MEASURES.values())], cells)
    text += f"\n\n{len(front)} of {len(grid)} combinations are on the front: no other has both less regret and less violation."
    where = f"All of them: {folder / 'sweep.csv'}; figure: {folder / 'front.png'}"
    where += f"\n{program.look_at(folder)}, tab HParams"
    words = f"{tc.LEARNERS[options.learner].name} after {options.episodes:,} episodes, "
    words += f"mean over {options.seeds} seeds and 95% intervals" if options.seeds > 1 else "one seed"
    program.publish(folder / "sweep.md", text, where, {"front": front_figure(rows, front, swept, words)})


def _write_tensorboard(
    folder: Path, options: Options, grid: Grid, swept: Sequence[str], episodes: Tensor, bands: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """One TensorBoard run a combination: its hyperparameters, and its curves with bands over seeds."""
    for file in folder.glob(f"grid/*/{EVENTS}"):  # those of an earlier call, which would show twice
        file.unlink()
    constants = {name: getattr(options, name) for name in ("episodes", "seeds", "delta", "seed")}
    for j, point in enumerate(grid):
        writer = RunWriter(folder / "grid" / ",".join(f"{name}={point[name]!r}" for name in swept))
        writer.describe({**constants, "learner": point}, list(MEASURES))
        for k, episode in enumerate(episodes.tolist()):
            row: dict[str, float] = {}
            for tag, (mean, half) in zip(MEASURES, bands, strict=True):
                row[tag], row[tag + HALF_WIDTH] = float(mean[j, k]), float(half[j, k])
            writer.point(episode, row)
        writer.finish()
        writer.flush()


def front_figure(rows: Sequence[Mapping[str, Any]], front: Sequence[int], swept: Sequence[str], words: str) -> Figure:
    """Means and 95% intervals in the plane of violation and regret, and the staircase of the front, whose corners have numbers.

    Colours stand for the first hyperparameter swept, shapes for the second; `words` say in small print who played, and how much.
    """
    figure = blank(7.6, 4.8)
    axes = figure.add_subplot()
    handles = [Line2D([], [], color=GREY, linewidth=1.2, drawstyle="steps-post", label="Pareto front")]
    looks: list[dict[str, Any]] = [{"color": PALETTE[0], "fmt": MARKERS[0]} for _ in rows]
    for name, kind, codes in zip(swept, ("color", "fmt"), (PALETTE, MARKERS), strict=False):
        values = list(dict.fromkeys(row[name] for row in rows))
        for value, code in zip(values, itertools.cycle(codes), strict=False):
            label, shown = f"{name.replace('_', ' ')} {value:g}", {"color": GREY, "fmt": "o", kind: code}
            handles.append(Line2D([], [], linestyle="none", markersize=6, label=label, color=shown["color"], marker=shown["fmt"]))
            for row, look in zip(rows, looks, strict=True):
                look[kind] = code if row[name] == value else look[kind]
    for j, (row, look) in enumerate(zip(rows, looks, strict=True)):
        size = {"markersize": 7, "alpha": 1.0, "zorder": 4} if j in front else {"markersize": 5, "alpha": 0.55, "zorder": 3}
        place = (row["violation"], row["regret"], row["violation_ci95"], row["regret_ci95"])
        cross(axes, *place, look["color"], fmt=look["fmt"], **size)
    x, y = ([rows[j][name] for j in front] for name in ("violation", "regret"))
    axes.step(x, y, where="post", color=GREY, linewidth=1.2, zorder=2)
    bold: dict[str, Any] = {"fontsize": 9, "color": INK, "fontweight": "bold", "zorder": 5}
    for number, corner in enumerate(zip(x, y, strict=True), 1):
        axes.annotate(str(number), corner, (6, 6), textcoords="offset points", **bold)
    axes.margins(0.08)
    for axis in (axes.xaxis, axes.yaxis):
        thousands(axis, 6)
    if axes.get_ylim()[0] < 0:
        zero_line(axes)
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=SMALL, frameon=False, labelcolor=INK)
    title = f"{len(front)} of {len(rows)} combinations are beaten by no other in both regret and violation"
    tidy(axes, "cumulative violation (cost)", "cumulative regret (reward)", title, words)
    return figure
