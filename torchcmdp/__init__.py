"""torchcmdp: online learning in constrained Markov decision processes, batched and differentiable, in PyTorch.

WC-OPS is the algorithm of Stradi, Chiefari, Castiglioni, Marchesi and Gatti, "Beyond Slater's Condition in Online CMDPs with
Stochastic and Adversarial Constraints" (arXiv:2509.20114).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from torchcmdp import adapters, problems
from torchcmdp.baselines import Baseline, Mixture, baseline
from torchcmdp.cmdp import LayeredCMDP, stack_cmdps
from torchcmdp.costs import CostModel, Drift, MeanCosts, PaperCosts, PriorCosts
from torchcmdp.errors import InvalidInput, RunFolderError, TorchCMDPError
from torchcmdp.instances import random_cmdp, single_state_cmdp, two_path_cmdp
from torchcmdp.layout import Layout
from torchcmdp.learners import DOPE, LEARNERS, MAOPS, PDBPS, SOPS, UOBREPS, WCOPS, Greedy, Learner, OptCMDP, OptPrimalDual
from torchcmdp.metrics import Tracker, growth_exponent, mean_and_interval
from torchcmdp.occupancy import (
    flow_residual,
    interval_residual,
    occupancy_of,
    pair_occupancy_of,
    policy_of,
    transitions_of,
    uniform_occupancy,
    uniform_policy,
)
from torchcmdp.optimistic import ColumnGeneration, OptimisticOptimum, optimistic_optimum
from torchcmdp.planning import Evaluation, alpha_of, evaluate, rho, safe_optimum, safest_policy, slater_gap, unconstrained_optimum
from torchcmdp.plotting import plot_curves
from torchcmdp.processes import Bernoulli, Cyclic, Fixed, OGDAdversary, Process, Recorder, Replay, Switching, safe_caps
from torchcmdp.projection import Cvxpy, Newton, ProjectionResult, project
from torchcmdp.run import RunResult, load, run, run_split
from torchcmdp.safe_set import SafeSet
from torchcmdp.simulator import Simulator
from torchcmdp.solver import Solver
from torchcmdp.status import Status
from torchcmdp.trajectory import Trajectory
from torchcmdp.units import Units
from torchcmdp.unrolling import unroll

if TYPE_CHECKING:
    from torchcmdp import adapters, nn, testing, tuning

__version__ = "0.1.0"

__all__ = ["__version__"]
# The problem
__all__ += ["Layout", "LayeredCMDP", "Units", "problems", "random_cmdp"]
__all__ += ["single_state_cmdp", "stack_cmdps", "two_path_cmdp", "unroll"]
# Occupancies
__all__ += ["flow_residual", "interval_residual", "occupancy_of", "pair_occupancy_of"]
__all__ += ["policy_of", "transitions_of", "uniform_occupancy", "uniform_policy"]
# The projection
__all__ += ["Cvxpy", "Newton", "ProjectionResult", "SafeSet", "Solver", "Status", "project"]
# Exact optima
__all__ += ["Evaluation", "alpha_of", "evaluate", "rho", "safe_optimum", "safest_policy"]
__all__ += ["slater_gap", "unconstrained_optimum", "ColumnGeneration", "OptimisticOptimum", "optimistic_optimum"]
# Learners
__all__ += ["LEARNERS", "Greedy", "Learner", "OptCMDP", "OptPrimalDual", "PDBPS", "UOBREPS", "WCOPS"]
# Learners that are safe from the first episode, and what they are given
__all__ += ["Baseline", "DOPE", "MAOPS", "Mixture", "SOPS", "baseline"]
# What they believe of the costs
__all__ += ["CostModel", "Drift", "MeanCosts", "PaperCosts", "PriorCosts"]
# Episodes
__all__ += ["Bernoulli", "Cyclic", "Fixed", "OGDAdversary", "Process", "Recorder"]
__all__ += ["Replay", "Simulator", "Switching", "Trajectory", "safe_caps"]
# Measuring and running
__all__ += ["RunResult", "Tracker", "growth_exponent", "load", "mean_and_interval", "plot_curves", "run", "run_split"]
# Inside other people's code
__all__ += ["adapters", "nn", "testing", "tuning"]
# Errors
__all__ += ["InvalidInput", "RunFolderError", "TorchCMDPError"]

# Loaded when first used: the layer alone brings in all of torch's compiler, which takes as long as torch itself.
_LAZY = ("nn", "testing", "tuning")


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
