"""Learners as kernels see them: settings, hyperparameters and buffers in flat memory, and an update in one compiled call.

The torch formulas define a learner, differentiate it and run everywhere. On the CPU, in float64 and where nobody asks for a
derivative, `update` and whole blocks of episodes run compiled. Kernels are imported when the first learner needs them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.confidence import CONFIDENCE_KINDS, transition_log_term
from torchcmdp.costs import Drift, PaperCosts, PriorCosts
from torchcmdp.errors import InvalidInput
from torchcmdp.estimation import bonus_log_term, luck_terms, violation_threshold
from torchcmdp.kernels.engine import engine
from torchcmdp.kernels.memory import array, room, tensor_of, zeros
from torchcmdp.optimistic import ColumnGeneration
from torchcmdp.projection import LOG_FLOOR, Newton

if TYPE_CHECKING:
    from torchcmdp.learners.base import Learner
    from torchcmdp.trajectory import Trajectory


class Face(NamedTuple):
    """What a kind of learner looks like to kernels."""

    kernels: Any  # their module, with `Buffers`, `Hyperparameters`, `TAGS` and `empty_state`
    settings: Callable[[Any], dict[str, Any]]  # makes its settings, but for those of the confidence set
    update: Any  # the compiled update of all runs
    play: Any  # a block of episodes


@lru_cache(maxsize=32)
def face_of(kind: type) -> Face | None:
    """The face of a class of learners, None for those of somebody else."""
    module, _, name = kind.__module__.rpartition(".")
    name = _SHARED.get(name, name)  # its kernels are in the module of the same name, or in that of the learner it is a kind of
    settings = _SETTINGS.get(name)
    if module != __package__ or settings is None:
        return None
    from torchcmdp.kernels import block, single

    kernels = importlib.import_module(f"torchcmdp.kernels.{name}")
    return Face(kernels, settings, single.update_of(kernels), block.play_of(kernels))


def obstacle(learner: Learner, gpu: bool = False) -> str:
    """What keeps kernels, of the CPU or of a GPU, from doing a learner's updates, as a clause; empty where nothing does.

    The one place that decides it.
    """
    name = type(learner).__name__
    if face_of(type(learner)) is None:
        return f"{name} has no kernels: some learners of this library have, and a subclass may do anything"
    if gpu:
        from torchcmdp.kernels import cuda  # here, because numba takes half a second to import

        if why := cuda.obstacle(learner.device):
            return why
    elif learner.device.type != "cpu":
        return f"{name} is on {learner.device}, and these kernels compute on the CPU"
    if learner.dtype != torch.float64:
        return f"{name} is in {learner.dtype}, and kernels compute in torch.float64"
    if learner.ties is not None or learner.known_rewards is not None or learner.known_costs is not None:
        return f"{name} has tied layers, known rewards or known costs, of which kernels know nothing"
    if not _formulas_compiled(learner):
        return f"{name} has a model of costs or rewards that is not among the kernels"
    solver = getattr(learner, "solver", None)
    if solver is not None and not (type(solver) in (Newton, ColumnGeneration) and _solver_compiled(solver, learner.device, gpu)):
        return f"its solver is {type(solver).__name__}, which is not compiled or was asked to use torch"
    level: int = forward_ad._current_level
    own = (value for part in learner.modules() for held in (part._parameters, part._buffers) for value in held.values())
    if level >= 0 or any(value is not None and value.requires_grad for value in own):
        return f"somebody differentiates {name}"
    return ""


def _solver_compiled(solver: Any, device: torch.device, gpu: bool) -> bool:
    """Whether a solver of ours leaves it to kernels, of the CPU or of a GPU."""
    return solver.backend in ("auto", "cuda") and solver.fixed_iterations is None if gpu else bool(solver.compiled(device))


def _formulas_compiled(learner: Any) -> bool:
    """Whether what it believes of costs and rewards is among what the kernels of its class know."""
    costs = getattr(learner, "costs", None)
    weighted = "loss" in learner.choices  # kernels know the paper's weights where the paper has them
    return costs is None or type(costs) is PriorCosts or (weighted and type(costs) is PaperCosts)


def is_original(owner: Any, *names: str) -> bool:
    """Whether nobody has put something else in the place of these methods of an object of ours."""
    return not any(name in vars(owner) for name in names)


class Packed:
    """The state of a learner, copied into flat memory for kernels to write to; `unpack` puts it back.

    A single step takes as long as this, so it goes past a module's own ways of finding and setting its buffers.
    """

    def __init__(self, learner: Learner) -> None:
        face = face_of(type(learner))
        assert face is not None
        self.learner, self.face = learner, face
        self.settings = _settings(learner, face)
        kinds, self._parts = face.kernels, tuple(learner.modules())
        self.hyperparameters = kinds.Hyperparameters(*(self._values(name) for name in kinds.Hyperparameters._fields))
        # a buffer is the learner's own, or that of a part of it, such as its cost model
        self._owners = {name: part._buffers for part in self._parts for name in kinds.Buffers._fields if name in part._buffers}
        found = ((name, owner[name]) for name, owner in self._owners.items())
        self._tensors = {name: held.clone(memory_format=torch.contiguous_format) for name, held in found if held is not None}
        self.buffers = kinds.Buffers(*(self._flat(name) for name in kinds.Buffers._fields))
        self.tags = kinds.tags(self.settings) if hasattr(kinds, "tags") else kinds.TAGS
        self.last = zeros(learner.device, len(self.tags), learner.runs)

    def _values(self, name: str) -> Any:
        """A hyperparameter, `(runs,)`; zero where the learner has none."""
        for part in self._parts:
            value = part._buffers.get(name) if name in part._buffers else part._parameters.get(name)
            if value is not None:
                return array(value.detach().to(torch.float64).expand(self.learner.runs).contiguous())
        return zeros(self.learner.device, self.learner.runs)

    def _flat(self, name: str) -> Any:
        """A buffer with the runs, the constraints where it has them, and everything else on one axis."""
        tensor = self._tensors.get(name)
        if tensor is None:
            shape = (self.learner.runs,) + (0,) * (getattr(self.face.kernels, "AXES", {}).get(name, 1) - 1)
            return zeros(self.learner.device, *shape)
        held = array(tensor)
        axes = held.shape[:2] if held.ndim == 5 and name.startswith(("cost", "low")) else held.shape[:1]
        return held.reshape(*axes, math.prod(held.shape[len(axes) :])) if held.ndim > 2 else held

    def room(self, constraints: int) -> tuple[Any, Any]:
        """Stage and state of one run in an environment of so many constraints, of the calling thread alone."""
        from torchcmdp.kernels.block import empty_stage
        from torchcmdp.kernels.geometry import geometry_of

        learner, kind = self.learner, self.settings.kind

        def make() -> tuple[Any, Any]:
            geometry = geometry_of(learner.layout)
            return empty_stage(geometry, constraints), self.face.kernels.empty_state(geometry, learner.constraints, kind)

        found: tuple[Any, Any] = room((self.face.kernels.__name__, learner.layout, constraints, learner.constraints, kind), make)
        return found

    def unpack(self, episodes: int) -> None:
        """The state back into the learner's buffers, `episodes` later."""
        learner = self.learner
        for name, tensor in self._tensors.items():
            self._owners[name][name] = tensor
        learner._buffers["episode"] = learner.episode + episodes
        learner.report(dict(zip(self.tags, tensor_of(self.last).unbind(0), strict=True)))


def update(learner: Learner, trajectory: Trajectory) -> bool:
    """One update of every run, compiled; says whether it was done, which some learners and places do not allow."""
    if engine() == "torch" or obstacle(learner):
        return False
    from torchcmdp.kernels.geometry import geometry_of
    from torchcmdp.kernels.single import Walk
    from torchcmdp.kernels.threads import over_batch

    if hasattr(learner, "ignored_constraints"):
        trajectory = replace(trajectory, costs=trajectory.costs[..., :0])
    learner.check_trajectory(trajectory)
    packed, geometry, episode = Packed(learner), geometry_of(learner.layout), int(learner.episode)
    walk = Walk(
        *(_array(value, torch.int64) for value in (trajectory.states, trajectory.actions, trajectory.next_states)),
        *(_array(value, torch.float64) for value in (trajectory.rewards, trajectory.costs)),
    )
    failed = np.zeros(learner.runs, np.int64)

    def piece(start: int, stop: int) -> None:
        stage, state = packed.room(learner.constraints)
        packed.face.update(
            start, stop, geometry, packed.settings, packed.hyperparameters, episode, walk, packed.buffers, packed.last, failed,
            stage, state,
        )  # fmt: skip

    over_batch(piece, learner.runs, len(geometry.successor))
    check_failures(failed)
    packed.unpack(1)
    return True


def check_failures(failed: Any) -> None:
    """Raise what a kernel can only number."""
    from torchcmdp.kernels.block import ADVICE

    if failed.any():
        run = int(failed.nonzero()[0][0])
        raise InvalidInput(f"run {run} cannot go on: {ADVICE[int(failed[run])]}")


def _array(value: Tensor, dtype: torch.dtype) -> Any:
    return array(value.detach().to(dtype).contiguous())


def _settings(learner: Any, face: Face) -> Any:
    """The settings of a learner, made again only for another one, or when something that they follow from was replaced."""
    costs = getattr(learner, "costs", None)
    made_of = (
        learner.device, learner.layout, learner.constraints, learner.horizon, learner.delta, getattr(learner, "solver", None),
        *(getattr(learner, name, None) is None for name in ("multiplier_cap", "share")),
        *(getattr(learner, name) for name in learner.choices),
        costs, getattr(costs, "margin", None) is None, getattr(costs, "drift", None),
    )  # fmt: skip
    held = _settings_of.get(learner)
    if held is None or held[0] != made_of:
        # every kernel has a confidence set
        kind, iota = CONFIDENCE_KINDS.index(learner.kernel_kind), transition_log_term(learner.layout, **learner.made_for)
        settings = face.kernels.Settings(kind=kind, iota=iota, **face.settings(learner))
        held = _settings_of[learner] = (made_of, settings)
    return held[1]


_settings_of: WeakKeyDictionary[Learner, tuple[Any, Any]] = WeakKeyDictionary()


def _belief_settings(learner: Any) -> dict[str, Any]:
    """What kernels need to know of a cost model, or that there is none."""
    costs = learner.costs
    drift = (None if costs is None else costs.drift) or Drift()
    unit = drift.unit(learner.layout)
    return {
        "prior": int(isinstance(costs, PriorCosts)),
        "margin": int(costs is not None and costs.margin is not None),
        "drift": int(costs is not None and costs.drift is not None),
        "slack": float(drift.slack * unit),
        "height": float(drift.height * unit),
        "memory": float(drift.memory),
    }


def _wcops_settings(learner: Any) -> dict[str, Any]:
    from torchcmdp.kernels.projection import Limits
    from torchcmdp.kernels.solver import projection_address
    from torchcmdp.learners.wcops import OCCUPANCY_FLOOR

    size, solver = (learner.layout, learner.constraints), learner.solver
    factor, logarithm = luck_terms(*size, **learner.made_for)
    return {
        **_belief_settings(learner),
        "empirical": int(learner.violation_threshold == "empirical"),
        "robust": int(learner.loss == "doubly-robust"),
        "shared": int(learner.share is not None),
        "bonus_logarithm": bonus_log_term(*size, **learner.made_for),
        "threshold_constant": float(violation_threshold(1, *size, **learner.made_for)),
        "luck_factor": float(factor),
        "luck_logarithm": logarithm,
        "log_floor": math.log(OCCUPANCY_FLOOR),
        "target_floor": LOG_FLOOR,
        "limits": Limits(float(solver.multiplier_cap), float(solver.tolerance), int(solver.max_iterations)),
        "solver": projection_address() if learner.device.type == "cpu" else 0,
        "cost_low": _flat(learner.cost_low),
    }


def _logarithm(learner: Any) -> float:
    """Of learners that keep averages: the literal radii are twice the published ones, the root of four times a logarithm."""
    return float(learner.feedback_logarithm * (4 if learner.radii == "literal" else 1))


def _opt_primal_dual_settings(learner: Any) -> dict[str, Any]:
    lowest, highest = (_array(ends, torch.float64) for ends in learner.value_ends())
    capped = int(learner.multiplier_cap is not None)
    return {"logarithm": _logarithm(learner), "capped": capped, "lowest": lowest, "highest": highest}


def _opt_cmdp_settings(learner: Any) -> dict[str, Any]:
    from torchcmdp.learners.greedy import Greedy

    own = {"greedy": int(type(learner) is Greedy), "hopeful": int(learner.rewards == "prior")}
    most, ends = int(learner.solver.max_iterations), {name: _flat(getattr(learner, name)) for name in ("cost_low", "reward_high")}
    return {"logarithm": _logarithm(learner), **_belief_settings(learner), **own, "max_iterations": most, **ends}


def _flat(table: Tensor) -> Any:
    return _array(table.flatten(-3), torch.float64)


_SHARED = {"uobreps": "wcops", "greedy": "opt_cmdp"}
# By the module of kernels.
_SETTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "wcops": _wcops_settings,
    "opt_primal_dual": _opt_primal_dual_settings,
    "opt_cmdp": _opt_cmdp_settings,
    "pdbps": lambda learner: {"largest_multiplier": float(learner.horizon**0.25)},
}
