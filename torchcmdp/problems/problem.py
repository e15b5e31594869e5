"""What a named problem is, the list of all of them, and the facts about one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief, choice, whole_number
from torchcmdp.planning import safe_optimum, slater_gap, unconstrained_optimum
from torchcmdp.problems.gymnasium import cost_process
from torchcmdp.processes import Bernoulli, Fixed
from torchcmdp.protocols import ProcessLike
from torchcmdp.simulator import Simulator

# The costs of a problem whose costs change, from its CMDP and the number of episodes that will be played.
Costs = Callable[[LayeredCMDP, int], ProcessLike]
Make = Callable[..., LayeredCMDP]


@dataclass(frozen=True)
class Entry:
    """A problem in the list.

    Attributes:
        make: Makes the CMDP from those of `horizon`, `budget` and `seed` that it has.
        source: Where it was published, and what of it is ours.
        defaults: The published settings.
        optimum: What the best safe policy earns with these settings, where that was published.
        noise: Whether rewards and costs are drawn; else the feedback of a pair is its mean.
        costs: As above.
    """

    make: Callable[..., LayeredCMDP]
    source: str
    defaults: dict[str, Any]
    optimum: float | None = None
    noise: bool = True
    costs: Costs | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of a problem, in the user's units.

    Attributes:
        optimum: What an episode of the best safe policy earns.
        best: The same of the best policy, safe or not.
        budget: One a constraint, with its sense.
        safest: What each cost is at least, and each utility at most, whatever else happens.
        slater: By how much the safest policy keeps all constraints, in the normal form of the CMDP.
        layers, states, widest, actions, constraints: Sizes; of the states those of all layers, and of the widest one.
        successors: How many states can follow a pair, in the mean over the pairs of all layers but the last.
    """

    optimum: float
    best: float
    budget: tuple[str, ...]
    safest: tuple[float, ...]
    slater: float
    layers: int
    states: int
    widest: int
    actions: int
    constraints: int
    successors: float


@dataclass(frozen=True, eq=False)
class Problem:
    """A CMDP that has a name, and what one plays it with.

    Attributes:
        name: As in `names()`.
        source: Where it was published, and what of it is ours.
        cmdp: The CMDP.
        optimum: What the best safe policy earns in the user's units, where that was published and the settings are those.
        settings: `horizon`, `budget` and `seed`, as far as it has them.
        entry: Its place in the list.
    """

    name: str
    source: str
    cmdp: LayeredCMDP
    optimum: float | None
    settings: dict[str, Any]
    entry: Entry

    def simulator(self, runs: int = 1, seed: int = 0, episodes: int = 1_000, **options: Any) -> Simulator:
        """A simulator of the problem.

        Args:
            runs, seed, options: As for `Simulator`.
            episodes: How many will be played; problems whose costs change do so in parts of it.
        """
        cmdp, noise = self.cmdp, self.entry.noise
        episodes = whole_number("episodes", episodes, least=1)
        rewards: ProcessLike = Bernoulli(cmdp.rewards) if noise else Fixed(cmdp.rewards)
        costs: ProcessLike = cost_process(cmdp) if noise else Fixed(cmdp.costs)
        if self.entry.costs is not None:
            costs = self.entry.costs(cmdp, episodes)
        return Simulator(cmdp, rewards, costs, runs=runs, seed=seed, **options)

    def facts(self) -> Facts:
        """What is known of it, by linear programs."""
        cmdp, layout = self.cmdp, self.cmdp.layout
        best, safe = (float(found(cmdp).value) for found in (unconstrained_optimum, safe_optimum))
        # one state after the last layer follows everything, and says nothing
        pairs = layout.pair_mask(cmdp.device)[:-1]
        several = (cmdp.transitions[:-1] > 0).sum(-1)[pairs].double()
        return Facts(
            optimum=self.earned(safe),
            best=self.earned(best),
            budget=self._budgets(),
            safest=tuple(self._safest().tolist()),
            slater=float(slater_gap(cmdp)),
            layers=layout.layers,
            states=layout.total_states,
            widest=layout.width,
            actions=layout.actions,
            constraints=cmdp.constraints,
            successors=float(several.mean()) if len(several) else 1.0,
        )

    def earned(self, value: float) -> float:
        """What an episode earns in the user's units whose rewards sum to `value` in the CMDP."""
        return value if self.cmdp.units is None else float(self.cmdp.units.episode_return(value))

    def _budgets(self) -> tuple[str, ...]:
        units = self.cmdp.units
        if units is None:
            return ("<= 0",) * self.cmdp.constraints
        return tuple(f"{sense} {budget:.6g}" for sense, budget in zip(units.sense, units.budget.tolist(), strict=True))

    def _safest(self) -> Tensor:
        costs = self.cmdp.costs
        least = costs.new_tensor([-float(slater_gap(self.cmdp, each)) for each in costs[:, None]])
        return least if self.cmdp.units is None else self.cmdp.units.episode_costs(least)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"Problem({self.name!r}, {settings}: {self.cmdp!r})"


ENTRIES: dict[str, Entry] = {}


def entry(
    name: str, source: str, *, optimum: float | None = None, noise: bool = True, costs: Costs | None = None, **defaults: Any
) -> Callable[[Make], Make]:
    """Put the function below in the list; `defaults` are the published settings, a budget also as a function of the horizon."""

    def add(make: Make) -> Make:
        ENTRIES[name] = Entry(make, source, defaults, optimum, noise, costs)
        return make

    return add


def names() -> list[str]:
    """All named problems."""
    return list(ENTRIES)


def make(name: str, *, horizon: int | None = None, budget: object = None, seed: int | None = None) -> Problem:
    """A problem of the literature, by name.

    Args:
        name: One of `names()`.
        horizon: Steps of an episode, in place of the published ones.
        budget: What its cost may sum to over an episode, in place of the published one.
        seed: Of problems that are drawn.
    """
    found = ENTRIES[choice("name", name, names())]
    asked: dict[str, Any] = {"horizon": horizon, "budget": budget, "seed": seed}
    given = {key: value for key, value in asked.items() if value is not None}
    for key, value in given.items():
        if key not in found.defaults:
            own = " and ".join(found.defaults) or "no settings"
            raise InvalidInput(f"{key} is {brief(value)} for {name!r}, which has no {key}; it has {own}.")
    for key, least in (("horizon", 1), ("seed", 0)):
        if key in given:
            given[key] = whole_number(key, given[key], least=least)
    settings = {**found.defaults, **given}
    if callable(settings.get("budget")):
        settings["budget"] = settings["budget"](settings["horizon"])
    cmdp = found.make(**settings)
    return Problem(name, found.source, cmdp, None if given else found.optimum, settings, found)
