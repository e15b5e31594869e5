"""Every public name is fed bad values: each gets one sentence."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcmdp as tc

ROOT = Path(__file__).parents[1]
NAN, INF = float("nan"), float("inf")

CMDP = tc.random_cmdp((1, 2, 1), actions=2, constraints=1, seed=0)
LAYOUT, REWARDS, COSTS, P = CMDP.layout, CMDP.rewards, CMDP.costs, CMDP.transitions
POLICY = tc.uniform_policy(LAYOUT)
OCCUPANCY = tc.uniform_occupancy(LAYOUT)
SAFE_SET = tc.SafeSet(LAYOUT, torch.zeros_like(P), torch.ones_like(P) * LAYOUT.transition_mask(), COSTS)
CURVE = (torch.arange(1, 4), torch.ones(2, 3))


def env(**options: Any) -> tc.Simulator:
    return tc.Simulator(CMDP, tc.Bernoulli(REWARDS), tc.Bernoulli(COSTS, low=-1), **options)


def spoiled(tensor: Tensor, value: float) -> Tensor:
    """The tensor with one entry replaced."""
    other = tensor.clone()
    other[(0,) * tensor.dim()] = value
    return other


def learner_cases(name: str) -> dict[str, Callable[[], Any]]:
    """What every learner is made with."""
    cls = getattr(tc, name)
    return {
        f"{name} layout": lambda: cls((1, 2, 1), 1, 10),
        f"{name} constraints": lambda: cls(LAYOUT, -1, 10),
        f"{name} fraction": lambda: cls(LAYOUT, 0.5, 10),
        f"{name} horizon": lambda: cls(LAYOUT, 1, 0),
        f"{name} horizon nan": lambda: cls(LAYOUT, 1, NAN),
        f"{name} delta": lambda: cls(LAYOUT, 1, 10, delta=1.0),
        f"{name} delta nan": lambda: cls(LAYOUT, 1, 10, delta=NAN),
        f"{name} runs": lambda: cls(LAYOUT, 1, 10, runs=0),
        f"{name} dtype": lambda: cls(LAYOUT, 1, 10, dtype=torch.int64),
    }


# By public name: what is wrong, and a call that must be refused.
CASES: dict[str, dict[str, Callable[[], Any]]] = {
    "Layout": {
        "empty": lambda: tc.Layout((), 2),
        "wide start": lambda: tc.Layout((2, 1), 2),
        "zero width": lambda: tc.Layout((1, 0, 1), 2),
        "fraction": lambda: tc.Layout((1, 1.5, 1), 2),
        "no actions": lambda: tc.Layout((1, 1), 0),
    },
    "LayeredCMDP": {
        "shape": lambda: tc.LayeredCMDP(LAYOUT, P[..., :1], REWARDS, COSTS),
        "nan": lambda: tc.LayeredCMDP(LAYOUT, P, spoiled(REWARDS, NAN), COSTS),
        "range": lambda: tc.LayeredCMDP(LAYOUT, P, spoiled(REWARDS, 1.5), COSTS),
        "costs": lambda: tc.LayeredCMDP(LAYOUT, P, REWARDS, spoiled(COSTS, -1.5)),
        "rows": lambda: tc.LayeredCMDP(LAYOUT, spoiled(P, 0.99), REWARDS, COSTS),
        "no constraint axis": lambda: tc.LayeredCMDP(LAYOUT, P, REWARDS, COSTS[0]),
        "device": lambda: tc.LayeredCMDP(LAYOUT, P, REWARDS.to("meta"), COSTS),
        "dtype": lambda: tc.LayeredCMDP(LAYOUT, P, REWARDS.float(), COSTS),
        "list": lambda: tc.LayeredCMDP(LAYOUT, P, REWARDS.tolist(), COSTS),
        "index": lambda: CMDP[0],
    },
    "random_cmdp": {
        "widths": lambda: tc.random_cmdp((3, 1)),
        "actions": lambda: tc.random_cmdp(actions=0),
        "constraints": lambda: tc.random_cmdp(constraints=-1),
        "feasibility": lambda: tc.random_cmdp(feasibility="feasable"),
        "impossible": lambda: tc.random_cmdp((1, 1), 1, 1, feasibility="strict", margin=2.0),
        "tight": lambda: tc.random_cmdp(constraints=0, feasibility="tight"),
    },
    "single_state_cmdp": {
        "empty": lambda: tc.single_state_cmdp([]),
        "costs": lambda: tc.single_state_cmdp([0.5, 0.5], [[0.1]]),
        "flat costs": lambda: tc.single_state_cmdp([0.5], [0.1]),
        "nan": lambda: tc.single_state_cmdp([NAN]),
    },
    "stack_cmdps": {
        "empty": lambda: tc.stack_cmdps([]),
        "layouts": lambda: tc.stack_cmdps([CMDP, tc.random_cmdp((1, 1), 2, 1, feasibility="any")]),
    },
    "unroll": {
        "horizon": lambda: tc.unroll(torch.ones(1, 1, 1), torch.ones(1, 1), torch.ones(1, 1, 1), horizon=0),
        "shape": lambda: tc.unroll(torch.ones(1, 1, 2), torch.ones(1, 1), torch.ones(1, 1, 1), horizon=1),
        "start": lambda: tc.unroll(torch.ones(1, 1, 1), torch.ones(1, 1), torch.ones(1, 1, 1), horizon=1, start=1),
        "nan": lambda: tc.unroll(torch.full((1, 1, 1), NAN), torch.ones(1, 1), torch.ones(1, 1, 1), horizon=2),
    },
    "SafeSet": {
        "lower": lambda: tc.SafeSet(LAYOUT, P[..., :1], P, COSTS),
        "costs": lambda: tc.SafeSet(LAYOUT, P, P, COSTS[..., :1]),
        "no constraint axis": lambda: tc.SafeSet(LAYOUT, P, P, COSTS[0]),
    },
    "Newton": {
        "backend": lambda: tc.Newton(backend="tosch"),
        "cap": lambda: tc.Newton(multiplier_cap=-1.0),
        "tolerance": lambda: tc.Newton(tolerance=NAN),
        "iterations": lambda: tc.Newton(max_iterations=0),
    },
    "Cvxpy": {"solver": lambda: tc.Cvxpy(solver="MOREAUX"), "cap": lambda: tc.Cvxpy(multiplier_cap=INF)},
    "ColumnGeneration": {"backend": lambda: tc.ColumnGeneration(backend="torhc")},
    "project": {
        "loss": lambda: tc.project(REWARDS[..., :1], OCCUPANCY, SAFE_SET, 0.1),
        "reference": lambda: tc.project(REWARDS, OCCUPANCY[..., :1], SAFE_SET, 0.1),
        "neither": lambda: tc.project(REWARDS, None, SAFE_SET, 0.1),
        "both": lambda: tc.project(REWARDS, OCCUPANCY, SAFE_SET, 0.1, log_reference=OCCUPANCY),
        "nan": lambda: tc.project(spoiled(REWARDS, NAN), OCCUPANCY, SAFE_SET, 0.1),
        "eta nan": lambda: tc.project(REWARDS, OCCUPANCY, SAFE_SET, NAN),
        "negative reference": lambda: tc.project(REWARDS, spoiled(OCCUPANCY, -0.1), SAFE_SET, 0.1),
        "solver": lambda: tc.project(REWARDS, OCCUPANCY, SAFE_SET, 0.1, solver="newtn"),
        "foreign": lambda: tc.project(REWARDS, OCCUPANCY, SAFE_SET, 0.1, solver=tc.ColumnGeneration()),
        "intervals": lambda: tc.project(REWARDS, OCCUPANCY, tc.SafeSet(LAYOUT, 2 * P, P, COSTS), 0.1),
    },
    "optimistic_optimum": {
        "rewards": lambda: tc.optimistic_optimum(REWARDS[..., :1], SAFE_SET),
        "nan": lambda: tc.optimistic_optimum(spoiled(REWARDS, NAN), SAFE_SET),
        "solver": lambda: tc.optimistic_optimum(REWARDS, SAFE_SET, solver="colum_generation"),
        "intervals": lambda: tc.optimistic_optimum(REWARDS, tc.SafeSet(LAYOUT, 2 * P, P, COSTS)),
    },
    "safe_optimum": {
        "rewards": lambda: tc.safe_optimum(CMDP, REWARDS[..., :1]),
        "costs": lambda: tc.safe_optimum(CMDP, costs=COSTS[0]),
        "batch": lambda: tc.safe_optimum(CMDP, REWARDS.expand(3, *REWARDS.shape)),
        "nan": lambda: tc.safe_optimum(CMDP, spoiled(REWARDS, NAN)),
    },
    "unconstrained_optimum": {"rewards": lambda: tc.unconstrained_optimum(CMDP, REWARDS[..., :1])},
    "slater_gap": {"costs": lambda: tc.slater_gap(CMDP, COSTS[0])},
    "rho": {"costs": lambda: tc.rho(CMDP, COSTS[0])},
    "safest_policy": {"costs": lambda: tc.safest_policy(CMDP, COSTS[0])},
    "safe_caps": {"rho0": lambda: tc.safe_caps(CMDP, 2.0), "nan": lambda: tc.safe_caps(CMDP, NAN)},
    "Bernoulli": {
        "low": lambda: tc.Bernoulli(REWARDS, low=0.5),
        "range": lambda: tc.Bernoulli(COSTS),
        "nan": lambda: tc.Bernoulli(spoiled(REWARDS, NAN)),
        "list": lambda: tc.Bernoulli(REWARDS.tolist()),
        "axes": lambda: tc.Bernoulli(REWARDS[0, 0]),
    },
    "Fixed": {"range": lambda: tc.Fixed(2 * torch.ones_like(REWARDS)), "nan": lambda: tc.Fixed(spoiled(REWARDS, NAN))},
    "Switching": {
        "blocks": lambda: tc.Switching([], at=[]),
        "at": lambda: tc.Switching([REWARDS, REWARDS], at=[]),
        "order": lambda: tc.Switching([REWARDS] * 3, at=[5, 5]),
        "unlike": lambda: tc.Switching([REWARDS, REWARDS.float()], at=[1]),
        "noise": lambda: tc.Switching([REWARDS], at=[], noise="bernouli"),
        "low": lambda: tc.Switching([REWARDS], at=[], low=NAN),
    },
    "Cyclic": {"length": lambda: tc.Cyclic([REWARDS], 0), "blocks": lambda: tc.Cyclic([], 1)},
    "OGDAdversary": {
        "sign": lambda: tc.OGDAdversary(REWARDS, sign=0, step=0.1),
        "step": lambda: tc.OGDAdversary(REWARDS, sign=1, step=-0.1),
        "step nan": lambda: tc.OGDAdversary(REWARDS, sign=1, step=NAN),
        "schedule": lambda: tc.OGDAdversary(REWARDS, sign=1, step=0.1, schedule="sqrt"),
        "horizon": lambda: tc.OGDAdversary(REWARDS, sign=1, step=0.1, schedule="sqrt_T"),
        "low": lambda: tc.OGDAdversary(REWARDS, sign=1, step=0.1, low=2.0),
        "base": lambda: tc.OGDAdversary(COSTS, sign=1, step=0.1),
        "high": lambda: tc.OGDAdversary(REWARDS, sign=1, step=0.1, high=torch.ones(7)),
    },
    "Recorder": {"episodes": lambda: tc.Recorder(tc.Fixed(REWARDS), 0)},
    "Replay": {"empty": lambda: tc.Replay(REWARDS[None][:0]), "nan": lambda: tc.Replay(spoiled(REWARDS[None], NAN))},
    "Simulator": {
        "costs missing": lambda: tc.Simulator(CMDP, tc.Bernoulli(REWARDS)),
        "runs": lambda: env(runs=0),
        "seed": lambda: env(seed=-1),
        "large seed": lambda: env(seed=2**32),
        "first_run": lambda: env(first_run=-1),
        "distinct_runs": lambda: env(distinct_runs=0),
        "batch": lambda: tc.Simulator(tc.stack_cmdps([CMDP] * 3), tc.Bernoulli(REWARDS), tc.Bernoulli(COSTS, low=-1), runs=2),
        "rewards": lambda: tc.Simulator(CMDP, tc.Bernoulli(REWARDS[..., :1]), tc.Bernoulli(COSTS, low=-1)),
        "device": lambda: tc.Simulator(CMDP, tc.Bernoulli(REWARDS.to("meta")), tc.Bernoulli(COSTS, low=-1)),
        "policy shape": lambda: env().rollout(POLICY[..., :1]),
        "policy nan": lambda: env().rollout(spoiled(POLICY, NAN)),
        "policy negative": lambda: env().rollout(spoiled(POLICY, -0.5)),
        "policy infinite": lambda: env().rollout(spoiled(POLICY, INF)),
        "state": lambda: env().load_state_dict({"episode": 1}),
    },
    "Tracker": {
        "order": lambda: [tracker := tc.Tracker(env()), tracker.record(2), tracker.record(2)],
        "state": lambda: tc.Tracker(env()).load_state_dict({}),
    },
    "WCOPS": {
        **learner_cases("WCOPS"),
        "eta": lambda: tc.WCOPS(LAYOUT, 1, 10, eta=-0.1),
        "gamma nan": lambda: tc.WCOPS(LAYOUT, 1, 10, gamma=NAN),
        "scale": lambda: tc.WCOPS(LAYOUT, 1, 10, bonus_scale=INF),
        "a value a run": lambda: tc.WCOPS(LAYOUT, 1, 10, runs=3, radius_scale=torch.ones(2)),
        "solver": lambda: tc.WCOPS(LAYOUT, 1, 10, solver="neuton"),
        "confidence": lambda: tc.WCOPS(LAYOUT, 1, 10, confidence="bernstien"),
        "violation_threshold": lambda: tc.WCOPS(LAYOUT, 1, 10, violation_threshold="papr"),
        "trajectory": lambda: tc.WCOPS(LAYOUT, 1, 10, runs=2).update(env().rollout(POLICY)),
    },
    "UOBREPS": {**learner_cases("UOBREPS"), "eta": lambda: tc.UOBREPS(LAYOUT, 1, 10, eta=-0.1)},
    "OptCMDP": {
        **learner_cases("OptCMDP"),
        "bonus_scale": lambda: tc.OptCMDP(LAYOUT, 1, 10, bonus_scale=-1.0),
        "solver": lambda: tc.OptCMDP(LAYOUT, 1, 10, solver="newton"),
    },
    "Greedy": learner_cases("Greedy"),
    "OptPrimalDual": {**learner_cases("OptPrimalDual"), "dual_step": lambda: tc.OptPrimalDual(LAYOUT, 1, 10, dual_step=NAN)},
    "PDBPS": {**learner_cases("PDBPS"), "eta": lambda: tc.PDBPS(LAYOUT, 1, 10, eta=-1.0)},
    "run": {
        "learner": lambda: tc.run(object(), env(), 5),
        "episodes": lambda: tc.run(tc.WCOPS(LAYOUT, 1, 10), env(), 0),
        "log_every": lambda: tc.run(tc.WCOPS(LAYOUT, 1, 10), env(), 5, log_every=0),
        "runs": lambda: tc.run(tc.WCOPS(LAYOUT, 1, 10, runs=3), env(runs=2), 5, progress=False),
        "logdir": lambda: tc.run(tc.WCOPS(LAYOUT, 1, 10), env(), 5, logdir=__file__),
    },
    "run_split": {
        "runs": lambda: tc.run_split(lambda runs, first: (tc.WCOPS(LAYOUT, 1, 10, runs=runs), env(runs=runs)), 0, 5),
        "make": lambda: tc.run_split(lambda runs, first: (tc.WCOPS(LAYOUT, 1, 10, runs=3), env(runs=3)), 2, 5),
        "episodes": lambda: tc.run_split(lambda runs, first: (tc.WCOPS(LAYOUT, 1, 10, runs=runs), env(runs=runs)), 2, -1),
    },
    "nn": {
        "constraints": lambda: tc.nn.SafeOccupancy(LAYOUT, -1),
        "solver": lambda: tc.nn.SafeOccupancy(LAYOUT, 1, solver="neuton"),
        "transitions": lambda: tc.nn.SafeOccupancy(LAYOUT, 1, transitions=P[..., :1]),
        "no input": lambda: tc.nn.SafeOccupancy(LAYOUT, 1, transitions=P, costs=COSTS)(),
        "no costs": lambda: tc.nn.SafeOccupancy(LAYOUT, 1, transitions=P)(REWARDS),
        "no transitions": lambda: tc.nn.SafeOccupancy(LAYOUT, 1, costs=COSTS)(REWARDS),
        "nan": lambda: tc.nn.SafeOccupancy(LAYOUT, 1, transitions=P, costs=COSTS)(spoiled(REWARDS, NAN)),
    },
    "mean_and_interval": {"level": lambda: tc.mean_and_interval(torch.ones(3), level=1.0)},
    "growth_exponent": {"level": lambda: tc.growth_exponent(CURVE[0], CURVE[1], level=NAN)},
    "plot_curves": {
        "no curves": lambda: tc.plot_curves("x.png", {}, "regret"),
        "shape": lambda: tc.plot_curves("x.png", {"a": (CURVE[0], torch.ones(2, 4))}, "regret"),
        "folder": lambda: tc.plot_curves("/nowhere/at/all/x.png", {"a": CURVE}, "regret"),
        "format": lambda: tc.plot_curves("x.jgp", {"a": CURVE}, "regret"),
        "none": lambda: tc.plot_curves("x.png", None),
        "no label": lambda: tc.plot_curves("x.png", {"a": CURVE}),
    },
    "evaluate": {
        "none": lambda: tc.evaluate(None, CMDP),
        "sum": lambda: tc.evaluate(REWARDS.new_zeros(REWARDS.shape), CMDP),
        "shape": lambda: tc.evaluate(REWARDS[..., :1], CMDP),
        "network": lambda: tc.evaluate(lambda states: states[:1], CMDP),
    },
    "load": {"nothing there": lambda: tc.load("nowhere")},
    **{
        kind.__name__: {"no baseline": lambda kind=kind: kind(LAYOUT, 1, 10, baseline=None)}
        for kind in (tc.SOPS, tc.MAOPS, tc.DOPE)
    },
    "Baseline": {"not safe": lambda: tc.Baseline(tc.uniform_policy(LAYOUT), [0.1])},
    "baseline": {"margin": lambda: tc.baseline(CMDP, -1.0)},
}

# Names without arguments to check: records that the library fills in, abstract bases, errors; and tensor functions that take any
# batch shape and broadcast, whose shape errors are PyTorch's. The adapters' own tests feed them bad values.
UNCHECKED = {
    "two_path_cmdp", "LEARNERS", "Learner", "Process", "OptimisticOptimum", "ProjectionResult", "RunResult", "Solver", "Status",
    "Trajectory", "adapters", "testing", "tuning", "InvalidInput", "RunFolderError", "TorchCMDPError", "__version__",
    "flow_residual", "interval_residual", "occupancy_of", "pair_occupancy_of", "policy_of", "transitions_of", "uniform_occupancy",
    "uniform_policy", "alpha_of", "Evaluation", "CostModel", "Drift", "MeanCosts", "Mixture",
    "PaperCosts", "PriorCosts", "Units", "problems",
}  # fmt: skip


def test_every_public_name_is_here() -> None:
    assert set(tc.__all__) == set(CASES) | UNCHECKED and not set(CASES) & UNCHECKED


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_a_bad_value_gets_one_sentence(name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tc.TorchCMDPError) as caught:
        CASES[name][case]()
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence[-1] in ".?" and len(sentence) > 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "case", "nearest"),
    [
        ("project", "solver", "newton"),
        ("Newton", "backend", "torch"),
        ("Cvxpy", "solver", "MOREAU"),
        ("ColumnGeneration", "backend", "torch"),
        ("optimistic_optimum", "solver", "column_generation"),
        ("random_cmdp", "feasibility", "feasible"),
        ("WCOPS", "solver", "newton"),
        ("nn", "solver", "newton"),
        ("WCOPS", "confidence", "bernstein"),
        ("WCOPS", "violation_threshold", "paper"),
        ("OGDAdversary", "schedule", "sqrt_t"),
        ("Switching", "noise", "bernoulli"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name: str, case: str, nearest: str) -> None:
    with pytest.raises(tc.InvalidInput, match=f"did you mean ['\"]{nearest}['\"]"):
        CASES[name][case]()


def test_sentences_in_the_source_end_as_sentences() -> None:
    """Every message of InvalidInput that is one literal: it says something, and ends with a full stop or a question mark."""
    for module in [*(ROOT / "torchcmdp").rglob("*.py"), *(ROOT / "train").rglob("*.py")]:
        for message in re.findall(r'raise (?:tc\.)?(?:InvalidInput|RunFolderError)\(\s*f?"([^"\n]*)"\s*\)', module.read_text()):
            assert message[-1] in ".?}", f"{module.name}: {message}"


def test_no_learner_is_forgotten() -> None:
    assert {cls.__name__ for cls in tc.LEARNERS.values()} <= set(CASES)
    assert all(inspect.isclass(getattr(tc, cls.__name__)) for cls in tc.LEARNERS.values())
