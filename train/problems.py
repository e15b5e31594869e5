"""The named problems: what is known of each, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torchcmdp as tc

from .program import bar, choose, parse, table


@dataclass
class Options:
    """Print what is known of the named problems: the best safe policy, the safest, sizes; all in the units of their papers.

    Examples:
      python -m train problems
      python -m train problems --names dope/media gym/taxi --sources
    """

    names: tuple[str, ...] = ()  # Which problems; all by default.
    sources: bool = False  # Also print where each was published, and what of it is ours.


def main(arguments: Sequence[str]) -> None:
    """Print the facts."""
    options = parse(Options, arguments, prog="python -m train problems")
    for name in options.names:
        choose(name, tc.problems.names(), "a named problem")
    problems = [tc.problems.make(name) for name in options.names or tc.problems.names()]
    header = ["problem", "safe optimum", "optimum", "budget", "safest", "Slater gap", "layers", "states", "widest", "actions"]
    print(table([*header, "successors"], [_row(problem) for problem in bar(problems, "problems")]))
    print("\nThe Slater gap is in normal form; successors are those of a pair, in the mean; states are those of all layers.")
    if options.sources:
        print("\n".join(["", *(f"{problem.name}: {problem.source}." for problem in problems)]))


def _row(problem: tc.problems.Problem) -> list[str]:
    facts = problem.facts()
    safest = ", ".join(f"{cost:z.4g}" for cost in facts.safest)
    numbers = [f"{facts.optimum:z.6f}", f"{facts.best:z.6f}", ", ".join(facts.budget), safest, f"{facts.slater:z.4f}"]
    sizes = [facts.layers, facts.states, facts.widest, facts.actions]
    return [problem.name, *numbers, *map(str, sizes), f"{facts.successors:.1f}"]
