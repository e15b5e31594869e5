"""The design of `tune fit`, declared before it was played: problems to train and to judge on, updates, and what is asked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import torchcmdp as tc
from torchcmdp.learners.fitted import features
from torchcmdp.learners.practical import RECIPE, practical_costs
from torchcmdp.tuning import Study

from .instances import Instances, make_instances


@dataclass(frozen=True)
class Cell:
    """A kind of problems, of which seeds draw instances: half with costs that stay, half with costs that change."""

    widths: tuple[int, ...]
    actions: int
    constraints: int
    horizon: int
    delta: float = 0.01
    factor: float = 1.0  # of all costs, which then lie in [-factor, 1]

    @property
    def features(self) -> Tensor:
        """What is known of it before a run, `(F,)`."""
        return features(tc.Layout(self.widths, self.actions), self.constraints, self.horizon, self.delta, -self.factor)

    def instances(self, seeds: range) -> Instances:
        """Two for every seed."""
        return make_instances(self.widths, self.actions, self.constraints, seeds, self.horizon).tamer(self.factor)

    def study(self, seeds: range, weight: float) -> Study:
        """Practical WC-OPS on instances of these seeds; a violation counts in units of the costs' factor."""
        made = self.instances(seeds)
        rest = {name: value for name, value in RECIPE.items() if name not in START}
        options = {**rest, "costs": practical_costs(), "cost_low": -self.factor}
        return Study(made.environment, len(made.kinds), self.horizon, weight / self.factor, self.delta, options)

    def __str__(self) -> str:
        """In words, short."""
        widths = "-".join(map(str, self.widths))
        costs = f", costs from {-self.factor:g}" if self.factor != 1 else ""
        return f"{widths}, {self.actions} actions, {self.constraints} constraints, {self.horizon:,} episodes{costs}"


# The scales that follow the problem, at what `WCOPS.practical` has for all: where both trainings begin.
START = {name: float(RECIPE[name]) for name in ("eta_scale", "gamma_scale", "radius_scale")} | {"margin": 1.0}
# Six sizes, each at two of three horizons; |X| to 11, L to 4, m to 2, T from 75 to 300, delta 0.01 or 0.1, costs from -1 or from
# -0.5. A first design had horizons to 1,000 here and 3,000 below, and 100 updates; it was stopped after 26 of them, before anything
# was judged, since it would have taken hours.
TRAINING = (
    Cell((1, 2, 1), 4, 2, 75), Cell((1, 2, 1), 4, 2, 300, 0.1, 0.5),
    Cell((1, 2, 2, 1), 2, 1, 75, 0.1), Cell((1, 2, 2, 1), 2, 1, 150, 0.01, 0.5),
    Cell((1, 3, 3, 1), 3, 2, 150, 0.1, 0.5), Cell((1, 3, 3, 1), 3, 2, 300),
    Cell((1, 4, 4, 1), 2, 2, 75, 0.01, 0.5), Cell((1, 4, 4, 1), 2, 2, 300, 0.1),
    Cell((1, 2, 2, 2, 1), 3, 1, 150), Cell((1, 2, 2, 2, 1), 3, 1, 300, 0.1, 0.5),
    Cell((1, 3, 3, 3, 1), 2, 1, 75, 0.1), Cell((1, 3, 3, 3, 1), 2, 1, 150, 0.01),
)  # fmt: skip
# Every one has a size and a horizon outside the training range: |X| from 12, L 5 and 6, m 3, T = 30 and 1,000.
HELD_OUT_CELLS = (
    Cell((1, 5, 5, 1), 4, 3, 30), Cell((1, 5, 5, 1), 4, 3, 1000, 0.01, 0.5),
    Cell((1, 4, 4, 4, 4, 1), 3, 2, 30, 0.1, 0.5), Cell((1, 4, 4, 4, 4, 1), 3, 2, 1000),
    Cell((1, 3, 3, 3, 3, 3, 1), 2, 1, 30), Cell((1, 3, 3, 3, 3, 3, 1), 2, 1, 1000, 0.1),
)  # fmt: skip
# Seeds: cell j trains on 32 from 2,000 + 100 j on, eight of them an update, and is judged on those from 5,000 + 100 j on; the cells
# of the training range are judged too, on other seeds (7,000 + 100 j), to tell what is lost outside it.
TRAIN_SEEDS, TRAIN_COUNT, BLOCK = 2000, 32, 8
JUDGE_SEEDS, INSIDE_SEEDS = 5000, 7000

# Both trainings, that of the map and that of one set of constants for all, play as many runs: a pair of each of 16 instances of
# each cell in every update, and plain gradient steps, of which the last half is averaged. A pilot of 14 updates on seeds from
# 20,000 on, in which nothing was judged, showed how large gradients and their noise are.
UPDATES, SIGMA, RATE, DECAY = 60, 0.5, 0.4, 0.02
REACH = 2.3  # a scale moves by a factor of at most 10
WEIGHT = 3.0  # of the positive violation

# What is asked: on the held-out cells the map is better than today's constants and better than the one trained set, in
# (regret + weight x positive violation) / episodes, with 95% intervals over problems, paired, that both exclude zero.
