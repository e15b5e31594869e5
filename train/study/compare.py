"""Learners with equal search effort, judged on instances that nothing was chosen on; the design is in `train/study/design.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

import torchcmdp as tc
from torchcmdp.plotting.style import blank, cross, looks, name_points, tidy, zero_line

from ..program import Count, Whole, bar, begin, forget_tables, mean_and_half, publish, retyped, table, with_interval
from ..tune.evaluate import play_out, spread, stage
from . import design
from .design import ABLATIONS, ENTRIES, SETTINGS, Instances, Size, make_instances

Maker = Callable[[Size, tc.LayeredCMDP], tc.Learner]
MEASURES = ("regret", "violation", "positive violation")
TRIED = len(design.TRAINING) // len(SETTINGS)  # instances of each setting
# by setting and learner: measures, a number an instance, (instances,)
Numbers = dict[str, dict[str, dict[str, Tensor]]]
PAIR = ("regret", "positive violation")
PUBLISHED = tuple(key for key, entry in ENTRIES.items() if entry.published)


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


def wilson(hits: int, n: int) -> tuple[float, float]:
    """The 95% Wilson interval of a fraction."""
    from scipy.stats import binomtest  # slow to import

    found = binomtest(hits, n).proportion_ci(method="wilson")
    return found.low, found.high


def dominates(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """On which instances one has less regret and less positive violation than the other, `(instances,)` bool."""
    return torch.stack([one[name] < other[name] for name in PAIR]).all(0)


def undominated(players: Mapping[str, Mapping[str, Tensor]], title: str) -> Tensor:
    """On which instances no published rival dominates a learner, `(instances,)` bool."""
    rivals = [players[key] for key in PUBLISHED if key != title and key in players]
    return ~torch.stack([dominates(rival, players[title]) for rival in rivals]).any(0)


def best_rivals(searched: Mapping[str, Sequence[float]], count: int = design.FINAL_RIVALS) -> list[str]:
    """The published rivals with the least objectives on the training instances, the best first."""
    return sorted(PUBLISHED, key=lambda key: min(searched[key]))[:count]


def report(
    command: str,
    options: Mapping[str, Any],
    searched: Mapping[str, Sequence[float]],
    chosen: Mapping[str, Mapping[str, float]],
    held: Mapping[int, Numbers],
    ablated: Numbers,
) -> str:
    """The report, as Markdown."""
    n, rival = options["instances"], best_rivals(searched)[0]
    size = "-".join(map(str, design.WIDTHS))
    parts = [
        f"`{command}`",
        f"{n} held-out instances ({size}, {design.ACTIONS} actions, {design.CONSTRAINTS} constraints; half with Slater gap "
        f"{design.TIGHT}, half with {design.SLACK}, or less), {options['seeds']} seeds; of the finalists, the practical learners "
        f"and the {design.FINAL_RIVALS} best published rivals, over the final horizon {options['final_seeds']}. Every learner had "
        f"{options['configurations']} configurations on 16 training instances; the best published rival there is {rival}. "
        "Intervals are 95%: of means over instances, and Wilson's of fractions. Undominated: no published rival that was played "
        f"has both less regret and less positive violation on the instance. Dominating: less of both than {rival}.",
        *(f"## {T:,} episodes\n\n{_table(numbers, rival, T)}\n\n{_goals(numbers, rival)}" for T, numbers in held.items()),
    ]
    if ablated:
        first = next(iter(held))
        parts.append(f"## Practical WC-OPS without each of its changes, {first:,} episodes\n\n{_ablation(held[first], ablated)}")
    rows = [
        [key, f"{min(searched[key]):.3f}", ", ".join(f"{k} {v:.3g}" for k, v in chosen[key].items()) or "-"] for key in searched
    ]
    parts.append("## What the search chose\n\n" + table(["learner", "objective", "constants"], rows, "search"))
    return "\n\n".join(parts)


def _table(numbers: Numbers, rival: str, episodes: int) -> str:
    rows = []
    for setting, players in numbers.items():
        for title, found in players.items():
            cells = [with_interval(found[name]) for name in MEASURES]
            safe = "-" if title == rival else _fraction(dominates(found, players[rival]))
            alarms = f"{float(found['alarms'].mean()):.1f}" if "alarms" in found else "-"
            rows.append([setting, title, *cells, _fraction(undominated(players, title)), safe, alarms])
    header = ["setting", "learner", *MEASURES, "undominated", "dominating", "alarms"]
    return table(header, rows, f"{episodes:,} episodes")


def _fraction(hits: Tensor) -> str:
    low, high = wilson(int(hits.sum()), len(hits))
    return f"{float(hits.double().mean()):.0%} [{low:.0%}, {high:.0%}]"


def _goals(numbers: Numbers, rival: str) -> str:
    """Whether practical WC-OPS as it is shipped meets the goals, in each setting."""
    lines = []
    for setting, players in numbers.items():
        hits = undominated(players, "practical WC-OPS")
        low, _ = wilson(int(hits.sum()), len(hits))
        met = float(hits.double().mean()) >= design.LEAST_UNDOMINATED and low > design.LEAST_LOWER_END
        tight, roomy = (float(part.double().mean()) for part in (hits[::2], hits[1::2]))  # as the seeds alternate
        shares = f"{_fraction(hits)} (tight {tight:.0%}, with slack {roomy:.0%})"
        line = f"- {setting}: undominated on {shares}: {'met' if met else 'not met'}"
        if setting in design.CHANGING:
            ratio = float(players["practical WC-OPS"]["positive violation"].mean() / players[rival]["positive violation"].mean())
            kept = "met" if ratio <= design.MOST_VIOLATION else "not met"
            line += f"; positive violation {ratio:.0%} of {rival}'s: {kept}"
        ours = players["practical OptCMDP"]
        beaten, beats = dominates(ours, players["practical WC-OPS"]), dominates(players["practical WC-OPS"], ours)
        lines.append(line + f"; dominated by practical OptCMDP on {_fraction(beaten)}, dominating it on {_fraction(beats)}.")
    goal = (
        f"Goals for practical WC-OPS as it is shipped (at least {design.LEAST_UNDOMINATED:.0%} with the lower end above "
        f"{design.LEAST_LOWER_END:.0%}; where costs change, at most {design.MOST_VIOLATION:.0%} of the rival's positive violation):"
    )
    return "\n".join([goal, "", *lines])


def _ablation(numbers: Numbers, ablated: Numbers) -> str:
    rows = []
    for setting, players in numbers.items():
        whole = players["practical WC-OPS"]
        for title, found in {"whole": whole, **ablated[setting]}.items():
            cells = [with_interval(found[name]) for name in PAIR]
            change = ["-" if title == "whole" else with_interval(found[name] - whole[name]) for name in PAIR]
            rows.append([setting, title, *cells, *change, _fraction(undominated({**players, title: found}, title))])
    header = ["setting", "practical WC-OPS", *PAIR, *(f"more {name}" for name in PAIR), "undominated"]
    return table(header, rows, "ablations")


def figure(held: Mapping[int, Numbers], n: int, rival: str) -> Figure:
    """A panel for each setting: what everybody pays in regret and positive violation, an episode, from horizon to horizon."""
    drawn = blank(13.2, 9.8)
    marks = ", ".join(f"{horizon:,}" for horizon in held)
    for j, setting in enumerate(SETTINGS):
        axes = drawn.add_subplot(2, 2, j + 1)
        paths: dict[str, list[list[float]]] = {}
        for horizon, numbers in held.items():
            for title, found in numbers[setting].items():
                if "searched" not in title:  # the tables have them
                    pairs = [mean_and_half(found[name] / horizon) for name in PAIR]
                    paths.setdefault(title, []).append([value for pair in pairs for value in pair])
        ends = []
        for title, path in paths.items():
            name, colour, shape = _mark(title)
            for k, (x, dx, y, dy) in enumerate(path):
                last = k + 1 == len(path)
                bars = (dx, dy) if last else (0.0, 0.0)
                cross(axes, x, y, *bars, colour, fmt=shape, markersize=4 + 2 * k, alpha=1 if last else 0.4)
            axes.plot([point[0] for point in path], [point[2] for point in path], color=colour, linewidth=1, alpha=0.4)
            ends.append((path[-1][0], path[-1][2], name, colour))
        axes.set_yscale("log")  # some are ten times as unsafe as others
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.margins(y=0.12)
        zero_line(axes, "x")
        note = f"larger marks, longer runs: {marks} episodes; 95% intervals over {n} instances; squares: as shipped, dots: searched"
        title = _finding(setting, held[max(held)][setting], rival, max(held))
        tidy(axes, "regret an episode (reward)", "positive violation an episode (cost)", title, note)
        name_points(axes, ends)
    return drawn


def _finding(setting: str, players: Mapping[str, Mapping[str, Tensor]], rival: str, horizon: int) -> str:
    """What practical WC-OPS buys, and what it pays."""
    ours, theirs = players["practical WC-OPS"], players[rival]
    ratio = float(ours["positive violation"].mean() / theirs["positive violation"].mean())
    more, half = mean_and_half((ours["regret"] - theirs["regret"]) / horizon)
    clear = f"{abs(more):.2f} {'more' if more > 0 else 'less'} regret an episode"
    regret = clear if abs(more) > half else "no clearly different regret"
    return f"{setting.capitalize()}: WC-OPS practical has {ratio:.0%} of {rival}'s positive violation, with {regret}"


def _mark(title: str) -> tuple[str, str, str]:
    """What a learner is called in figures, its colour, and its shape: as published a dot, practical a square."""
    practical = title.startswith("practical ")
    name = f"{title.removeprefix('practical ')} practical" if practical else title
    return name, looks([name])[name][0], "s" if practical else "o"
