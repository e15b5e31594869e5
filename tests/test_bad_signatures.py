"""Every parameter of every public constructor and function is fed bad values, with the others valid: a sentence, or acceptance."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import torchcmdp as tc

CMDP = tc.random_cmdp((1, 2, 1), actions=2, constraints=1, seed=0)
LAYOUT, REWARDS, COSTS, P = CMDP.layout, CMDP.rewards, CMDP.costs, CMDP.transitions
POLICY, OCCUPANCY = tc.uniform_policy(LAYOUT), tc.uniform_occupancy(LAYOUT)
UPPER = torch.ones_like(P) * LAYOUT.transition_mask()
SAFE_SET = tc.SafeSet(LAYOUT, torch.zeros_like(P), UPPER, COSTS)
LEARNER: dict[str, Any] = {"layout": LAYOUT, "constraints": 1, "horizon": 10}

# By public name, valid arguments: those without which it cannot be called, and others that the defaults would leave untried.
VALID: dict[str, dict[str, Any]] = {
    "Layout": {"widths": (1, 2, 1), "actions": 2},
    "LayeredCMDP": {"layout": LAYOUT, "transitions": P, "rewards": REWARDS, "costs": COSTS},
    "random_cmdp": {"widths": (1, 2, 1), "actions": 2, "constraints": 1},
    "single_state_cmdp": {"rewards": [0.5, 0.2], "costs": [[0.1, -0.1]]},
    "stack_cmdps": {"cmdps": [CMDP, CMDP]},
    "unroll": {"transitions": torch.ones(1, 1, 1), "rewards": torch.ones(1, 1), "costs": -torch.ones(1, 1, 1), "horizon": 2},
    "flow_residual": {"occupancy": OCCUPANCY},
    "interval_residual": {"occupancy": OCCUPANCY, "lower": torch.zeros_like(P), "upper": UPPER},
    "occupancy_of": {"policy": POLICY, "transitions": P},
    "pair_occupancy_of": {"policy": POLICY, "transitions": P},
    "policy_of": {"occupancy": OCCUPANCY, "layout": LAYOUT},
    "transitions_of": {"occupancy": OCCUPANCY, "layout": LAYOUT},
    "uniform_occupancy": {"layout": LAYOUT},
    "uniform_policy": {"layout": LAYOUT},
    "Cvxpy": {},
    "Newton": {},
    "ColumnGeneration": {},
    "SafeSet": {"layout": LAYOUT, "lower": torch.zeros_like(P), "upper": UPPER, "costs": COSTS},
    "project": {"loss": REWARDS, "reference": OCCUPANCY, "safe_set": SAFE_SET, "eta": 0.1},
    "optimistic_optimum": {"rewards": REWARDS, "safe_set": SAFE_SET},
    **{name: LEARNER for name in ("Greedy", "OptCMDP", "OptPrimalDual", "PDBPS", "UOBREPS", "WCOPS")},
    "Bernoulli": {"mean": REWARDS},
    "Fixed": {"mean": REWARDS},
    "Cyclic": {"blocks": [REWARDS, REWARDS], "length": 3},
    "Switching": {"blocks": [REWARDS, REWARDS], "at": [3]},
    "OGDAdversary": {"base": REWARDS, "sign": -1, "step": 0.1},
    "Recorder": {"process": tc.Fixed(REWARDS), "episodes": 5},
    "Replay": {"sequence": REWARDS.expand(3, *REWARDS.shape)},
    "safe_caps": {"cmdp": CMDP, "rho0": 0.1},
    "mean_and_interval": {"x": torch.rand(3, 4)},
    "growth_exponent": {"episodes": torch.arange(1, 9), "curve": torch.rand(2, 8) + 1},
}

BAD: dict[str, Any] = {
    "None": None,
    "a string": "nonsense",
    "a device that is not there": "cuda:99",
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus one": -1,
    "zero": 0,
    "a half": 0.5,
    "a billion": 10**9,
    "beyond floats": 10**400,
    "True": True,
    "an object": object(),
    "a class": dict,
    "an empty list": [],
    "a list of strings": ["a", "b"],
    "a list of None": [None],
    "a dictionary": {"a": 1},
    "a complex number": 1j,
    "an object array": np.array([object()], dtype=object),
    "an array": np.ones((2, 2)),
    "an empty tensor": torch.zeros(0),
    "a scalar tensor": torch.tensor(0.5),
    "a tensor of another shape": torch.rand(5, 7),
    "a complex tensor": torch.ones(2, 2, 2, dtype=torch.complex64),
    "a tensor of strings' length": torch.ones(3, dtype=torch.int64),
    "a bool tensor": torch.ones(2, 2, 2, dtype=torch.bool),
    "a tensor of NaN": torch.full((2, 2, 2), float("nan")),
    "a tensor without values": torch.ones(2, 2, 2, device="meta"),
}


# What has no parameters to spoil, records that the library fills in, abstract bases, errors and modules; and what is fed its own
# bad values by `test_bad_values`, because it plays, draws or solves.
OTHERS = {
    "two_path_cmdp", "LEARNERS", "Learner", "Process", "OptimisticOptimum", "ProjectionResult", "RunResult", "Solver", "Status",
    "Trajectory", "adapters", "nn", "testing", "tuning", "InvalidInput", "RunFolderError", "TorchCMDPError", "__version__",
    "alpha_of", "rho", "safe_optimum", "safest_policy", "slater_gap", "unconstrained_optimum", "Simulator", "Tracker",
    "plot_curves", "run", "run_split", "Evaluation", "evaluate", "load",
}  # fmt: skip


def test_every_public_name_is_here() -> None:
    assert set(VALID) | OTHERS == set(tc.__all__) and not set(VALID) & OTHERS


def parameters() -> list[tuple[str, str]]:
    """Every public name with each of its parameters."""
    found = []
    for name in VALID:
        for parameter in inspect.signature(getattr(tc, name)).parameters.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                found.append((name, parameter.name))
    return found


@pytest.mark.parametrize("name", VALID)
def test_the_valid_arguments_are_valid(name: str) -> None:
    getattr(tc, name)(**VALID[name])


@pytest.mark.parametrize(("name", "parameter"), parameters())
def test_a_bad_value_is_refused_in_a_sentence_or_accepted(name: str, parameter: str) -> None:
    """InvalidInput, or the TypeError of a wrong type, with a sentence; no other error, and nothing that takes memory first."""
    wrong = []
    for what, value in BAD.items():
        try:
            getattr(tc, name)(**{**VALID[name], parameter: value})
        except (tc.InvalidInput, TypeError) as error:
            if len(str(error)) < 15 or "\n" in str(error):
                wrong.append(f"{what}: says {str(error)!r}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:90]!r}")
    assert not wrong, "\n".join(wrong)
