"""The map of regimes: a panel for every scale and mode of radii, in it a cell for every horizon and kind of instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from torchcmdp.plotting import INK, PALETTE, SMALL, TITLE, blank

from .claims import FAILS, HOLDS, UNDECIDED
from .presets import REGIMES, SCALES

if TYPE_CHECKING:
    from .regimes import Regime

COLOURS = {HOLDS: PALETTE[0], FAILS: PALETTE[5], UNDECIDED: "#E5E5E5"}
MARKS = {HOLDS: "yes", FAILS: "no", UNDECIDED: "?"}
INKS = {HOLDS: "white", FAILS: INK, UNDECIDED: INK}


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
