"""How the cost of an episode of WC-OPS grows: with the runs in a batch, with the width of the layers, with their number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import torchcmdp as tc
from torchcmdp.plotting.style import COLOURS, GREY, SMALL, blank, tidy

from ..program import Count, bar, begin, check_device, plus_minus, publish, table
from . import BenchOptions
from .episode import session_of

INNER_LAYERS, INNER_WIDTH = 3, 4
LEAST_SECONDS = 0.1  # of a measurement
DIRECTIONS = {"batches": "runs in a batch", "widths": "states in a layer", "layers": "layers of states"}


@dataclass
class Options(BenchOptions):
    """Time episodes of WC-OPS while one size grows, and fit how the cost grows with it.

    The sizes that do not grow are those of the paper's experiments: 3 layers of 4 states between the first and the last, 3
    actions, 2 constraints. The exponent b says that the time of an episode grows as size^b, fitted to the larger half of the
    sizes. Prints a table, and writes it to LOGDIR/NAME/scale.md with the figure scale.png.

    Examples:
      python -m train bench scale
      python -m train bench scale --batches 1 64 4096 --widths 2 8 16 --layers 3 6 12
    """

    batches: tuple[Count, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    """Runs played at once; at least three sizes for a fit, here and in the following."""
    widths: tuple[Count, ...] = (2, 4, 8, 16, 32)  # States in each layer.
    layers: tuple[Count, ...] = (2, 4, 8, 16, 32)  # Layers of states between the first and the last state.
    runs: Count = 64  # Runs played at once while widths or layers grow.
    episodes: Count = 20  # Episodes of a measurement, after as many that are not timed.
    repeats: Count = 3  # Measurements of each size; the intervals of the exponents are 95% over them.
    device: str = "cpu"  # Where to compute: cpu, cuda, cuda:1, ...


@dataclass(frozen=True, eq=False)
class Growth:
    """What was measured while one size grew."""

    sizes: Tensor  # (n,)
    runs: Tensor  # played at once at each size, (n,)
    seconds: Tensor  # per episode of all these runs, (repeats x n)

    @property
    def speed(self) -> Tensor:
        """Run-episodes per second, the median over repeats, `(n,)`."""
        return self.runs / self.seconds.median(0).values

    @property
    def exponent(self) -> tuple[float, float]:
        """b in seconds = c size^b over the larger half of the sizes, and the half-width of its 95% interval."""
        mean, half = tc.growth_exponent(self.sizes, self.seconds)
        return float(mean), float(half)


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    options, folder = begin(Options, arguments, "bench scale")
    device = check_device(options.device)
    options.check_sizes(*DIRECTIONS)
    growths = {name: grow(name, options, device) for name in DIRECTIONS}
    where = f"Written to {folder / 'scale.md'}; figure: {folder / 'scale.png'}"
    publish(folder / "scale.md", report(growths), where, scale_figure(growths))


def grow(name: str, options: Options, device: torch.device) -> Growth:
    """Measure one direction, its sizes in increasing order."""
    sizes = sorted(set(getattr(options, name)))
    runs = [size if name == "batches" else options.runs for size in sizes]
    seconds = torch.zeros(options.repeats, len(sizes), dtype=torch.float64)
    for j, size in enumerate(bar(sizes, name, leave=False)):
        width = size if name == "widths" else INNER_WIDTH
        inner = size if name == "layers" else INNER_LAYERS
        seconds[:, j] = measure((1, *[width] * inner, 1), runs[j], options, device)
    return Growth(torch.tensor(sizes, dtype=torch.float64), torch.tensor(runs, dtype=torch.float64), seconds)


def measure(widths: Sequence[int], runs: int, options: Options, device: torch.device) -> Tensor:
    """Seconds per episode of a batch, `(repeats,)`."""
    cmdp = tc.random_cmdp(widths, seed=options.seed, feasibility="any", device=device)
    session = session_of(cmdp, runs, options.seed)
    times = []
    for _ in range(1 + options.repeats):
        start, before = _now(device), session.played
        # as `run` plays; small sizes for a while, since a block of few short episodes is mostly its beginning and its end
        while session.played - before < options.episodes or time.perf_counter() - start < LEAST_SECONDS:
            session.advance(max(options.episodes, session.played - before))
        times.append((_now(device) - start) / (session.played - before))
    return torch.tensor(times[1:], dtype=torch.float64)


def _now(device: torch.device) -> float:
    """The time when everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def report(growths: dict[str, Growth]) -> str:
    """One table of times and one of exponents."""
    rows, fits = [], []
    for name, growth in growths.items():
        columns = (growth.sizes, growth.runs, 1e3 * growth.seconds.median(0).values, growth.speed)
        for size, runs, milliseconds, speed in torch.stack(columns, dim=1).tolist():
            rows.append([DIRECTIONS[name], f"{size:,.0f}", f"{runs:,.0f}", f"{milliseconds:,.2f}", f"{speed:,.0f}"])
        fits.append([DIRECTIONS[name], plus_minus(*growth.exponent, ".2f")])
    times = table(["what grows", "size", "runs", "ms per episode", "run-episodes per s"], rows, "times")
    return f"{times}\n\n{table(['what grows', 'cost grows as its power'], fits, 'exponents')}"


def scale_figure(growths: dict[str, Growth]) -> Figure:
    """The time of an episode of all runs against each size, on logarithmic axes, with the fits."""
    figure = blank(4.2 * len(growths), 3.9)
    first: Axes | None = None
    for j, (name, growth) in enumerate(growths.items()):
        axes = figure.add_subplot(1, len(growths), j + 1, sharey=first)
        first = first or axes
        _draw(axes, growth)
        power = plus_minus(*growth.exponent, ".2f").replace("+-", r"\pm")
        title = f"Time grows with the power ${power}$"
        note = "WC-OPS; band: slowest and fastest measurement"
        tidy(axes, DIRECTIONS[name], "" if j else "milliseconds per episode", title, note)
    return figure


def _draw(axes: Axes, growth: Growth) -> None:
    sizes, milliseconds, colour = growth.sizes.numpy(), 1e3 * growth.seconds, COLOURS["WC-OPS"]
    middle = milliseconds.median(0).values
    axes.fill_between(sizes, milliseconds.amin(0).numpy(), milliseconds.amax(0).numpy(), color=colour, alpha=0.2, linewidth=0)
    axes.plot(sizes, middle.numpy(), "o-", color=colour, linewidth=1.8, markersize=5, zorder=3)
    half = len(sizes) // 2
    # through the middle of the points that it was made for
    power = growth.exponent[0] * growth.sizes[half:].log()
    fitted = (power - power.mean() + middle[half:].log().mean()).exp().numpy()
    axes.plot(sizes[half:], fitted, color=GREY, linestyle="--", linewidth=1.2, label="fit", zorder=2)
    axes.annotate("fit", (sizes[half], fitted[0]), (4, -12), textcoords="offset points", fontsize=SMALL, color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{int(size):,}" for size in sizes])
    axes.minorticks_off()
