"""What every learner is: a module with a policy and an update, its hyperparameters one value a run, its state in buffers."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from torchcmdp.confidence import KernelSet, confidence_set, visited_transitions
from torchcmdp.errors import InvalidInput, brief, check_delta, check_memory, check_place, choice, whole_number
from torchcmdp.hyperparameters import PerRun, as_numbers, check_range, connected, per_run, plain, register
from torchcmdp.identity import config_of, fingerprint
from torchcmdp.layout import Layout, check_layout
from torchcmdp.learners.ties import Ties, ties_of
from torchcmdp.occupancy import uniform_policy
from torchcmdp.trajectory import Trajectory
from torchcmdp.units import units_of

T = TypeVar("T")


class Learner(nn.Module, ABC):
    """A batch of independent learners on CMDPs of one layout.

    A subclass sets `name`, declares its settings in `hyperparameters` and `choices`, registers its state as buffers and replaces
    them in `update` (never in place, so that autograd can go through several episodes), and implements `policy` and `update`. The
    class's signature shows its settings, and its docstring says what each means.

    Args:
        layout: Layer widths and actions.
        constraints: m.
        horizon: T, the number of episodes the confidence terms are made for.
        delta: Failure probability.
        runs: How many independent learners there are.
        dtype, device: Of the state.
        cost_low: The smallest that each mean cost can be, below which no optimism goes: a number, or a tensor that broadcasts to
            `(runs x m x L x S x A)`. -1 by default; `for_env` takes it from the CMDP's units.
        reward_high: The largest that each mean reward can be, the same `(runs x L x S x A)`; 1 by default.
        tied_layers: Where a state is the same in every layer, as in `cmdp.origin.ties`, `(L x S)`: what is seen of it in one of
            them counts in all. In `for_env` also True, for what the CMDP knows of itself.
        known_rewards: The mean rewards of the CMDP, as `cmdp.rewards`, in place of all estimates of them; broadcasts to
            `(runs x L x S x A)`. Refused, as `known_costs` is, by learners that have no use for it.
        known_costs: The mean costs, as `cmdp.costs`, in place of all estimates; broadcasts to `(runs x m x L x S x A)`.
        settings: The hyperparameters and choices of the subclass; a hyperparameter may also be a function of the learner made so
            far, and is the default where it is None.

    Attributes:
        name: What the learner is called in configurations and curves.
        hyperparameters: By name the default, a number or a function of the learner made so far; None where it can be left out.
        choices: By name what can be chosen, the default first.
        theorems: Of which quantities the bounds of `theory` hold for this learner, of "regret", "violation", "positive_violation".
        confidence: Kind of the transition confidence set; a choice in most learners.
        episode: Episodes seen, an int64 scalar tensor.
        visits: N(x,a), `(runs x L x S x A)`.
        transition_visits: M(x,a,y), `(runs x L x S x A x K)`.
        cost_low, reward_high: As above, with one row or a row a run.
        known_rewards, known_costs: The same, or None.
        ties: Of tied layers, else None. What a subclass sums up over visits it sums up as `pooled` says.
        uses: Which of "known_rewards" and "known_costs" the learner has a use for.
        phases: Into how many it divides delta, which is then that of one.
        parts: The attributes, such as its solver, whose own configurations are a part of the learner's.
    """

    name: ClassVar[str]
    hyperparameters: ClassVar[Mapping[str, float | Callable[[Any], PerRun] | None]] = {}
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}
    theorems: ClassVar[Sequence[str]] = ()
    uses: ClassVar[Sequence[str]] = ()
    phases: ClassVar[int] = 1
    parts: ClassVar[Sequence[str]] = ()
    __signature__: ClassVar[inspect.Signature]
    confidence: str = "entrywise"
    episode: Tensor
    visits: Tensor
    transition_visits: Tensor
    cost_low: Tensor
    reward_high: Tensor
    known_rewards: Tensor | None
    known_costs: Tensor | None
    ties: Ties | None
    _unit: Tensor

    def __init__(
        self,
        layout: Layout,
        constraints: int,
        horizon: int,
        delta: float = 0.01,
        runs: int = 1,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
        cost_low: Tensor | float | None = None,
        reward_high: Tensor | float | None = None,
        tied_layers: Tensor | bool = False,
        known_rewards: Tensor | float | None = None,
        known_costs: Tensor | float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        check_layout(layout)
        self.layout = layout
        self.constraints = whole_number("constraints", constraints, least=0)
        self.horizon = whole_number("horizon", horizon, least=1)
        self.runs = whole_number("runs", runs, least=1)
        check_delta(delta)
        check_place(dtype, device)
        states = math.prod(layout.transition_shape) + (self.constraints + 1) * math.prod(layout.pair_shape)
        check_memory(f"{brief(runs)} runs with {brief(constraints)} constraints", self.runs * states)
        self.delta = float(delta) / self.phases
        self.register_buffer("_unit", torch.ones((), dtype=dtype, device=device), persistent=False)
        self.register_buffer("episode", torch.zeros((), dtype=torch.int64, device=device))
        self.add_zeros("visits", *layout.pair_shape)
        self.add_zeros("transition_visits", *layout.transition_shape)
        given = {"cost_low": cost_low, "reward_high": reward_high, "known_rewards": known_rewards, "known_costs": known_costs}
        self._add_known({name: value for name, value in given.items() if value is not None})
        self.ties = None if tied_layers is None or tied_layers is False else Ties(layout, cast(Tensor, tied_layers), device)
        for name in settings:
            choice(f"an argument of {type(self).__name__}", name, tuple(self.__signature__.parameters))
        for name, default in self.hyperparameters.items():
            value = default if settings.get(name) is None else settings[name]
            self.add_hyperparameter(name, value(self) if callable(value) else value)
        for name, kinds in self.choices.items():
            setattr(self, name, choice(name, settings.get(name, kinds[0]), kinds))
        self._forget()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _signature(cls)

    @classmethod
    def for_env(cls, env: Any, *, horizon: int, **options: Any) -> Self:
        """A learner for an environment, which gives layout, constraints, runs, dtype and device, and the ends of rewards and costs.

        Args:
            env: What the learner will play in, such as a `Simulator`.
            horizon: T, the number of episodes the confidence terms are made for.
            options: The other arguments of the learner, `delta` among them, or the multiples of `scaled`.
        """
        world, units = getattr(env, "cmdp", env), units_of(env)  # one that is played blindly says its own sizes
        size = (world.layout, world.constraints, horizon)
        if options.get("tied_layers") is True:
            options["tied_layers"] = ties_of(world)
        if units is not None:
            options = {"cost_low": units.cost_low, "reward_high": units.reward_high, **options}
        return cls.scaled(*size, runs=env.runs, dtype=env.dtype, device=env.device, **options)

    @classmethod
    def scaled(cls, *args: Any, **options: Any) -> Self:
        """The learner with hyperparameters as multiples of their defaults, such as `eta_scale=2.0` for twice the usual `eta`.

        Args:
            args: As in the constructor.
            options: Multiples by the names of `multiples`, floats or tensors with one value a run, and options of the constructor.
        """
        given = {name: options.pop(name) for name in cls.multiples() if name in options}
        multiplied = {name.removesuffix("_scale"): _multiple(cls, name, value) for name, value in given.items()}
        return cls(*args, **{**multiplied, **options})

    @classmethod
    def multiples(cls) -> tuple[str, ...]:
        """The names under which `scaled` takes multiples: of hyperparameters whose default is not zero, but for scales."""
        known = cls.__signature__.parameters
        names = (name for name, default in cls.hyperparameters.items() if default not in (None, 0) and not name.endswith("_scale"))
        return tuple(f"{name}_scale" for name in names if f"{name}_scale" not in known)

    def retune(self, other: Self) -> None:
        """Go on with the hyperparameters of another learner of the same kind, and with this one's state."""
        for part, model in zip(self.modules(), other.modules(), strict=True):
            for name in (*self.hyperparameters, "margin"):
                if name in part._buffers or name in part._parameters:
                    setattr(part, name, getattr(model, name))
        self._forget()

    @property
    def dtype(self) -> torch.dtype:
        """Of the state."""
        return self._unit.dtype

    @property
    def device(self) -> torch.device:
        """Of the state."""
        return self._unit.device

    @property
    @abstractmethod
    def policy(self) -> Tensor:
        """What the learner plays in the next episode: `(runs x L x S x A)`, zero in the padding."""

    @abstractmethod
    def update(self, trajectory: Trajectory) -> None:
        """Learn from one episode of every run."""

    def visited(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """One at the pairs and at the transitions of an episode, zero elsewhere: `(runs x L x S x A)`, `(runs x L x S x A x K)`."""
        self.check_trajectory(trajectory)
        transitions = visited_transitions(trajectory, self.layout, self.dtype)
        return transitions.sum(-1), transitions

    def count_visits(self, visited: Tensor, transitions: Tensor) -> None:
        """N, M and t with an episode counted."""
        self.episode = self.episode + 1
        self.visits = self.visits + self.pooled(visited)
        self.transition_visits = self.transition_visits + (transitions if self.ties is None else self.ties.transitions(transitions))

    def pooled(self, values: Tensor) -> Tensor:
        """Sums over visits with those of tied layers added, `(... x L x S x A)`; as they are where no layers are tied."""
        return values if self.ties is None else self.ties.pairs(values)

    @property
    def kernel_kind(self) -> str:
        """The kind of the confidence set in force."""
        return self.confidence

    @property
    def kernels(self) -> KernelSet:
        """P_{t-1}, the transition kernels that the episodes so far leave plausible."""
        return self._kept("kernels", self._confidence_set, self.visits, self.transition_visits)

    def _confidence_set(self) -> KernelSet:
        counts = (self.visits, self.transition_visits)
        return confidence_set(self.kernel_kind, *counts, self.layout, radius_scale=self.scale("radius_scale"), **self.made_for)

    @property
    def made_for(self) -> dict[str, Any]:
        """What every confidence term is made for."""
        return {"horizon": self.horizon, "delta": self.delta}

    def _kept(self, name: str, make: Callable[[], T], *sources: Tensor) -> T:
        """What `make` returns, made again only when the buffers that it follows from were replaced."""
        held = self._derived.get(name)
        if held is None or any(old is not new for old, new in zip(held[0], sources, strict=True)):
            held = self._derived[name] = (sources, make())
        return cast(T, held[1])

    def _forget(self) -> None:
        """Drop all that was computed from the buffers, and what the last update left for `diagnostics`."""
        self._derived: dict[str, tuple[tuple[Tensor, ...], Any]] = {}
        self._last: Any = None

    def diagnostics(self) -> dict[str, Tensor]:
        """Numbers about the last update by TensorBoard tag, `(runs,)` each; empty before the first."""
        if self._last is None:
            return {}
        return self._last if isinstance(self._last, dict) else self._diagnose()

    def _diagnose(self) -> dict[str, Tensor]:
        """The diagnostics of an update that left something in `_last`."""
        return {}

    def report(self, diagnostics: dict[str, Tensor]) -> None:
        """Take the diagnostics of an update that somebody else did, on buffers that were replaced since."""
        self._forget()
        self._last = diagnostics

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        return {
            "name": self.name,
            **self.layout.config(),
            "constraints": self.constraints,
            "runs": self.runs,
            "horizon": self.horizon,
            "delta": self.delta * self.phases,
            "dtype": str(self.dtype).removeprefix("torch."),
            **{name: plain(getattr(self, name)) for name in self.hyperparameters},
            **{name: getattr(self, name) for name in self.choices},
            **{name: fingerprint(getattr(self, name)) for name in self._known},
            **({} if self.ties is None else {"tied_layers": fingerprint(self.ties.pair_groups)}),
            **{name: None if getattr(self, name) is None else config_of(getattr(self, name)) for name in self.parts},
        }

    def extra_repr(self) -> str:
        """What `print(learner)` shows between the brackets."""
        shape = f"widths={self.layout.widths}, actions={self.layout.actions}, constraints={self.constraints}"
        return f"{shape}, horizon={self.horizon}, delta={self.delta:g}, runs={self.runs}"

    def add_zeros(self, name: str, *shape: int) -> None:
        """Register a part of the state that begins at zero: `(runs x *shape)`."""
        self.register_buffer(name, torch.zeros(self.runs, *shape, dtype=self.dtype, device=self.device))

    def add_uniform_policy(self, name: str) -> None:
        """Register a part of the state that begins as the uniform policy: `(runs x L x S x A)`."""
        uniform = uniform_policy(self.layout, dtype=self.dtype, device=self.device)
        self.register_buffer(name, uniform.expand(self.runs, -1, -1, -1).contiguous())

    def _add_known(self, given: dict[str, Tensor | float]) -> None:
        """Register what is known of rewards and costs: their means, and the ends of their ranges, which means narrow to a point."""
        for name in ("known_rewards", "known_costs"):
            if name in given and name not in self.uses:
                raise InvalidInput(f"{name} is given, for which {type(self).__name__} has no use; leave it out.")
        pairs, rewards, costs = self.layout.pair_shape, given.get("known_rewards"), given.get("known_costs")
        replaced = {"reward_high": rewards is not None, "cost_low": costs is not None}
        self._known = tuple(name for name in given if not replaced.get(name))  # an end that follows from a mean is not a setting
        self._add_end("known_rewards", rewards, pairs, lowest=0.0)
        self._add_end("known_costs", costs, (self.constraints, *pairs))
        self._add_end("reward_high", given.get("reward_high", 1.0) if rewards is None else rewards, pairs)
        self._add_end("cost_low", given.get("cost_low", -1.0) if costs is None else costs, (self.constraints, *pairs))

    def _add_end(self, name: str, value: Tensor | float | None, shape: tuple[int, ...], lowest: float = -1.0) -> None:
        """Register what is known of rewards or costs, `(1 or runs x *shape)`, zero in the padding; None for nothing."""
        if value is None:
            self.register_buffer(name, None)
            return
        end = as_numbers(name, value, dtype=self.dtype, device=self.device).detach()
        if end.device.type == "meta" and self.device.type != "meta":
            raise InvalidInput(f"{name} is a tensor without values; it must have them, since the learner is on {self.device}.")
        end = end.to(self._unit)
        check_range(name, end, lowest, 1)
        rows = self.runs if end.dim() > len(shape) and len(end) > 1 else 1
        try:
            whole = end.expand(rows, *shape) * self.layout.pair_mask(self.device)
        except RuntimeError:
            expected = f"a number, or a tensor that broadcasts to {shape} or to {(self.runs, *shape)}"
            raise InvalidInput(f"{name} has shape {tuple(end.shape)}; it must be {expected}.") from None
        self.register_buffer(name, whole, persistent=False)

    def add_hyperparameter(self, name: str, value: PerRun | None) -> None:
        """Register a non-negative hyperparameter, or that there is none.

        A parameter, or a tensor that carries a gradient or a tangent, is kept as it is, so that derivatives flow to it.
        """
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        register(self, name, None if value is None else per_run(name, value, self.runs, **like))

    def hyperparameter(self, name: str) -> Tensor:
        """The values of a hyperparameter in the learner's dtype: `(runs,)`."""
        value: Tensor = getattr(self, name)
        if value.dim() == 1 and value.dtype == self.dtype:  # all but a parameter that somebody else made
            return value
        return value.to(self.dtype).expand(self.runs)

    def scale(self, name: str) -> Tensor | float:
        """The values of a scale, `(runs,)`, or one where the learner has none such."""
        return self.hyperparameter(name) if name in self.hyperparameters else 1.0

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`; the learner then continues bit for bit where the state was taken.

        Hyperparameters are written too: refused where one carries a derivative, which would be lost.
        """
        for name in self.hyperparameters:
            value: Tensor | None = getattr(self, name)
            if value is not None and not isinstance(value, nn.Parameter) and connected(value):
                raise InvalidInput(
                    f"{name} carries a gradient or a tangent, and loading a state would overwrite it; make it an nn.Parameter, or "
                    "load into a learner made with its value alone."
                )
        keys = super().load_state_dict(*args, **kwargs)
        self._forget()
        return keys

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._forget()
        return self

    def check_trajectory(self, trajectory: Trajectory) -> None:
        """Refuse a trajectory of another layout, batch or number of constraints; its values are not looked at."""
        steps = (self.runs, self.layout.layers)
        wanted = {"states": steps, "actions": steps, "next_states": steps, "rewards": steps, "costs": (*steps, self.constraints)}
        for name, shape in wanted.items():
            found = tuple(getattr(trajectory, name).shape)
            if found != shape:
                axes = "runs x L x m" if name == "costs" else "runs x L"
                raise InvalidInput(f"trajectory.{name} has shape {found}; this learner expects ({axes}) = {shape}.")


def _multiple(cls: type[Learner], name: str, value: PerRun) -> Callable[[Any], PerRun]:
    """So many times the default of the hyperparameter that the name of a multiple speaks of."""
    default: Any = cls.hyperparameters[name.removesuffix("_scale")]
    return lambda made: value * (default(made) if callable(default) else default)


def _signature(cls: type[Learner]) -> inspect.Signature:
    """What the class is called with: the arguments of every learner, its hyperparameters and choices, and the rest of its own."""
    initialisers = [
        vars(kind)["__init__"] for kind in reversed(cls.__mro__) if issubclass(kind, Learner) and "__init__" in vars(kind)
    ]
    found = {p.name: p for init in initialisers for p in list(inspect.signature(init).parameters.values())[1:]}
    named = [p for p in found.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    only = [p for p in found.values() if p.kind is p.KEYWORD_ONLY]
    for name, default in cls.hyperparameters.items():
        default = None if callable(default) else default
        only.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation="PerRun | None"))
    for name, kinds in cls.choices.items():
        only.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=kinds[0], annotation="str"))
    return inspect.Signature([*named, *only])
