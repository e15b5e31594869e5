"""All learners on a suite of problems, with equal episodes and seeds: tables, figures, ranks and pairwise wins."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.learners.practical import PRACTICAL_SCALES
from torchcmdp.learners.ties import ties_of
from torchcmdp.plotting.results import MEASURES

from . import program
from .paper.presets import TUNED, settings
from .program import Among, Count, mean_and_half, table, with_interval

SUITE = (
    *("dope/factored", "dope/media", "dope/inventory", "alwayssafe/simple", "alwayssafe/factored", "machine/replacement"),
    *("omdpd/dirichlet", "grid/hazard", "arms/8", "arms/8-switching", "paper/one-constraint", "paper/no-slater"),
)
QUICK = (60, 4)
POINTS = 50
PRACTICAL = "-practical"
# What each player is called; the practical ones are recipes of their own.
NAMES = {key: kind.name for key, kind in tc.LEARNERS.items()}
NAMES |= {"wc-ops-practical": "WC-OPS practical", "opt-cmdp-practical": "OptCMDP practical"}
# What the same players are told otherwise, by the end of their key.
VARIANTS = {"-untold": "untold", "-tied": "tied"}
PLAYERS = NAMES | {f"{key}{end}": f"{name} {word}" for key, name in NAMES.items() for end, word in VARIANTS.items()}
# By problem and learner.
Results = dict[str, dict[str, tc.RunResult]]
WEIGHT = 2.0  # of the positive violation in the loss by which learners are ranked; that of `train tune`
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}"
    "div{overflow-x:auto;margin:1em 0}table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}"
    "td,th{border-bottom:1px solid #ddd;padding:.3em .6em;text-align:left;vertical-align:bottom}td{white-space:pre}"
    "img{max-width:100%}"
)


@dataclass
class Options:
    """Play learners on named problems, all with the same episodes and seeds, and say who does best where.

    Into LOGDIR/NAME go report.md and report.html, for each problem a table and a figure (regret against positive violation with
    95% intervals, curves beside), and a run folder for each learner. The same command continues an interrupted comparison and
    repeats the report of a finished one. S-OPS, MA-OPS and DOPE have their own constants and a baseline with half of the Slater
    gap; they sit out where no policy has a margin, or where the costs change. Every learner is told what the problem's units say
    about the ends of rewards and costs, but for those that a comparison of what is told names otherwise.

    Examples:
      python -m train compare --quick
      python -m train compare --problems dope/media alwayssafe/simple --learners wc-ops opt-cmdp --episodes 5000
      python -m train compare --constants paper --name compare-paper
      python -m train compare --problems gym/frozenlake-4x4 --learners wc-ops wc-ops-untold wc-ops-tied --name told
    """

    problems: Annotated[tuple[str, ...], Among(tc.problems.names())] = SUITE  # Named problems; python -m train problems lists them.
    learners: Annotated[tuple[str, ...], Among(PLAYERS)] = tuple(NAMES)
    """Who plays; the practical ones have constants of their own. With -untold at the end one is not told the ends of rewards and
    costs, with -tied it is told that the dynamics are stationary."""
    episodes: Count = 1_000  # Of every run; also the horizon that the learners' constants are made for.
    seeds: Count = 10  # Runs of every learner on every problem; the intervals are 95% over them.
    constants: Literal["tuned", "paper"] = "tuned"
    """Multiples of the published constants that searches found on small random CMDPs, or the published ones."""
    seed: int = 0  # Of all random numbers.
    name: str = "compare"  # Folder of this comparison inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments; point TensorBoard at it.
    quick: bool = False  # A trial of the machinery: 60 episodes, 4 seeds.
    fresh: bool = False  # Forget what the folder holds and start over.


def main(arguments: Sequence[str]) -> int:
    """Play what is left of the comparison and write its report; returns the exit code."""
    options, folder = program.begin(Options, arguments, "compare")
    if options.quick:
        options.episodes, options.seeds = QUICK
    # problems and learners may be added to what a folder holds
    program.claim(folder, {name: getattr(options, name) for name in ("episodes", "seeds", "constants", "seed")}, options.fresh)
    results: Results = {}
    jobs = [(problem, learner) for problem in options.problems for learner in options.learners]
    jobs = [job for job in jobs if plays(*job)]
    with program.bar(None, "comparison", total=len(jobs) * options.episodes, unit="ep") as shown:
        for j, (problem, learner) in enumerate(jobs, 1):
            shown.set_description_str(f"{PLAYERS[learner]} on {problem}", refresh=False)
            result = play(options, problem, learner, folder, shown)
            if not result.completed:
                return program.interrupted(f" in {learner} on {problem}", options.fresh)
            shown.update(j * options.episodes - shown.n)
            results.setdefault(problem, {})[learner] = result
            if all(other != problem for other, _ in jobs[j:]):
                write_problem(folder, problem, results[problem])
    write_report(folder, results, asdict(options))
    return 0


def plays(name: str, key: str) -> bool:
    """Whether a learner can play a problem: one with a baseline needs a policy with a margin, and costs that do not change."""
    if not program.guarded(key):
        return True
    env = tc.problems.make(name).simulator(1, 0, 2)
    return env.costs.stationary and program.has_margin(env.cmdp)


def play(options: Options, name: str, key: str, folder: Path, shown: Any) -> tc.RunResult:
    """One learner on one problem; `shown` is the bar to move."""
    env = tc.problems.make(name).simulator(options.seeds, options.seed, options.episodes)
    learner = build(key, options.constants, env, options.episodes)
    place, spacing = folder / name.replace("/", "-") / key, max(1, options.episodes // POINTS)
    tell = program.watch(shown, int(shown.n), lambda: env.episode)
    how: dict[str, Any] = {"progress": False, "fresh": options.fresh, "images": False, "on_progress": tell}
    return tc.run(learner, env, options.episodes, place, spacing, **how)


def build(key: str, constants: str, env: tc.Simulator, episodes: int) -> tc.Learner:
    """The learner, with the published constants or the tuned ones, and told the ends that the problem's units know."""
    told = next((end for end in VARIANTS if key.endswith(end)), "")
    key = key.removesuffix(told)
    cmdp = env.cmdp
    given: dict[str, Any] = {}
    kind: Any = tc.LEARNERS[key.removesuffix(PRACTICAL)]
    make = kind.practical if key.endswith(PRACTICAL) else kind.scaled
    if key == "uob-reps" and constants == "tuned":  # WC-OPS that does not look at the costs has its constants
        given = {name: PRACTICAL_SCALES[name] for name in ("eta_scale", "gamma_scale", "radius_scale")}
    elif program.guarded(key):  # its promise is that of its own constants
        given = program.protection(key, cmdp, 0.5, seed=env.seed, first_run=env.first_run)
    elif key in TUNED:
        given = settings(key, TUNED[key] if constants == "tuned" else {"scale": 1.0}, cmdp)
    if told == "-tied":
        given["tied_layers"] = ties_of(cmdp)
    if cmdp.units is not None and told != "-untold":
        given = {"cost_low": cmdp.units.cost_low, "reward_high": cmdp.units.reward_high, **given}
    learner: tc.Learner = make(cmdp.layout, cmdp.constraints, episodes, runs=env.runs, **given)
    return learner


def loss(result: tc.RunResult) -> Tensor:
    """(regret + 2 positive violation) / episodes in normal form, which no choice of units changes, `(runs,)`."""
    scaled = result.scaled
    return (scaled.regret[:, -1] + WEIGHT * scaled.positive_violation[:, -1]) / int(result.episodes[-1])


def write_problem(folder: Path, name: str, results: Mapping[str, tc.RunResult]) -> None:
    """The figure and the numbers of one problem."""
    place = folder / name.replace("/", "-")
    tc.plotting.save(place / "figure.png", tc.plotting.overview({PLAYERS[key]: result for key, result in results.items()}, name))
    rows = []
    for key, result in results.items():
        row: dict[str, Any] = {"learner": key}
        for each in MEASURES:
            row[each], row[f"{each}_ci95"] = mean_and_half(getattr(result, each)[:, -1])
        rows.append({**row, "seconds": round(result.seconds, 2)})
    program.write_table(place / "numbers.csv", rows)


def write_report(folder: Path, results: Results, options: Mapping[str, Any]) -> None:
    """report.md, report.html and what is printed."""
    who = f"{len(results)} problems, {len(options['learners'])} learners with {options['constants']} constants"
    full = all(len(found) == len(_players(results)) for found in results.values())
    parts = [
        "# Comparison",
        f"{who}, {options['seeds']} seeds of {options['episodes']:,} episodes; 95% intervals. Regret and violations are in the "
        f"units of each problem. Learners are ranked by their loss, (regret + {WEIGHT:g} x positive violation) / episodes in "
        f"normal form, in the mean over seeds{'' if full else '; - where a learner sits a problem out, since it needs a margin'}.",
        "## Ranks",
        ranks(results),
        "## Pairwise wins",
        "How often the learner of the row had the smaller loss than that of the column with the same seed: the share of seeds, in "
        "the mean over the problems that both play, and its interval over them; a draw is half a win.",
        wins(results),
        *(part for name, found in results.items() for part in _problem_parts(name, found)),
    ]
    text = "\n\n".join(parts)
    (folder / "report.html").write_text(as_html(text))
    where = f"Written to {folder / 'report.md'}, {folder / 'report.html'} and a folder a problem"
    program.publish(folder / "report.md", text, where)


def _problem_parts(name: str, results: Mapping[str, tc.RunResult]) -> list[str]:
    problem, first = tc.problems.make(name), next(iter(results.values()))
    best = f"Safe optimum {float(first.safe_value.mean()):z.4f} an episode, optimum {float(first.best_value.mean()):z.4f}."
    rows = [
        [PLAYERS[key], *(with_interval(getattr(r, each)[:, -1]) for each in MEASURES), with_interval(loss(r), ".4f")]
        for key, r in results.items()
    ]
    header = ["learner", "regret", "violation", "positive violation", "loss"]
    return [f"## {name}", f"{problem.source}. {best}", table(header, rows, name), f"![{name}]({name.replace('/', '-')}/figure.png)"]


def ranks(results: Results) -> str:
    """The rank of each learner on each problem that it plays by its mean loss, and its mean rank with an interval over them."""
    learners = _players(results)
    places = torch.full((len(results), len(learners)), torch.nan, dtype=torch.float64)
    for row, found in zip(places, results.values(), strict=True):
        here = [j for j, key in enumerate(learners) if key in found]
        means = torch.stack([loss(found[learners[j]]).mean() for j in here]).nan_to_num(nan=torch.inf)
        row[here] = (means[:, None] > means[None]).sum(1).double() + 1
    rows = []
    for j in places.nanmean(0).argsort().tolist():
        own = places[:, j]
        mean = with_interval(own[own.isfinite()], ".2f")
        each = " ".join(f"{'-' if place.isnan() else int(place):>{len(str(len(learners)))}}" for place in own)
        rows.append([PLAYERS[learners[j]], mean, str(int((own == 1).sum())), each])
    return table(["learner", "mean rank", "first on", "rank on each problem, in the order below"], rows, "ranks")


def wins(results: Results) -> str:
    """A row and a column a learner, over the problems that both of them play."""
    learners = _players(results)
    rows = []
    for mine in learners:
        cells = [PLAYERS[mine]]
        for other in learners:
            pairs = [(loss(found[mine]), loss(found[other])) for found in results.values() if {mine, other} <= found.keys()]
            shares = [((ours < theirs).double() + 0.5 * (ours == theirs).double()).mean() for ours, theirs in pairs]
            cells.append(with_interval(torch.stack(shares), ".2f") if shares and mine != other else "-")
        rows.append(cells)
    return table(["", *(PLAYERS[key] for key in learners)], rows, "pairwise wins")


def _players(results: Results) -> list[str]:
    """All who play a problem, in the order of the options: one that sits some of them out is in the others."""
    return [key for key in PLAYERS if any(key in found for found in results.values())]


def as_html(text: str) -> str:
    """Headings, paragraphs, tables and images of our own Markdown as one page."""
    blocks = [_block(block) for block in text.split("\n\n")]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Comparison</title><style>{STYLE}</style>'
    return "\n".join([head, *blocks, "</html>", ""])


def _block(block: str) -> str:
    if image := re.fullmatch(r"!\[(.*)\]\((.*)\)", block):
        return f'<img alt="{html.escape(image[1])}" src="{html.escape(image[2])}">'
    if heading := re.fullmatch(r"(#+) (.*)", block):
        size = len(heading[1])
        return f"<h{size}>{html.escape(heading[2])}</h{size}>"
    if block.startswith("|"):
        lines = [line.strip("|").split("|") for line in block.splitlines()]
        return f"<div><table>{_line(lines[0], 'th')}{''.join(_line(line, 'td') for line in lines[2:])}</table></div>"
    return f"<p>{html.escape(block)}</p>"


def _line(cells: Sequence[str], tag: str) -> str:
    # a space that is as wide as a digit keeps numbers of one and two digits in line
    shown = [cell[1:].rstrip().replace("+-", "±").replace("  ", " \u2007") for cell in cells]
    shown = [f"\u2007{cell[1:]}" if cell.startswith(" ") else cell for cell in shown]
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in shown) + "</tr>"
