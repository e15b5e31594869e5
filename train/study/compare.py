"""Learners with equal search effort, judged on instances that nothing was chosen on; the design is in `train/study/design.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import torchcmdp as tc
from torchcmdp import plotting

from .. import program
from ..program import Count, Whole
from ..tune.evaluate import stage
from . import design
from .design import ABLATIONS, ENTRIES, SETTINGS, Instances, Size, Values, make_instances
from .report import Numbers, best_rivals, figure, report

Maker = Callable[[Size, tc.LayeredCMDP], tc.Learner]
MEASURES = ("regret", "violation", "positive violation")


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


def main(arguments: Sequence[str]) -> int:
    """Run the study; returns the exit code."""
    options = program.parse(Options, arguments, prog="python -m train study")
    if options.quick:
        small: dict[str, Any] = {"configurations": 2, "search_horizon": 60, "horizons": (60, 120), "seeds": 1, "instances": 2}
        small["final_horizons"] = (180,)
        options = replace(options, **small, name=f"{options.name}-quick")
    if not 2 <= options.instances <= len(design.HELD_OUT):
        most = len(design.HELD_OUT)
        raise tc.InvalidInput(f"--instances is {options.instances}; an interval needs at least 2, and there are {most}.")
    folder = program.experiment_folder(options.logdir, options.name)
    Work(options, folder).run()
    return 0


@dataclass
class Work:
    """A study under way."""

    options: Options
    folder: Path

    def run(self) -> None:
        """All stages in turn; the report is written again after each horizon and after the ablations."""
        chosen, searched = self.search()
        command = "python -m train study" + "".join(f" {part}" for part in _changed(self.options))
        held: dict[int, Numbers] = {}
        ablated: Numbers = {}
        first, *others = self.options.horizons
        steps: list[Callable[[], Any]] = [lambda: held.update({first: self.judge(chosen, first)})]
        steps.append(lambda: ablated.update(self.ablate(first)))
        steps += [lambda T=T: held.update({T: self.judge(chosen, T)}) for T in others]  # type: ignore[misc]
        if self.options.final_seeds:
            finalists = [key for key in ENTRIES if key.startswith("practical") or key in best_rivals(searched)]
            steps += [lambda T=T: held.update({T: self.decide(chosen, finalists, T)}) for T in self.options.final_horizons]  # type: ignore[misc]
        for step in steps:
            step()
            program.forget_tables()
            text = report(command, asdict(self.options), searched, chosen, held, ablated)
            (self.folder / "report.md").write_text(text + "\n")
        plotting.save(self.folder / "report.png", figure(held, self.options.instances, best_rivals(searched)[0]))
        program.publish(self.folder / "report.md", text)

    def search(self) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
        """By learner the configuration with the least objective on the training instances, and the objectives of all."""
        chosen, searched, o = {}, {}, self.options
        cases = [(key, j) for key in ENTRIES for j in range(len(SETTINGS))]
        objectives: dict[str, list[torch.Tensor]] = {}
        for key, j in program.bar(cases, "search"):
            setting, points = SETTINGS[j], ENTRIES[key].configurations(o.configurations)
            config = {"points": points, "horizon": o.search_horizon, "delta": o.delta, "weight": design.WEIGHT}
            found = stage(
                self.folder, _file("search", key, setting), config, lambda k=key, s=setting, p=points, j=j: self.try_all(k, s, p, j)
            )
            objectives.setdefault(key, []).append(torch.tensor(found, dtype=torch.float64))
        for key, parts in objectives.items():
            means = torch.stack(parts).mean(0)
            searched[key] = means.tolist()
            chosen[key] = ENTRIES[key].configurations(o.configurations)[int(means.argmin())]
        return chosen, searched

    def try_all(self, key: str, setting: str, points: Sequence[Mapping[str, float]], j: int) -> list[float]:
        """The objective of every configuration in one setting, on its own four of the training instances."""
        seeds = design.TRAINING[j :: len(SETTINGS)]
        made, n, horizon = make_instances(seeds, setting), len(seeds), self.options.search_horizon
        values = {
            name: torch.tensor([point[name] for point in points], dtype=torch.float64).repeat_interleave(n) for name in points[0]
        }
        numbers = self.play(
            made, torch.arange(n).repeat(len(points)), horizon, n, lambda size, cmdp: ENTRIES[key].make(size, cmdp, values)
        )
        regret, unsafe = (torch.tensor(numbers[name]).view(len(points), n) for name in ("regret", "positive violation"))
        return ((regret + design.WEIGHT * unsafe) / horizon).mean(-1).tolist()  # type: ignore[no-any-return]

    def judge(self, chosen: Mapping[str, Mapping[str, float]], horizon: int) -> Numbers:
        """By setting and learner what came of every run on the held-out instances, `instances` of every seed in turn."""
        players: dict[str, tuple[str, Mapping[str, float]]] = {}
        for key, entry in ENTRIES.items():
            players[key] = (key, entry.start if key.startswith("practical") else chosen[key])
            if players[key][1] != chosen[key]:
                players[f"{key}, searched"] = (key, chosen[key])
        held: Numbers = {setting: {} for setting in SETTINGS}
        for setting, title in program.bar([(s, t) for s in SETTINGS for t in players], f"{horizon:,} episodes"):
            held[setting][title] = self.measured(title, setting, horizon, dict(players[title][1]), _maker(*players[title]))
        return held

    def decide(self, chosen: Mapping[str, Mapping[str, float]], finalists: Sequence[str], horizon: int) -> Numbers:
        """The same of the finalists; each seed is a stage of its own, so that more can be played later."""
        held: Numbers = {setting: {} for setting in SETTINGS}
        cases = [(j, s, t) for j in range(self.options.final_seeds) for s in SETTINGS for t in finalists]
        for j, setting, title in program.bar(cases, f"{horizon:,} episodes"):
            point = ENTRIES[title].start if title.startswith("practical") else chosen[title]
            found = self.measured(title, setting, horizon, dict(point), _maker(title, point), j)
            so_far = held[setting].setdefault(title, {name: [] for name in found})
            for name, values in found.items():
                so_far[name] += values
        return held

    def ablate(self, horizon: int) -> Numbers:
        """The same for practical WC-OPS without each of its changes."""
        held: Numbers = {setting: {} for setting in SETTINGS}
        for setting, title in program.bar([(s, t) for s in SETTINGS for t in ABLATIONS], "ablations"):
            held[setting][title] = self.measured(
                title, setting, horizon, {}, lambda size, cmdp, t=title: tc.WCOPS.practical(*size, **ABLATIONS[t]())
            )
        return held

    def measured(
        self, title: str, setting: str, horizon: int, point: Mapping[str, float], make: Maker, seed: int | None = None
    ) -> dict[str, list[float]]:
        """A stage: one learner in one setting on the held-out instances, with all seeds or with one."""
        n = self.options.instances
        config = {"point": point, "horizon": horizon, "instances": n, "delta": self.options.delta}
        count, name = (self.options.seeds, str(horizon)) if seed is None else (1, f"{horizon}-{seed}")

        def work() -> dict[str, list[float]]:
            made = make_instances(design.HELD_OUT[:n], setting)
            return self.play(made, torch.arange(n).repeat(count), horizon, n * count, make, design.PLAY_SEED + (seed or 0))

        found: dict[str, list[float]] = stage(self.folder, _file(name, title, setting), {**config, "seeds": count}, work)
        return found

    def play(
        self, made: Instances, which: torch.Tensor, horizon: int, distinct: int, make: Maker, seed: int = design.PLAY_SEED
    ) -> dict[str, list[float]]:
        """Whole runs: regret and violations at the end, and the alarms of those that have a drift test."""
        env = made.environment(which, horizon, distinct, seed)
        size = (env.cmdp.layout, env.cmdp.constraints, horizon, self.options.delta, env.runs)
        result = tc.run(make(size, env.cmdp), env, horizon, progress=False)
        if not result.completed:  # half a run must not be kept
            raise KeyboardInterrupt
        numbers = {name: getattr(result, name.replace(" ", "_"))[:, -1].tolist() for name in MEASURES}
        alarms = result.diagnostics.get("Learner/drift_alarms")
        return numbers if alarms is None else {**numbers, "alarms": (alarms * horizon).tolist()}


def _maker(key: str, point: Mapping[str, float]) -> Maker:
    return lambda size, cmdp: ENTRIES[key].make(size, cmdp, _spread(point, size[-1]))


def _spread(point: Mapping[str, float], runs: int) -> Values:
    return {name: torch.full((runs,), value, dtype=torch.float64) for name, value in point.items()}


def _file(*parts: str) -> str:
    return "_".join(parts).replace(" ", "-").replace(",", "").replace("(", "").replace(")", "")


def _changed(options: Options) -> list[str]:
    """The options that are not the defaults, as one types them."""
    if options.quick:
        return ["--quick"]
    default, found = Options(), []
    for name, value in asdict(options).items():
        if value != getattr(default, name) and name not in ("logdir", "quick"):
            found += [program.spelled(name), *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return found
