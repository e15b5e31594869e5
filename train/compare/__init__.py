"""All learners on a suite of problems, with equal episodes and seeds: tables, figures, ranks and pairwise wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torchcmdp as tc
from torchcmdp.learners import LEARNERS, Learner
from torchcmdp.learners.practical import PRACTICAL_SCALES
from torchcmdp.learners.ties import ties_of

from ..paper.presets import TUNED, settings
from ..program import Among, Count, bar, begin, claim, guarded, has_margin, interrupted, protection, watch
from .report import NAMES, PLAYERS, VARIANTS, Results, write_problem, write_report

SUITE = (
    *("dope/factored", "dope/media", "dope/inventory", "alwayssafe/simple", "alwayssafe/factored", "machine/replacement"),
    *("omdpd/dirichlet", "grid/hazard", "arms/8", "arms/8-switching", "paper/one-constraint", "paper/no-slater"),
)
QUICK = (60, 4)
POINTS = 50
PRACTICAL = "-practical"


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
    options, folder = begin(Options, arguments, "compare")
    if options.quick:
        options.episodes, options.seeds = QUICK
    # problems and learners may be added to what a folder holds
    claim(folder, {name: getattr(options, name) for name in ("episodes", "seeds", "constants", "seed")}, options.fresh)
    results: Results = {}
    jobs = [(problem, learner) for problem in options.problems for learner in options.learners]
    jobs = [job for job in jobs if plays(*job)]
    with bar(None, "comparison", total=len(jobs) * options.episodes, unit="ep") as shown:
        for j, (problem, learner) in enumerate(jobs, 1):
            shown.set_description_str(f"{PLAYERS[learner]} on {problem}", refresh=False)
            result = play(options, problem, learner, folder, shown)
            if not result.completed:
                return interrupted(f" in {learner} on {problem}", options.fresh)
            shown.update(j * options.episodes - shown.n)
            results.setdefault(problem, {})[learner] = result
            if all(other != problem for other, _ in jobs[j:]):
                write_problem(folder, problem, results[problem])
    write_report(folder, results, asdict(options))
    return 0


def plays(name: str, key: str) -> bool:
    """Whether a learner can play a problem: one with a baseline needs a policy with a margin, and costs that do not change."""
    if not guarded(key):
        return True
    env = tc.problems.make(name).simulator(1, 0, 2)
    return env.costs.stationary and has_margin(env.cmdp)


def play(options: Options, name: str, key: str, folder: Path, shown: Any) -> tc.RunResult:
    """One learner on one problem; `shown` is the bar to move."""
    problem = tc.problems.make(name)
    env = problem.simulator(options.seeds, options.seed, options.episodes)
    learner = build(key, options.constants, env, options.episodes)
    place = folder / name.replace("/", "-") / key
    spacing = max(1, options.episodes // POINTS)
    how: dict[str, Any] = {"progress": False, "fresh": options.fresh, "images": False}
    how["on_progress"] = watch(shown, int(shown.n), lambda: env.episode)
    return tc.run(learner, env, options.episodes, place, spacing, **how)


def build(key: str, constants: str, env: tc.Simulator, episodes: int) -> Learner:
    """The learner, with the published constants or the tuned ones, and told the ends that the problem's units know."""
    told = next((end for end in VARIANTS if key.endswith(end)), "")
    key = key.removesuffix(told)
    cmdp = env.cmdp
    given: dict[str, Any] = {}
    kind: Any = LEARNERS[key.removesuffix(PRACTICAL)]
    make = kind.practical if key.endswith(PRACTICAL) else kind.scaled
    if key == "uob-reps" and constants == "tuned":  # WC-OPS that does not look at the costs has its constants
        given = {name: PRACTICAL_SCALES[name] for name in ("eta_scale", "gamma_scale", "radius_scale")}
    elif guarded(key):  # its promise is that of its own constants
        given = protection(key, cmdp, 0.5, seed=env.seed, first_run=env.first_run)
    elif key in TUNED:
        given = settings(key, TUNED[key] if constants == "tuned" else {"scale": 1.0}, cmdp)
    if told == "-tied":
        given["tied_layers"] = ties_of(cmdp)
    if cmdp.units is not None and told != "-untold":
        given = {"cost_low": cmdp.units.cost_low, "reward_high": cmdp.units.reward_high, **given}
    learner: Learner = make(cmdp.layout, cmdp.constraints, episodes, runs=env.runs, **given)
    return learner
