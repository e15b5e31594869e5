"""`python -m train paper regimes`: where the paper's headline holds, over horizon, constants, radii, size and slack."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from torchcmdp.plotting import INK, PALETTE, SMALL, TITLE, blank, save

from ..program import Count, begin, interrupted, table, write_table
from . import INSTANCES, checked_instances, play_all
from .claims import FAILS, HOLDS, MARGIN, UNDECIDED, findings, together
from .experiment import Job
from .presets import REGIMES, SCALES

HORIZONS, QUICK_HORIZONS = (1_000, 5_000, 25_000), (60, 120)
MODES = ("matched", "published")
# The headline, of OptCMDP with a mode of radii and of OptPrimalDual; short names for the cells of the figure.
PARTS = {
    "regret": "regret comparable to OptCMDP's, {mode} radii",
    "violation": "violation lower than OptCMDP's, {mode} radii",
    "primal-dual": "violation lower than OptPrimalDual's",
}
RULE = f"""The headline of the paper is that WC-OPS has a regret comparable to OptCMDP's and a violation below OptCMDP's and
OptPrimalDual's. In a regime it holds where all three parts hold by the rules of the report (95% intervals over instances, a
margin of {MARGIN:.0%} of L T, no regret without its positive violation), does not where one of them fails, and else cannot be told.
Instances are drawn by seeds of their own (`REGIMES` in `train/paper/presets.py`), which, as horizons, scales, sizes and slacks,
were written down before anything was played on them."""
COLOURS = {HOLDS: PALETTE[0], FAILS: PALETTE[5], UNDECIDED: "#E5E5E5"}
MARKS = {HOLDS: "yes", FAILS: "no", UNDECIDED: "?"}
INKS = {HOLDS: "white", FAILS: INK, UNDECIDED: INK}


@dataclass
class Options:
    """Map where the paper's headline holds: regret comparable to OptCMDP's, violation below OptCMDP's and OptPrimalDual's.

    Every combination of horizon (1,000, 5,000, 25,000), scale of the constants (1, 0.1, 0.02), radii of OptCMDP (matched,
    published), size and slack gets a verdict. Into LOGDIR/NAME go regimes.png and .pdf, regimes.md and regimes.csv, and the runs.
    The same command continues what was interrupted and reads what is finished.

    Examples:
      python -m train paper regimes
      python -m train paper regimes --quick
    """

    instances: Count | None = None  # Random CMDPs of every regime; 20 by default, 3 with --quick. Verdicts are over them.
    runs: Count = 2  # Independent runs of every learner on each instance.
    jobs: Count | None = None  # Processes that share the work; one a core by default.
    quick: bool = False
    """Two short horizons on few instances, into LOGDIR/NAME-quick: to see that all of it works, not to believe its verdicts."""
    name: str = "regimes"  # Folder inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.
    fresh: bool = False  # Forget what the folders hold and start over.


@dataclass(frozen=True)
class Regime:
    """One cell: where it is, and what was found."""

    preset: str
    family: str
    mode: str
    episodes: int
    parts: Mapping[str, str]

    @property
    def verdict(self) -> str:
        """Of all parts together."""
        return together(self.parts.values())


def main(arguments: Sequence[str]) -> int:
    """Play the regimes; returns the exit code."""
    options, folder = begin(Options, arguments, "paper regimes", {})
    instances = checked_instances(options, "verdicts need")
    horizons = QUICK_HORIZONS if options.quick else HORIZONS
    jobs = [
        Job(name, family, episodes, instances, options.runs, folder / f"{name}-{episodes}", options.fresh)
        for episodes, name, family in product(horizons, REGIMES, SCALES)
    ]
    outcomes = play_all(jobs, options.jobs or os.cpu_count() or 1)
    if len(outcomes) < len(jobs) or not all(outcome.completed for outcome in outcomes):
        return interrupted("", options.fresh)
    regimes = []
    for job, outcome in zip(jobs, outcomes, strict=True):
        verdicts = {finding.claim: finding.verdict for finding in findings([outcome])}
        for mode in MODES:  # a cell for each
            parts = {part: verdicts[claim.format(mode=mode)] for part, claim in PARTS.items()}
            regimes.append(Regime(job.preset, job.family, mode, job.episodes, parts))
    rows = [
        {"instances": r.preset, "constants": r.family, "radii": r.mode, "episodes": r.episodes, **r.parts, "headline": r.verdict}
        for r in regimes
    ]
    command, words = " ".join(["python -m train paper regimes", *arguments]), paragraph(regimes)
    page = ["# Where the paper's headline holds", f"Written by `{command}`.", words, RULE, "![regimes](regimes.png)"]
    if instances < INSTANCES:
        page.insert(2, f"**{instances} instances: a trial of the machinery, not a finding.**")
    page.append(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows], "regimes"))
    save(folder / "regimes.png", draw(regimes))
    write_table(folder / "regimes.csv", rows)
    (folder / "regimes.md").write_text("\n\n".join(page) + "\n")
    print(f"{words}\n\nPage: {folder / 'regimes.md'}; figure: {folder / 'regimes.png'}")
    return 0


def paragraph(regimes: Sequence[Regime]) -> str:
    """What the map shows, in words that follow from it."""
    total, counts = len(regimes), Counter(regime.verdict for regime in regimes)
    sentences = [
        f"Of {total} regimes the headline holds in {counts[HOLDS]}, does not hold in {counts[FAILS]}, and cannot be told in "
        f"{counts[UNDECIDED]}."
    ]
    axes = {
        "constants": lambda r: r.family,
        "radii": lambda r: r.mode,
        "horizon": lambda r: f"{r.episodes:,}",
        "instances": lambda r: r.preset,
    }
    if counts[HOLDS]:
        for axis, of in axes.items():
            where = Counter(of(regime) for regime in regimes if regime.verdict == HOLDS)
            shown = ", ".join(f"{value} {where[value]}" for value in dict.fromkeys(map(of, regimes)))
            sentences.append(f"It holds by {axis}: {shown}.")
    for part, claim in PARTS.items():
        verdicts = Counter(regime.parts[part] for regime in regimes)
        name = claim.format(mode="its").replace(", its radii", "")
        sentences.append(f'"{name}" holds in {verdicts[HOLDS]} and fails in {verdicts[FAILS]}.')
    return " ".join(sentences)


def draw(regimes: Sequence[Regime]) -> Figure:
    """The figure; in a cell, the verdicts of the headline's three parts."""
    modes = list(dict.fromkeys(regime.mode for regime in regimes))
    families = list(dict.fromkeys(regime.family for regime in regimes))
    figure = blank(3.9 * len(families) + 1.6, 2.9 * len(modes) + 0.9)
    for row, mode in enumerate(modes):
        for column, family in enumerate(families):
            axes = figure.add_subplot(len(modes), len(families), row * len(families) + column + 1)
            shown = [regime for regime in regimes if (regime.mode, regime.family) == (mode, family)]
            _panel(axes, shown, named=column == 0)
            title = f"constants x {SCALES[family]:g} ({family}), {mode} radii"
            axes.set_title(title, fontsize=TITLE, color=INK, loc="left")
    held = sum(regime.verdict == HOLDS for regime in regimes)
    handles = [Patch(facecolor=colour, label=verdict) for verdict, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=TITLE)
    figure.suptitle(
        f"The paper's headline holds in {held} of {len(regimes)} regimes\n"
        "in a cell: regret comparable to OptCMDP's, violation below OptCMDP's, violation below OptPrimalDual's",
        fontsize=TITLE, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _panel(axes: Axes, regimes: Sequence[Regime], named: bool) -> None:
    """Horizons to the right, kinds of instances upwards."""
    horizons, kinds = sorted({regime.episodes for regime in regimes}), list(dict.fromkeys(regime.preset for regime in regimes))
    for regime in regimes:
        x, y = horizons.index(regime.episodes), kinds.index(regime.preset)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=COLOURS[regime.verdict], edgecolor="white", linewidth=2))
        marks = " · ".join(MARKS[verdict] for verdict in regime.parts.values())
        axes.text(x + 0.5, y + 0.5, marks, ha="center", va="center", fontsize=SMALL, color=INKS[regime.verdict])
    axes.set_xlim(0, len(horizons))
    axes.set_ylim(len(kinds), 0)
    axes.set_xticks([x + 0.5 for x in range(len(horizons))], [f"{horizon:,}" for horizon in horizons], fontsize=SMALL, color=INK)
    axes.set_yticks(
        [y + 0.5 for y in range(len(kinds))], [REGIMES[kind].purpose for kind in kinds] if named else [""] * len(kinds),
        fontsize=SMALL, color=INK,
    )  # fmt: skip
    axes.tick_params(length=0)
    axes.set_xlabel("episodes", fontsize=SMALL, color=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
