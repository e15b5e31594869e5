"""The study behind `WCOPS.practical`: descend from the paper's constants by gradient, and judge the result on unseen instances."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

import torchcmdp as tc
from torchcmdp.tuning import SCALES, Descent, optimise, random_search

from ..program import MAY_BE_EMPTY, Count, Positive, at_least, bar, begin, look_at, publish, retyped, table, with_interval
from .evaluate import MEASURES, PAPER, Results, evaluate, of_kind, rows_of, stage
from .figures import front_figure, sensitivity_figure
from .instances import HELD_OUT, RULES, InstanceOptions, Instances
from .sensitivity import note, sensitivity

# Where the descent begins: the paper's steps, and a fraction of its widths and threshold. At the paper's own no gradient comes from
# them: optimistic costs are cut off at -1, intervals hold every kernel, and the threshold is out of reach.
START = {"eta_scale": 1.0, "gamma_scale": 1.0, "bonus_scale": 0.1, "radius_scale": 0.1, "threshold_scale": 1e-3}
# How far it may go, and where random search draws from.
BOX = {
    "eta_scale": (0.1, 100.0),
    "gamma_scale": (0.01, 10.0),
    "bonus_scale": (1e-3, 1.0),
    "radius_scale": (1e-3, 1.0),
    "threshold_scale": (1e-5, 1e-2),
}
PAIRS = 4  # of runs, of each instance at each point of the sensitivities


@dataclass
class Options(InstanceOptions):
    """Tune the constants of WC-OPS by gradient, and compare them on instances never seen with the paper's and with random search.

    Half of the instances have stochastic costs, half have costs that change after a third of the horizon. The objective is
    (regret + weight * positive violation) / horizon, with the positive violation summed over the constraints. Into LOGDIR/NAME
    go report.md, study.json, sensitivity.png, front.png and, in descent/, TensorBoard events and checkpoints. Ctrl-C stops, and
    the same command continues.

    Examples:
      python -m train tune
      python -m train tune --quick --name try
      python -m train tune --weight 5 --name safer
      python -m train tune horizons --horizons 1000 10000 100000
      python -m train tune threshold
    """

    horizon: Count = 1000  # Episodes of a run while tuning; the result is judged at ten times as many too.
    steps: Count = 18  # Steps of the descent.
    repeats: Count = 2  # Runs of each instance for each partial derivative.
    held_out: Annotated[int, at_least(2, "an interval over instances")] = 16  # Seeds of the instances that the result is judged on.
    front: Annotated[tuple[Positive, ...], MAY_BE_EMPTY] = (0.5, 8.0)
    """Further weights, for the front between regret and violation."""
    front_steps: Count = 5  # Steps of the descent for each of them, from what was tuned.
    name: str = "tune"  # Folder of the results inside LOGDIR.
    fresh: bool = False  # Forget what the folder holds and start over.
    quick: bool = False
    """A minute's version, into LOGDIR/NAME-quick: short horizon, few steps, few instances, whatever else was asked for."""


def main(arguments: Sequence[str]) -> None:
    """Run the study."""
    small = {"horizon": 200, "steps": 5, "instances": 2, "repeats": 1, "held_out": 4, "front_steps": 1}
    options, folder = begin(Options, arguments, "tune", small)
    _check(options)
    written = ("stages/*", "descent/*", "descent_weight_*/*", "report.md", "study.json", "sensitivity.png", "front.png")
    for file in [file for pattern in written for file in folder.glob(pattern) if options.fresh]:
        file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    where = f"Written to {folder}: report.md, study.json, sensitivity.png, front.png; {look_at(folder)}"
    publish(folder / "report.md", Work(options, folder).run(), where)


def _check(options: Options) -> None:
    tc.Layout(options.widths, options.actions)  # which says what is wrong with them before anything is written
    if options.seed + options.instances > HELD_OUT:
        raise tc.InvalidInput(f"--seed is {options.seed}; training seeds must stay below {HELD_OUT}, where the unseen ones begin.")
    options.training(options.horizon).check_weight(options.weight)


class Work:
    """A study under way."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.config = options.settings("front", "front_steps", "held_out")
        self.training = options.training(options.horizon)
        self.place: dict[str, Any] = {"box": BOX, "config": self.config, "progress": bar}  # of every descent

    def held_out(self, horizon: int) -> Instances:
        """The instances that nothing was chosen on."""
        return self.options.drawn(range(HELD_OUT, HELD_OUT + self.options.held_out), horizon)

    def run(self) -> str:
        """All stages in turn; returns the report."""
        o, study = self.options, self.training.study(self.options.horizon, self.options.weight, self.options.delta)
        descent = Descent(steps=o.steps, repeats=o.repeats, seed=o.seed, estimator="mixed")
        found = optimise(study, START, descent, folder=self.folder / "descent", **self.place)
        # as many random candidates as the descent had steps
        effort = {"candidates": len(found.history), "runs": len(START) * study.instances * o.repeats}
        searching = partial(random_search, study, BOX, **effort, seed=o.seed, progress=bar)
        best, _ = self.stage("random_search", effort, searching)
        methods = {"paper": PAPER, "tuned": found.scales, "random search": best}
        judged = {str(T): self.judge(f"held_out_{T}", methods, T) for T in (o.horizon, 10 * o.horizon)}
        curved = partial(sensitivity, study, found.scales, PAIRS, o.seed)
        curves = self.stage("sensitivity", {**found.scales, "pairs": PAIRS}, curved)
        front = self.front(found.scales, descent, judged[str(o.horizon)])
        tc.plotting.save(self.folder / "sensitivity.png", sensitivity_figure(curves, note(study, PAIRS)))
        tc.plotting.save(self.folder / "front.png", front_figure(front, o.horizon))
        command = f"python -m train tune{retyped(o, 'name', 'logdir', 'fresh')}"
        about = {"command": command, "options": asdict(o), "start": START, "box": BOX, "descent": vars(descent), **methods}
        extra = {"history": found.history, "run_episodes": found.run_episodes, "held_out": judged, "front": front}
        (self.folder / "study.json").write_text(json.dumps({**about, **extra}, indent=2) + "\n")
        return self.report(command, methods, judged, found.run_episodes)

    def stage(self, name: str, extra: Mapping[str, Any], function: Any) -> Any:
        """What the function returns, kept in a file, so that an interrupted study does not do it again."""
        config = {**self.config, "held_out": self.options.held_out, "box": BOX, "start": START, **RULES, "extra": extra}
        return stage(self.folder, name, config, function)

    def judge(self, name: str, methods: Mapping[str, Mapping[str, float]], horizon: int) -> Results:
        """A stage: every method on the held-out instances."""
        o = self.options
        played = partial(evaluate, self.held_out(horizon), methods, horizon, o.weight, o.delta, o.seed)
        return dict(self.stage(name, methods, played))

    def front(self, tuned: Mapping[str, float], descent: Descent, judged: Results) -> Results:
        """Held-out regret and positive violation at the training horizon: of all methods, and tuned for each further weight."""
        o = self.options
        points = {f"weight {o.weight:g}" if method == "tuned" else method: rows for method, rows in judged.items()}
        for weight in o.front:
            study = self.training.study(o.horizon, weight, o.delta)
            shorter = replace(descent, steps=o.front_steps, repeats=1)
            found = optimise(study, tuned, shorter, folder=self.folder / f"descent_weight_{weight:g}", **self.place)
            points |= self.judge(f"front_{weight:g}", {f"weight {weight:g}": found.scales}, o.horizon)
        return points

    def report(self, command: str, methods: Mapping[str, Mapping[str, float]], judged: Mapping[str, Results], spent: int) -> str:
        """What a person reads."""
        kinds = self.held_out(self.options.horizon).kinds
        points = [[name, *(f"{scales.get(name, 1):.4g}" for scales in methods.values())] for name in SCALES]
        found = table(["scale", *methods], points, "constants")
        rows, claims = [], []
        for horizon, results in judged.items():
            rows += rows_of(results, kinds, int(horizon))
            for rival in ("paper", "random search"):
                difference = torch.tensor(results["tuned"]["objective"]) - torch.tensor(results[rival]["objective"])
                by_kind = [of_kind(difference.tolist(), kinds, kind) for kind in dict.fromkeys(kinds)]
                # the two instances of a seed share their transitions and rewards, so that together they count as one
                cells = [with_interval(x, ",.3f") for x in (torch.stack(by_kind).mean(0), *by_kind)]
                claims.append([f"{int(horizon):,}", f"tuned - {rival}", *cells])
        parts = (
            f"`{command}`",
            f"Tuned with {spent:,} run-episodes, and as many for random search. Scales are multiples of the paper's constants.",
            found,
            f"On {len(kinds)} instances never seen, 95% intervals over instances; the objective is (regret + "
            f"{self.options.weight:g} x positive violation summed over constraints) / horizon.",
            table(["episodes", "costs", "constants", *MEASURES], rows, "held out"),
            "Differences of the objective on the same instances (negative: tuned is better), 95% intervals over seeds.",
            table(["episodes", "difference", "all", *dict.fromkeys(kinds)], claims, "differences"),
        )
        return "\n\n".join(parts)
