"""Learners with equal search effort, judged on instances that nothing was chosen on; the design is in `train/study/design.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

import torchcmdp as tc

from ..program import Count, Whole, bar, begin, forget_tables, publish, retyped
from ..tune.evaluate import play_out, spread, stage
from . import design
from .design import ABLATIONS, ENTRIES, SETTINGS, Instances, Size, make_instances
from .report import Numbers, best_rivals, figure, report

Maker = Callable[[Size, tc.LayeredCMDP], tc.Learner]
MEASURES = ("regret", "violation", "positive violation")
TRIED = len(design.TRAINING) // len(SETTINGS)  # instances of each setting


@dataclass
class Options:
    """Compare practical WC-OPS and practical OptCMDP with WC-OPS, OptCMDP, OptPrimalDual, PDB-PS and Greedy, in four settings.

    Every learner has the same number of configurations, drawn by the same random search and judged on the same 16 training
    instances; what is chosen is played on 32 others. Practical learners are also played as they are shipped, which is what the
    goals are about, and with the two best published rivals they are played over the final horizons. Into LOGDIR/NAME go report.md
    and report.png. Ctrl-C stops, and the same command continues.

    Examples:
      python -m train study
      python -m train study --quick
      python -m train study --final-seeds 5
      python -m train study alarms
    """

    configurations: Count = 16  # Of every learner, its own constants among them.
    search_horizon: Count = 1000  # Episodes of a run while constants are searched.
    horizons: tuple[Count, ...] = (1000, 10_000)  # Episodes of a run on held-out instances.
    seeds: Count = 5  # Runs of every learner on every held-out instance.
    final_horizons: tuple[Count, ...] = (100_000,)  # Episodes of a run of the finalists, whom the design names.
    final_seeds: Whole = 1  # Runs of every finalist on every held-out instance; 0 for no finals.
    instances: Count = 32  # How many of the held-out instances are played.
    delta: float = 0.01  # Failure probability of the confidence sets.
    name: str = "study"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.
    quick: bool = False
    """A version of a minute or two, into LOGDIR/NAME-quick: few configurations, instances and episodes."""


def main(arguments: Sequence[str]) -> None:
    """Run the study."""
    small = {"configurations": 2, "search_horizon": 60, "horizons": (60, 120), "seeds": 1, "instances": 2, "final_horizons": (180,)}
    options, folder = begin(Options, arguments, "study", small)
    if not 2 <= options.instances <= len(design.HELD_OUT):
        most = len(design.HELD_OUT)
        raise tc.InvalidInput(f"--instances is {options.instances}; an interval needs at least 2, and there are {most}.")
    Work(options, folder).run()


# A learner of the held-out instances: the constants that were chosen for it, and how it is made.
Player = tuple[Mapping[str, float], Maker]


def player(key: str, point: Mapping[str, float]) -> Player:
    """An entry of the design with these constants."""
    return point, lambda size, cmdp: ENTRIES[key].make(size, cmdp, spread([point], size[-1]) if point else {})


ABLATED: dict[str, Player] = {
    title: ({}, lambda size, cmdp, settings=settings: tc.WCOPS.practical(*size, **settings()))  # type: ignore[misc]
    for title, settings in ABLATIONS.items()
}


@dataclass
class Work:
    """A study under way."""

    options: Options
    folder: Path

    def run(self) -> None:
        """All stages in turn; the report is written again after each horizon and after the ablations."""
        o = self.options
        chosen, searched = self.search()
        players = {}
        for key, entry in ENTRIES.items():
            shipped = entry.start if key.startswith("practical") else chosen[key]
            players[key] = player(key, shipped)
            if shipped != chosen[key]:
                players[f"{key}, searched"] = player(key, chosen[key])
        rivals = best_rivals(searched)
        finalists = {key: players[key] for key in ENTRIES if key.startswith("practical") or key in rivals}
        jobs: list[tuple[int, Mapping[str, Player], Sequence[int | None]]] = [(horizon, players, [None]) for horizon in o.horizons]
        jobs += [(horizon, finalists, range(o.final_seeds)) for horizon in o.final_horizons if o.final_seeds]
        command = f"python -m train study{' --quick' if o.quick else retyped(o, 'logdir')}"
        held: dict[int, Numbers] = {}
        ablated: Numbers = {}

        def write() -> str:
            forget_tables()
            text = report(command, asdict(o), searched, chosen, held, ablated)
            (self.folder / "report.md").write_text(text + "\n")
            return text

        for horizon, who, seeds in jobs:
            held[horizon] = self.judge(who, horizon, f"{horizon:,} episodes", seeds)
            text = write()
            if not ablated:
                ablated = self.judge(ABLATED, horizon, "ablations", [None])
                text = write()
        tc.plotting.save(self.folder / "report.png", figure(held, o.instances, rivals[0]))
        publish(self.folder / "report.md", text)

    def search(self) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
        """By learner the configuration with the least objective on the training instances, and the objectives of all."""
        o = self.options
        points = {key: entry.configurations(o.configurations) for key, entry in ENTRIES.items()}
        objectives: dict[str, list[list[float]]] = {key: [] for key in ENTRIES}
        for key, j in bar([(key, j) for key in ENTRIES for j in range(len(SETTINGS))], "search"):
            config = {"points": points[key], "horizon": o.search_horizon, "delta": o.delta, "weight": design.WEIGHT}
            work = partial(self.try_all, key, points[key], j)
            objectives[key].append(stage(self.folder, _file("search", key, SETTINGS[j]), config, work))
        means = {key: torch.tensor(parts, dtype=torch.float64).mean(0) for key, parts in objectives.items()}
        chosen = {key: points[key][int(mean.argmin())] for key, mean in means.items()}
        return chosen, {key: mean.tolist() for key, mean in means.items()}

    def try_all(self, key: str, points: Sequence[Mapping[str, float]], j: int) -> list[float]:
        """The objective of every configuration in one setting, on its own four of the training instances."""
        seeds, horizon, values = design.TRAINING[j :: len(SETTINGS)], self.options.search_horizon, spread(points, TRIED)
        make = lambda size, cmdp: ENTRIES[key].make(size, cmdp, values)  # noqa: E731
        numbers = self.play(make_instances(seeds, SETTINGS[j]), len(points), horizon, TRIED, make)
        regret, unsafe = (torch.tensor(numbers[name]).view(len(points), TRIED) for name in ("regret", "positive violation"))
        return ((regret + design.WEIGHT * unsafe) / horizon).mean(-1).tolist()  # type: ignore[no-any-return]

    def judge(self, players: Mapping[str, Player], horizon: int, name: str, seeds: Sequence[int | None]) -> Numbers:
        """By setting and learner what came of every held-out instance, in the mean over its runs.

        A seed that is named is a stage of its own, so that more can be played later; None stands for all of the options.
        """
        parts: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
        for seed, setting, title in bar([(j, s, t) for j in seeds for s in SETTINGS for t in players], name):
            parts.setdefault((setting, title), []).append(self.measured(title, setting, horizon, players[title], seed))
        held: Numbers = {setting: {} for setting in SETTINGS}
        for (setting, title), found in parts.items():
            runs = {measure: torch.tensor([part[measure] for part in found], dtype=torch.float64) for measure in found[0]}
            held[setting][title] = {measure: values.view(-1, self.options.instances).mean(0) for measure, values in runs.items()}
        return held

    def measured(self, title: str, setting: str, horizon: int, who: Player, seed: int | None) -> dict[str, list[float]]:
        """A stage: one learner in one setting on the held-out instances, with all seeds or with one."""
        n, (point, make) = self.options.instances, who
        count, name = (self.options.seeds, str(horizon)) if seed is None else (1, f"{horizon}-{seed}")

        def work() -> dict[str, list[float]]:
            made = make_instances(design.HELD_OUT[:n], setting)
            return self.play(made, count, horizon, n * count, make, design.PLAY_SEED + (seed or 0))

        config = {"point": dict(point), "horizon": horizon, "instances": n, "delta": self.options.delta, "seeds": count}
        return dict(stage(self.folder, _file(name, title, setting), config, work))

    def play(
        self, made: Instances, times: int, horizon: int, distinct: int, make: Maker, seed: int = design.PLAY_SEED
    ) -> dict[str, list[float]]:
        """Whole runs, so many on each instance: regret and violations at the end, and the alarms of those with a drift test."""
        env = made.environment(torch.arange(len(made.rewards[0])).repeat(times), horizon, distinct, seed)
        size = (env.cmdp.layout, env.cmdp.constraints, horizon, self.options.delta, env.runs)
        result = play_out(make(size, env.cmdp), env, horizon)
        numbers = {name: getattr(result, name.replace(" ", "_"))[:, -1].tolist() for name in MEASURES}
        alarms = result.diagnostics.get("Learner/drift_alarms")
        return numbers if alarms is None else {**numbers, "alarms": (alarms * horizon).tolist()}


def _file(*parts: str) -> str:
    return "_".join(parts).replace(" ", "-").replace(",", "").replace("(", "").replace(")", "")
