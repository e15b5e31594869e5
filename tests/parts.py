"""Every learner that has kernels and every process, and a learner with a simulator made of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchcmdp as tc
from torchcmdp.costs import Drift, PaperCosts, PriorCosts

RAGGED = (1, 3, 2, 4, 1)
RINGS = Drift(height=4.0, memory=5.0)  # several times within a few hundred episodes
LEARNERS: dict[str, tuple[type[tc.Learner], dict[str, Any]]] = {
    "wc-ops": (tc.WCOPS, {}),
    "wc-ops, bernstein": (tc.WCOPS, {"confidence": "bernstein", "radius_scale": 0.1}),
    "wc-ops, l1": (tc.WCOPS, {"confidence": "l1"}),
    "wc-ops, empirical": (tc.WCOPS, {"violation_threshold": "empirical", "threshold_scale": 0.01}),
    "wc-ops, prior, margin, drift": (
        tc.WCOPS,
        {"costs": PriorCosts(margin=0.7, drift=RINGS), "loss": "doubly-robust", "share": 0.01, "eta": 0.3, "radius_scale": 0.01},
    ),
    "wc-ops, paper, drift": (tc.WCOPS, {"costs": PaperCosts(drift=RINGS), "bonus_scale": 0.05}),
    "uob-reps": (tc.UOBREPS, {}),
    "opt-primal-dual": (tc.OptPrimalDual, {}),
    "opt-primal-dual, matched": (tc.OptPrimalDual, {"radii": "matched", "multiplier_cap": 2.0, "bonus_scale": 0.1}),
    "pdb-ps": (tc.PDBPS, {}),
    "pdb-ps, entrywise": (tc.PDBPS, {"confidence": "entrywise"}),
    "opt-cmdp": (tc.OptCMDP, {}),
    "opt-cmdp, literal": (tc.OptCMDP, {"radii": "literal", "bonus_scale": 0.05, "radius_scale": 0.05}),
    **{
        f"opt-cmdp, {kind}": (tc.OptCMDP, {"radii": "matched", "confidence": kind, "bonus_scale": 0.03, "radius_scale": 0.03})
        for kind in ("entrywise", "l1", "bernstein", "efroni", "luo")
    },
    "opt-cmdp, prior, margin, drift": (
        tc.OptCMDP,
        {"costs": PriorCosts(margin=0.7, drift=RINGS), "rewards": "prior", "radius_scale": 0.01},
    ),
    "opt-cmdp, prior": (tc.OptCMDP, {"costs": PriorCosts(), "bonus_scale": 0.05, "radius_scale": 0.05}),
    "greedy": (tc.Greedy, {}),
    "greedy, prior, drift": (tc.Greedy, {"costs": PriorCosts(margin=0.3, drift=RINGS)}),
}


# Whose programs have ties where costs are -1 or 1, which the last bit then breaks: they meet costs that are not.
TIED = {name for name in LEARNERS if name.startswith(("opt-cmdp, prior", "greedy, prior"))}


def recorded(cmdp: tc.LayeredCMDP) -> tuple[Any, Any]:
    """Sequences long enough for the runs below."""
    numbers = torch.rand(400, 1, 1, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return tc.Replay(numbers[:, 0] * cmdp.rewards), tc.Replay(numbers * cmdp.costs)


def adversary(cmdp: tc.LayeredCMDP) -> tuple[Any, Any]:
    caps = tc.safe_caps(cmdp, 0.1)
    costs = tc.OGDAdversary(cmdp.costs, sign=1, step=0.2, schedule="sqrt_T", horizon=300, low=-1.0, high=caps)
    return tc.OGDAdversary(cmdp.rewards, sign=-1, step=0.3), costs


PROCESSES: dict[str, Callable[[tc.LayeredCMDP], tuple[Any, Any]]] = {
    "bernoulli": lambda cmdp: (tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1)),
    "fixed": lambda cmdp: (tc.Fixed(cmdp.rewards), tc.Fixed(cmdp.costs)),
    "switching": lambda cmdp: (
        tc.Switching([cmdp.rewards, 0.5 * cmdp.rewards], at=[50], noise="bernoulli"),
        tc.Switching([cmdp.costs, -cmdp.costs], at=[70]),
    ),
    "cyclic": lambda cmdp: (tc.Bernoulli(cmdp.rewards), tc.Cyclic([cmdp.costs, -cmdp.costs], 7, noise="bernoulli", low=-1)),
    "adversary": adversary,
    "replay": recorded,
    "recorders": lambda cmdp: (tc.Recorder(adversary(cmdp)[0], 30), tc.Recorder(adversary(cmdp)[1], 1_000)),
}


def parts(learner: str, process: str, runs: int = 3, first_run: int = 0, horizon: int = 300) -> tuple[tc.Learner, tc.Simulator]:
    """A learner of the paper's constants, scaled where the name says so, and a simulator, both new."""
    cmdp = tc.random_cmdp(RAGGED, actions=3, constraints=2, seed=3)
    env = tc.Simulator(cmdp, *PROCESSES[process](cmdp), runs=runs, seed=5, first_run=first_run)
    kind, options = LEARNERS[learner]
    return kind.for_env(env, horizon=horizon, **options), env
