"""Every parameter of every public constructor and function is fed bad values, with the others valid: a sentence, or acceptance."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

import torchcmdp as tc
import torchcmdp.adapters.sb3
from torchcmdp.adapters.gymnasium import Layered
from torchcmdp.adapters.tabular import fell_in_a_hole
from torchcmdp.adapters.torchrl import TorchRLEnv
from torchcmdp.run.options import RunKeywords

CMDP = tc.random_cmdp((1, 2, 1), actions=2, constraints=1, seed=0)
LAYOUT, REWARDS, COSTS, P = CMDP.layout, CMDP.rewards, CMDP.costs, CMDP.transitions
POLICY, OCCUPANCY = tc.uniform_policy(LAYOUT), tc.uniform_occupancy(LAYOUT)
UPPER = torch.ones_like(P) * LAYOUT.transition_mask()
SAFE_SET = tc.SafeSet(LAYOUT, torch.zeros_like(P), UPPER, COSTS)
LEARNER: dict[str, Any] = {"layout": LAYOUT, "constraints": 1, "horizon": 10}


def learner() -> tc.WCOPS:
    return tc.WCOPS(LAYOUT, 1, 10)


class Still(nn.Module):
    """A learner that learns nothing, and fast: the checks of `testing` play it again and again."""

    def __init__(self, layout: tc.Layout, constraints: int, runs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        policy = tc.uniform_policy(layout, dtype=dtype, device=device)
        self.register_buffer("policy", policy.expand(runs, *layout.pair_shape).clone())

    def update(self, trajectory: tc.Trajectory) -> None:
        pass

    def config(self) -> dict[str, Any]:
        return {}


def make_process(cmdp: tc.LayeredCMDP, runs: int) -> tc.Process:
    return tc.Bernoulli(cmdp.costs, low=-1)


def env(runs: int = 1) -> tc.Simulator:
    return tc.Simulator(CMDP, tc.Bernoulli(REWARDS), tc.Bernoulli(COSTS, low=-1), runs=runs)


def environment(instances: torch.Tensor, seed: int) -> tc.Simulator:
    return env(len(instances))


def halves(runs: int, first_run: int) -> tuple[tc.WCOPS, tc.Simulator]:
    return tc.WCOPS(LAYOUT, 1, 10, runs=runs), env(runs)


def played(folder: str) -> str:
    tc.run(learner(), env(), 2, folder, progress=False, images=False)
    return folder


STUDY = tc.tuning.Study(environment, 1, 2)
POINT, BOX = {"bonus_scale": 0.1}, {"bonus_scale": (0.01, 1.0)}
WHERE: dict[str, Any] = {
    "names": ("bonus_scale",), "log_scales": torch.zeros(1, 1).double(), "instances": torch.zeros(1, dtype=torch.int64), "seed": 0
}  # fmt: skip

TABLES: dict[str, Any] = {
    "P": np.ones((1, 2, 1)),
    "R": np.array([[1.0, 2.0]]),
    "C": np.array([[0.0, 3.0]]),
    "horizon": 2,
    "budget": 2.0,
}
IN_UNITS = tc.problems.from_arrays(**TABLES)


class Lake:
    """A tabular environment as Gymnasium has them: one state, two actions."""

    initial_state_distrib = np.ones(1)

    def __init__(self) -> None:
        self.P = {0: {a: [(1.0, 0, float(a), False)] for a in range(2)}}


def lake() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("FrozenLake-v1")


DERIVATIVE = tc.tuning.Derivative(tc.tuning.Played(*torch.zeros(4, 1, 2)), torch.zeros(1, 2), torch.zeros(1, 2))

# By public name, valid arguments, or what makes them: those without which it cannot be called, and others that the defaults would
# leave untried.
BASELINE = tc.Baseline(tc.uniform_policy(LAYOUT), torch.tensor([-0.5]))
VALID: dict[str, dict[str, Any] | Callable[[], dict[str, Any]]] = {
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
    **{name: {"layout": LAYOUT, "constraints": 1, "horizon": 10, "baseline": BASELINE} for name in ("DOPE", "MAOPS", "SOPS")},
    "Baseline": {"policy": POLICY, "cost_bounds": torch.tensor([-0.5])},
    "baseline": {"cmdp": CMDP},
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
    **{name: {"cmdp": CMDP} for name in ("rho", "safe_optimum", "safest_policy", "slater_gap", "unconstrained_optimum")},
    "alpha_of": {"rho": torch.rand(3)},
    "evaluate": {"policy": POLICY, "cmdp": CMDP},
    "Simulator": {"cmdp": CMDP, "rewards": REWARDS, "costs": COSTS},
    "Tracker": lambda: {"env": env()},
    "run": lambda: {"learner": learner(), "env": env(), "episodes": 2, "progress": False, "images": False},
    "run_split": lambda: {"make": halves, "runs": 1, "episodes": 2, "progress": False, "images": False},
    "load": lambda: {"folder": played("folder")},
    "plot_curves": {"path": "figure.png", "curves": {"a": (torch.arange(1, 4), torch.ones(2, 3))}, "ylabel": "regret"},
    "nn.SafeOccupancy": {"layout": LAYOUT, "constraints": 1},
    "testing.check_policy": {"policy": POLICY[None], "layout": LAYOUT, "runs": 1},
    "testing.check_learner": {"make": Still, "cmdp": CMDP, "episodes": 2},
    "testing.check_process": {"make": make_process, "cmdp": CMDP, "episodes": 2},
    "testing.check_environment": {"make": lambda runs: env(runs=runs), "episodes": 2},
    **dict.fromkeys(("Drift", "PaperCosts", "PriorCosts"), {}),
    "Units": dict(vars(IN_UNITS.units)),
    "problems.from_arrays": TABLES,
    "problems.from_gymnasium": lambda: {"env": Lake(), "horizon": 2, "cost": lambda move: float(move.action), "budget": 1.0},
    "problems.make": {"name": "dope/factored", "horizon": 3},
    "tuning.Smoothed": {"window": 1},
    "tuning.Through": {},
    "tuning.Descent": {},
    "tuning.Study": {"environment": environment, "instances": 1, "horizon": 2},
    "tuning.estimate_gradient": {"study": STUDY, "scales": POINT},
    "tuning.optimise": {"study": STUDY, "start": POINT, "descent": tc.tuning.Descent(steps=1), "box": BOX, "progress": False},
    "tuning.random_search": {"study": STUDY, "box": BOX, "candidates": 1, "runs": 1, "progress": False},
    "tuning.forward_derivative": {"study": STUDY, **WHERE, "directions": torch.ones(1, 1).double()},
    "tuning.reverse_derivative": {"study": STUDY, **WHERE},
    "tuning.run_derivatives": {"study": STUDY, "found": DERIVATIVE},
}
# The adapters, which are imported by those who need them, and their options.
FEEDBACK: dict[str, Any] = {"rewards": tc.Bernoulli(REWARDS), "costs": tc.Bernoulli(COSTS, low=-1)}
ADAPTERS: dict[str, dict[str, Any] | Callable[[], dict[str, Any]]] = {
    "adapters.gymnasium.CMDPEnv": {"cmdp": CMDP, **FEEDBACK},
    "adapters.gymnasium.CMDPVectorEnv": {"cmdp": CMDP, **FEEDBACK, "num_envs": 2},
    "adapters.gymnasium.Layered": lambda: {"env": lake(), "horizon": 3, "cost": fell_in_a_hole, "budget": 0.1},
    "adapters.gymnasium.GymnasiumSimulator": {"make": lambda: Layered(lake(), 3, fell_in_a_hole, 0.1)},
    "adapters.sb3.CMDPVecEnv": {"cmdp": CMDP, **FEEDBACK, "num_envs": 2},
    "adapters.torchrl.TorchRLEnv": {"cmdp": CMDP, **FEEDBACK, "runs": 2},
    "adapters.torchrl.TabularPolicy": lambda: {"policy": POLICY, "env": TorchRLEnv(CMDP, **FEEDBACK)},
}
VALID |= ADAPTERS
OF_TORCHRL = tuple(name for name in inspect.signature(TorchRLEnv.__init__).parameters if name != "self")  # its metaclass hides them
# Of those that take options, which there are.
OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("run", "run_split"), tuple(RunKeywords.__annotations__)),
    "adapters.sb3.CMDPVecEnv": ("observation", "constraint", "budget", "six_tuple"),
    "adapters.torchrl.TorchRLEnv": OF_TORCHRL,
    **dict.fromkeys(
        ("tuning.forward_derivative", "tuning.reverse_derivative"), ("feedback", "memory", "groups", "distinct_runs", "tick")
    ),
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


# What no parameter means, and so none takes, but for those whose values nobody reads.
NEVER = ("NaN", "beyond floats", "an object", "a list of strings", "a list of None", "a complex number", "an object array")
UNREAD = {
    ("testing.check_policy", "of"),  # words for the sentence
    ("UOBREPS", "cost_low"),  # costs have no effect
}

# Names without parameters to spoil, and why.
EXEMPT: dict[str, str] = {
    "two_path_cmdp": "takes nothing",
    **dict.fromkeys(("LEARNERS", "tuning.ESTIMATORS", "tuning.SCALES", "__version__"), "is a value"),
    **dict.fromkeys(("Learner", "Process", "Solver", "tuning.Estimator"), "is an abstract base, tried by the classes made from it"),
    "Status": "is an enumeration",
    **dict.fromkeys(("InvalidInput", "RunFolderError", "TorchCMDPError"), "is an error"),
    **dict.fromkeys(
        ("Evaluation", "Mixture",
         "OptimisticOptimum", "ProjectionResult", "RunResult", "Trajectory", "nn.SafeOutput", "tuning.Derivative",
         "tuning.Samples", "tuning.Estimate", "tuning.Played", "tuning.TuningResult"), "is a record that the library fills in"
    ),
    "adapters.require": "is asked by the adapters alone",
    "adapters.MissingExtra": "is an error",
    **dict.fromkeys(("CostModel", "tuning.Estimator"), "is an abstract base, tried by the classes made from it"),
    "MeanCosts": "is tried in tests/test_costs.py",
    "problems.names": "takes nothing",
    "tuning.ESTIMATORS": "is a value",
    **dict.fromkeys(("problems.Facts", "problems.Problem", "tuning.Samples"), "is a record that the library fills in"),
    **dict.fromkeys(("problems.families", "problems.literature"), "is a module of problems, tried by their names"),
}  # fmt: skip

# What else a part of the library raises by its contract: a broken promise is what the checks are there to say.
OWN: dict[str, tuple[type[Exception], ...]] = {"testing": (AssertionError,)}

# Where a billion is a long run, which one may want, and not a mistake.
LONG = {
    *((name, "episodes") for name in ("run", "run_split", "testing.check_learner", "testing.check_process")),
    ("testing.check_environment", "episodes"),
    ("tuning.random_search", "candidates"),
}


def public_names() -> set[str]:
    """Everything in `__all__`, with the names of the modules among them in place of these."""
    found = set()
    for name in tc.__all__:
        value = getattr(tc, name)
        inside = getattr(value, "__all__", None) if inspect.ismodule(value) else None
        found |= {name} if inside is None else {f"{name}.{entry}" for entry in inside}
    return found


def named(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), tc)


def in_use(costs: tc.CostModel) -> torch.Tensor:
    """A cost model, in the hands of the learner that makes one for itself."""
    return tc.WCOPS(LAYOUT, 1, 10, costs=costs).policy


# What is made of settings alone comes to light where it is used: by public name, what is done with it.
USES: dict[str, Callable[[Any], Any]] = {
    "Drift": lambda drift: in_use(tc.PaperCosts(drift=drift)),
    **dict.fromkeys(("PaperCosts", "PriorCosts"), in_use),
    "Units": lambda units: replace(IN_UNITS, units=units).units.config(),
    **dict.fromkeys(
        ("tuning.Smoothed", "tuning.Through"),
        lambda how: tc.tuning.estimate_gradient(STUDY, POINT, estimator=how, repeats=2),
    ),
    "Baseline": lambda baseline: tc.SOPS(**LEARNER, baseline=baseline),
    "nn.SafeOccupancy": lambda layer: layer(REWARDS, COSTS, transitions=P) if layer.constraints == 1 else None,
}


def call(name: str, options: dict[str, Any]) -> None:
    found = named(name)(**options)
    if name in ADAPTERS and hasattr(found, "reset"):
        found.reset()
    if name in USES:
        USES[name](found)


def arguments(name: str) -> dict[str, Any]:
    """Valid ones, made anew where a call uses them up."""
    valid = VALID[name]
    return dict(valid() if callable(valid) else valid)


def test_every_public_name_is_here() -> None:
    assert set(VALID) | set(EXEMPT) == public_names() | set(ADAPTERS) and not set(VALID) & set(EXEMPT)


def parameters() -> list[tuple[str, str]]:
    """Every public name with each of its parameters; of a `**options` each of the options that there are."""
    found = []
    for name in VALID:
        for parameter in inspect.signature(named(name)).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                found += [(name, option) for option in OPTIONS.get(name, ())]
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                found.append((name, parameter.name))
    return found


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and figures are named by strings: what is accepted is written where nobody looks."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VALID)
def test_the_valid_arguments_are_valid(name: str) -> None:
    call(name, arguments(name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "parameter"), parameters())
def test_a_bad_value_is_refused_in_a_sentence_or_accepted(name: str, parameter: str) -> None:
    """InvalidInput with a sentence; no other error, nothing that takes memory first, and nothing that cannot be meant is taken.

    A class can be called, and so stands where a function is wanted; what it then says of itself is not ours.
    """
    wrong = []
    for what, value in BAD.items():
        if what == "a billion" and (name, parameter) in LONG:
            continue
        try:
            call(name, {**arguments(name), parameter: value})
            if what in NEVER and (name, parameter) not in UNREAD:
                wrong.append(f"{what}: is taken")
        except (tc.TorchCMDPError, *OWN.get(name.partition(".")[0], ())) as error:
            if len(str(error)) < 15 or "\n" in str(error):
                wrong.append(f"{what}: says {str(error)!r}")
        except Exception as error:
            if what == "a class" and isinstance(error, TypeError):
                continue
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:90]!r}")
    assert not wrong, "\n".join(wrong)
