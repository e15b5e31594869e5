"""Learners as kernels see them: settings, hyperparameters and buffers in flat memory, and an update in one compiled call.

The torch formulas define a learner, differentiate it and run everywhere. On the CPU, in float64 and where nobody asks for a
derivative, `update` and whole blocks of episodes run compiled. Kernels are imported when the first learner needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.confidence import CONFIDENCE_KINDS, transition_log_term
from torchcmdp.errors import InvalidInput
from torchcmdp.estimation import bonus_log_term, luck_terms, violation_threshold
from torchcmdp.kernels.engine import engine
from torchcmdp.kernels.memory import room
from torchcmdp.learners.radii import feedback_log_term
from torchcmdp.projection import LOG_FLOOR, Newton

if TYPE_CHECKING:
    from torchcmdp.learners.base import Learner
    from torchcmdp.trajectory import Trajectory


@dataclass(frozen=True)
class Face:
    """What a kind of learner looks like to kernels.

    Attributes:
        kernels: The module of its kernels, with `Buffers`, `Hyperparameters`, `TAGS` and `empty_state`.
        settings: Makes its settings.
        update, play: The compiled update of all runs, and a block of episodes.
    """

    kernels: Any
    settings: Callable[[Any], Any]
    update: Any
    play: Any


@lru_cache(maxsize=32)
def face_of(kind: type) -> Face | None:
    """The face of a class of learners, None for those of somebody else."""
    from torchcmdp.learners.opt_primal_dual import OptPrimalDual
    from torchcmdp.learners.pdbps import PDBPS
    from torchcmdp.learners.uobreps import UOBREPS
    from torchcmdp.learners.wcops import WCOPS

    if kind not in (WCOPS, UOBREPS, OptPrimalDual, PDBPS):
        return None
    from torchcmdp.kernels import block, opt_primal_dual, pdbps, single, wcops

    if kind is OptPrimalDual:
        return Face(opt_primal_dual, _opt_primal_dual_settings, single.update_opt_primal_dual, block.play_opt_primal_dual)
    if kind is PDBPS:
        return Face(pdbps, _pdbps_settings, single.update_pdbps, block.play_pdbps)
    return Face(wcops, _wcops_settings, single.update_wcops, block.play_wcops)


def is_compilable(learner: Learner) -> bool:
    """Whether kernels can do its updates: a learner of ours, no subclass, on the CPU, in float64, and not differentiated."""
    if learner.dtype != torch.float64 or learner.device.type != "cpu" or face_of(type(learner)) is None:
        return False
    solver = getattr(learner, "solver", None)
    if solver is not None and not (type(solver) is Newton and solver.compiled(learner.device)):
        return False
    level: int = forward_ad._current_level
    return level < 0 and not any(value.requires_grad for value in (*learner.parameters(), *learner.buffers()))


def is_original(owner: Any, *names: str) -> bool:
    """Whether nobody has put something else in the place of these methods of an object of ours."""
    return not any(name in vars(owner) for name in names)


class Packed:
    """The state of a learner, copied into flat memory for kernels to write to; `unpack` puts it back."""

    def __init__(self, learner: Learner) -> None:
        face = face_of(type(learner))
        assert face is not None
        self.learner, self.face = learner, face
        self.settings = face.settings(learner)
        kinds = face.kernels
        self.hyperparameters = kinds.Hyperparameters(*(self._values(name) for name in kinds.Hyperparameters._fields))
        self._tensors = {
            name: getattr(learner, name).detach().clone(memory_format=torch.contiguous_format)
            for name in kinds.Buffers._fields
            if hasattr(learner, name)
        }
        self.buffers = kinds.Buffers(*(self._flat(name) for name in kinds.Buffers._fields))
        self.last = np.zeros((len(kinds.TAGS), learner.runs))

    def _values(self, name: str) -> np.ndarray:
        """A hyperparameter, `(runs,)`; zero where the learner has none."""
        if getattr(self.learner, name) is None:
            return np.zeros(self.learner.runs)
        return np.ascontiguousarray(self.learner.hyperparameter(name).detach().numpy())

    def _flat(self, name: str) -> np.ndarray:
        """A buffer with the runs, the constraints where it has them, and everything else on one axis."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return np.zeros(self.learner.runs)
        if tensor.dim() == 5 and name.startswith("cost"):
            tensor = tensor.flatten(2)
        elif tensor.dim() > 2:
            tensor = tensor.flatten(1)
        return tensor.numpy()  # type: ignore[no-any-return]

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
            setattr(learner, name, tensor)
        learner.episode = learner.episode + episodes
        learner.report(dict(zip(self.face.kernels.TAGS, torch.from_numpy(self.last).unbind(0), strict=True)))


def update(learner: Learner, trajectory: Trajectory) -> bool:
    """One update of every run, compiled; says whether it was done, which some learners and places do not allow."""
    if engine() == "torch" or not is_compilable(learner):
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


def check_failures(failed: np.ndarray) -> None:
    """Raise what a kernel can only number."""
    from torchcmdp.kernels.block import ADVICE

    if failed.any():
        run = int(failed.nonzero()[0][0])
        raise InvalidInput(f"run {run} cannot go on: {ADVICE[int(failed[run])]}")


def _array(value: Tensor, dtype: torch.dtype) -> np.ndarray:
    return value.detach().to(dtype).contiguous().numpy()


def _wcops_settings(learner: Any) -> Any:
    from torchcmdp.kernels.projection import Limits
    from torchcmdp.kernels.solver import projection_address
    from torchcmdp.kernels.wcops import Settings
    from torchcmdp.learners.wcops import OCCUPANCY_FLOOR

    layout, m, made_for = learner.layout, learner.constraints, {"horizon": learner.horizon, "delta": learner.delta}
    factor, logarithm = luck_terms(layout, m, **made_for)
    solver = learner.solver
    return Settings(
        kind=CONFIDENCE_KINDS.index(learner.confidence),
        empirical=int(learner.violation_threshold == "empirical"),
        iota=transition_log_term(layout, **made_for),
        bonus_logarithm=bonus_log_term(layout, m, **made_for),
        threshold_constant=float(violation_threshold(1, layout, m, **made_for)),
        luck_factor=float(factor),
        luck_logarithm=logarithm,
        log_floor=math.log(OCCUPANCY_FLOOR),
        target_floor=LOG_FLOOR,
        limits=Limits(float(solver.multiplier_cap), float(solver.tolerance), int(solver.max_iterations)),
        solver=projection_address(),
    )


def _opt_primal_dual_settings(learner: Any) -> Any:
    from torchcmdp.kernels.opt_primal_dual import Settings

    layout, made_for = learner.layout, {"horizon": learner.horizon, "delta": learner.delta}
    return Settings(
        kind=CONFIDENCE_KINDS.index(learner.kernel_kind),
        capped=int(learner.multiplier_cap is not None),
        iota=transition_log_term(layout, **made_for),
        # the literal radii are twice the published ones, and the root of four times a logarithm is just that
        logarithm=feedback_log_term(learner.radii, layout, learner.constraints, **made_for)
        * (4 if learner.radii == "literal" else 1),
    )


def _pdbps_settings(learner: Any) -> Any:
    from torchcmdp.kernels.pdbps import Settings

    return Settings(
        kind=CONFIDENCE_KINDS.index(learner.confidence),
        iota=transition_log_term(learner.layout, learner.horizon, learner.delta),
        largest_multiplier=float(learner.horizon**0.25),
    )
