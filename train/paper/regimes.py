"""`python -m train paper regimes`: where the paper's headline holds, over horizon, constants, radii, size and slack."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from torchcmdp.errors import InvalidInput

from ..program import Count, experiment_folder, interrupted, parse, table, write_table
from . import play_all
from .claims import FAILS, HOLDS, MARGIN, UNDECIDED, Finding, findings
from .experiment import Job
from .presets import REGIMES, SCALES

HORIZONS, QUICK_HORIZONS = (1_000, 5_000, 25_000), (60, 120)
INSTANCES, QUICK_INSTANCES = 20, 3
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
        found = set(self.parts.values())
        return FAILS if FAILS in found else HOLDS if found == {HOLDS} else UNDECIDED


def main(arguments: Sequence[str]) -> int:
    """Play the regimes; returns the exit code."""
    options = parse(Options, arguments, prog="python -m train paper regimes")
    instances = options.instances or (QUICK_INSTANCES if options.quick else INSTANCES)
    for option, value in (("--runs", options.runs), ("--instances", instances)):
        if value < 2:
            raise InvalidInput(f"{option} is 1; verdicts need intervals over {option[2:]}, and so at least 2.")
    folder = experiment_folder(options.logdir, f"{options.name}-quick" if options.quick else options.name)
    horizons = QUICK_HORIZONS if options.quick else HORIZONS
    jobs = [
        Job(name, family, episodes, instances, options.runs, folder / f"{name}-{episodes}", options.fresh)
        for episodes, name, family in product(horizons, REGIMES, SCALES)
    ]
    outcomes = play_all(jobs, options.jobs or os.cpu_count() or 1)
    if len(outcomes) < len(jobs) or not all(outcome.completed for outcome in outcomes):
        return interrupted("", options.fresh)
    regimes = [regime for outcome in outcomes for regime in of_job(outcome.job, findings([outcome]))]
    few = "" if instances >= INSTANCES else f"**{instances} instances: a trial of the machinery, not a finding.**"
    _write(folder, regimes, " ".join(["python -m train paper regimes", *arguments]), few)
    return 0


def of_job(job: Job, found: Sequence[Finding]) -> list[Regime]:
    """The cells of a job, one for each mode of OptCMDP's radii."""
    verdicts = {finding.claim: finding.verdict for finding in found}
    cells = [{part: verdicts[claim.format(mode=mode)] for part, claim in PARTS.items()} for mode in MODES]
    return [Regime(job.preset, job.family, mode, job.episodes, parts) for mode, parts in zip(MODES, cells, strict=True)]


def _write(folder: Path, regimes: Sequence[Regime], command: str, few: str) -> None:
    """The figure, the page and the table."""
    from torchcmdp import plotting

    from . import regimes_figure

    plotting.save(folder / "regimes.png", regimes_figure.draw(regimes))
    rows = [
        {"instances": r.preset, "constants": r.family, "radii": r.mode, "episodes": r.episodes, **r.parts, "headline": r.verdict}
        for r in regimes
    ]
    write_table(folder / "regimes.csv", rows)
    cells = [[str(value) for value in row.values()] for row in rows]
    words = paragraph(regimes)
    page = ["# Where the paper's headline holds", f"Written by `{command}`.", few, words, RULE, "![regimes](regimes.png)"]
    page.append(table(list(rows[0]), cells, "regimes"))
    (folder / "regimes.md").write_text("\n\n".join(part for part in page if part) + "\n")
    print(f"{words}\n\nPage: {folder / 'regimes.md'}; figure: {folder / 'regimes.png'}")


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
