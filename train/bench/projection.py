"""The projection against its rivals: the same instances, the same process, the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple

import cvxpy as cp
import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.kernels.engine import using
from torchcmdp.projection import DEFAULT_CAP
from torchcmdp.projection.cvxpy_layer import build_problem, merge_args, solve_layer

from ..program import Among, Count, Positive, bar, begin, publish, table, write_table
from . import BenchOptions, median_seconds


class Size(NamedTuple):
    """Layer widths, actions and constraints."""

    widths: tuple[int, ...]
    actions: int
    constraints: int


SIZES = {
    "small": Size((1, 3, 3, 1), 2, 1),
    "paper": Size((1, 4, 4, 4, 1), 3, 2),
    "large": Size((1, *[8] * 7, 1), 4, 3),
}
# Each rival as it comes: the settings of its own makers.
RIVALS: dict[str, dict[str, Any]] = {
    "Moreau": {"solver": "MOREAU", "solver_args": {"ipm_settings": {"tol_gap_abs": 1e-8, "tol_gap_rel": 1e-8, "tol_feas": 1e-8}}},
    "DIFFCP": {"solver": "DIFFCP", "solver_args": {"solve_method": "SCS", "mode": "lsqr"}},
}
# Instances a rival is timed on at most; a time per instance hardly changes beyond.
RIVAL_LIMIT = {
    "small": {"Moreau": 1024, "DIFFCP": 128, "Clarabel": 8},
    "paper": {"Moreau": 1024, "DIFFCP": 128, "Clarabel": 8},
    "large": {"Moreau": 128, "DIFFCP": 2, "Clarabel": 2},
}


# Milliseconds per instance of the compiled kernel of 0.1.0's first README and of Moreau beside it, at paper size: batch, mode.
BEFORE = {
    (1, "forward"): (0.177, 10.3),
    (1, "forward+backward"): (0.565, 15.8),
    (10, "forward"): (0.062, 4.3),
    (10, "forward+backward"): (0.149, 7.04),
    (128, "forward"): (0.040, 4.02),
    (128, "forward+backward"): (0.063, 5.24),
}
# How many times faster than whom, at paper size: ours, rival, mode, batch, ratio.
AIMS = [
    ("compiled", "before", "forward", 128, 2),
    ("compiled", "before", "forward+backward", 128, 1.5),
    ("compiled", "Moreau", "forward", 1, 100),
    ("compiled", "Moreau", "forward", 10, 150),
    ("compiled", "Moreau", "forward", 128, 150),
    ("compiled", "Moreau", "forward+backward", 10, 80),
    ("compiled", "Moreau", "forward+backward", 128, 80),
    ("torch", "Moreau", "forward", 128, 20),
    ("compiled", "DIFFCP", "forward+backward", 128, 300),
]


@dataclass
class Options(BenchOptions):
    """Time the projection against cvxpylayers (Moreau and DIFFCP with their default settings) and Clarabel through cvxpy.

    The instances are captured from WC-OPS runs midway, half of them with a binding safety constraint. The rivals' times leave out
    our checks of their answers. Prints one table of times, ratios and errors, and writes it to LOGDIR/NAME/projection.md and .csv.

    Examples:
      python -m train bench projection
      python -m train bench projection --sizes paper --batches 10 128
    """

    sizes: Annotated[tuple[str, ...], Among(SIZES)] = ("small", "paper", "large")
    """Among small (1-3-3-1, 2 actions, 1 constraint), paper (1-4-4-4-1, 3, 2) and large (7 layers of 8, 4, 3)."""
    batches: tuple[Count, ...] = (1, 10, 32, 128, 1024)  # How many instances are solved at once.
    seconds: Positive = 1.0  # Least time spent on repeating each measurement of ours.


class Instances(NamedTuple):
    """A batch of projection problems: ln reference - eta * loss, and the safe sets."""

    log_target: Tensor
    safe_set: tc.SafeSet
    loss: Tensor  # zero: it is in the target already

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What differs from one to the next."""
        return self.log_target, self.safe_set.lower, self.safe_set.upper, self.safe_set.costs

    def changed(self, change: Callable[[Tensor], Tensor]) -> Instances:
        """The same with each of these tensors changed."""
        target, *rest = map(change, self.tensors)
        return Instances(target, tc.SafeSet(self.safe_set.layout, *rest), self.loss)

    def take(self, index: Tensor) -> Instances:
        """Some of them."""
        return self.changed(lambda tensor: tensor[index].contiguous())


def capture(size: Size, seed: int, count: int) -> Instances:
    """`count` projections of WC-OPS runs, half of them with a binding constraint, from the second half of 600 episodes.

    Bonuses and widths are scaled by 0.1 and less, since with the paper's constants no constraint binds that early.
    """
    runs, episodes = 64, 600
    cmdps = tc.stack_cmdps([tc.random_cmdp(*size, seed=seed + j) for j in range(runs)])
    env = tc.Simulator(cmdps, tc.Bernoulli(cmdps.rewards), tc.Bernoulli(cmdps.costs, low=-1), runs=runs, seed=seed)
    scales = torch.logspace(-2, -1, runs, dtype=torch.float64)
    learner = tc.WCOPS(cmdps.layout, size.constraints, horizon=episodes, runs=runs, bonus_scale=scales, radius_scale=scales)
    captured: list[tuple[Tensor, ...]] = []
    project_once = learner._project

    def record(loss: Tensor, safe_set: tc.SafeSet) -> tc.ProjectionResult:
        target = learner.log_occupancy - (learner.hyperparameter("eta")[:, None, None, None] * loss).unsqueeze(-1)
        result = project_once(loss, safe_set)
        if learner.episode > episodes // 2 and int(learner.episode) % 20 == 0:
            binding = (result.multipliers > 0).any(-1) & (result.status == 0)
            captured.append((binding, result.status == 0, target, safe_set.lower, safe_set.upper, safe_set.costs))
        return result

    learner._project = record  # type: ignore[method-assign]
    with using("torch"):  # which projects where we can see it
        for _ in bar(range(episodes), f"capturing {'-'.join(map(str, size.widths))}", leave=False):
            learner.update(env.rollout(learner.policy))
    binding, solved, target, lower, upper, costs = (torch.cat(column) for column in zip(*captured, strict=True))
    generator = torch.Generator().manual_seed(seed)

    def draw(which: Tensor, number: int) -> Tensor:
        pool = which.nonzero().squeeze(-1)
        return pool[torch.randint(len(pool), (number,), generator=generator)]

    chosen = torch.stack([draw(binding, count), draw(solved & ~binding, count)], 1).flatten()[:count]
    loss = torch.zeros(cmdps.layout.pair_shape, dtype=torch.float64)
    return Instances(target, tc.SafeSet(cmdps.layout, lower, upper, costs), loss).take(chosen)


def ours(instances: Instances, backend: str) -> tc.ProjectionResult:
    """Our own projection of a batch."""
    solver = tc.Newton(backend=backend)
    return tc.project(instances.loss, None, instances.safe_set, 1.0, log_reference=instances.log_target, solver=solver)


def rival(instances: Instances, name: str) -> Tensor:
    """The occupancies of a cvxpylayers backend, without the checks that `Cvxpy` adds."""
    options = RIVALS[name]
    args = merge_args(options["solver"], options["solver_args"])
    return solve_layer(instances.safe_set, DEFAULT_CAP, options["solver"], args, instances.log_target)[0]


compiled_problem = cache(build_problem)


def clarabel(instances: Instances) -> None:
    """Clarabel through cvxpy, one instance after the other, with the compiled problem kept."""
    layout, m = instances.safe_set.layout, instances.safe_set.constraints
    problem, parameters, _ = compiled_problem(layout, m, DEFAULT_CAP)
    real = layout.transition_mask()
    several = real & (layout.next_widths() > 1).unsqueeze(-1)
    for j in range(len(instances.log_target)):
        values = [instances.log_target[j][real]]
        values += [instances.safe_set.lower[j][several], instances.safe_set.upper[j][several]] if several.any() else []
        values += [instances.safe_set.costs[j][:, layout.pair_mask()]] if m else []
        for parameter, value in zip(parameters, values, strict=True):
            parameter.value = value.numpy()
        problem.solve(solver=cp.CLARABEL)


def error(result: tc.ProjectionResult) -> str:
    """Duality gap / feasibility, the worst of a batch."""
    return f"{float(result.gap.abs().max()):.0e} / {float(result.residual.max().clamp_min(1e-17)):.0e}"


def measure(name: str, instances: Instances, batch: int, seconds: float) -> list[dict[str, Any]]:
    """Times of everybody on the first `batch` instances, forward and forward with backward."""
    limit = RIVAL_LIMIT[name]
    rows: list[dict[str, Any]] = []
    for mode in ("forward", "forward+backward"):
        row: dict[str, Any] = {"size": name, "batch": batch, "mode": mode}

        def timed(
            solve: Callable[[Instances], Any], count: int, least: int = 3, budget: float = seconds, mode: str = mode
        ) -> float:
            part, backward = instances.take(torch.arange(count)), mode != "forward"
            part = part.changed(lambda tensor: tensor.requires_grad_(backward))
            cotangent = torch.linspace(0, 1, part.log_target.numel(), dtype=torch.float64).view_as(part.log_target)
            pulled = lambda: torch.autograd.grad(solve(part), part.tensors, cotangent)  # noqa: E731
            with torch.set_grad_enabled(backward):
                return 1e3 * median_seconds(pulled if backward else lambda: solve(part), least, budget) / count

        for backend in ("compiled", "torch"):
            row[backend] = timed(lambda part, backend=backend: ours(part, backend).occupancy, batch)  # type: ignore[misc]
        for solver in RIVALS:
            count = min(batch, limit[solver])
            row[solver] = timed(lambda part, solver=solver: rival(part, solver), count, 1, 0.0 if count > 10 else seconds)  # type: ignore[misc]
        # that kernel ran on a slower machine: what it would take here if Moreau had kept its pace
        before, moreau = BEFORE.get((batch, mode), (math.nan, 1.0)) if name == "paper" else (math.nan, 1.0)
        row["before"] = before / moreau * row["Moreau"]
        row["Clarabel"] = timed(clarabel, min(batch, limit["Clarabel"]), 1, 0.0) if mode == "forward" else math.nan
        rows.append(row)
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    options, folder = begin(Options, arguments, "bench projection")
    rows, errors = [], []
    for name in options.sizes:
        instances = capture(SIZES[name], options.seed, max(options.batches))
        for batch in bar(options.batches, f"timing {name}", leave=False):
            rows += measure(name, instances, batch, options.seconds)
        part = instances.take(torch.arange(min(10, max(options.batches))))
        certificates = [error(ours(part, "compiled")), error(ours(part, "torch"))]
        certificates += [error(tc.Cvxpy(**RIVALS[solver]).solve(part.log_target, part.safe_set)) for solver in RIVALS]
        errors.append([name, *certificates])
    write_table(folder / "projection.csv", rows)
    where = f"Written to {folder / 'projection.md'} and {folder / 'projection.csv'}"
    publish(folder / "projection.md", report(rows, errors), where)
    return 0


def report(rows: list[dict[str, Any]], errors: list[list[str]]) -> str:
    """Times with the ratios of the rivals to our compiled kernel, and everybody's errors, as Markdown."""

    def against(row: dict[str, Any], solver: str) -> str:
        ratio = row[solver] / row["compiled"]
        return "-" if math.isnan(ratio) else f"{row[solver]:.3g} ({ratio:.{1 if ratio < 9.5 else 0}f}x)"

    rivals = ("before", "Moreau", "DIFFCP", "Clarabel")
    body = []
    for row in rows:
        own = [f"{row[backend]:.4f}" for backend in ("compiled", "torch")]
        times = [*own, *(against(row, solver) for solver in rivals), f"{row['Moreau'] / row['torch']:.0f}x"]
        body.append([row["size"], str(row["batch"]), row["mode"], *times])
    header = ["size", "batch", "mode", "compiled", "torch", *rivals, "Moreau / torch"]
    aims = [[*map(str, aim), *judge(rows, *aim)] for aim in AIMS]
    limits = "; ".join(f"{size}: {', '.join(f'{k} {v}' for k, v in limit.items())}" for size, limit in RIVAL_LIMIT.items())
    return "\n\n".join(
        [
            "Milliseconds per instance (and how many times ours, compiled):",
            table(header, body, "milliseconds"),
            "Before: the kernel of the first README, which ran on another machine, in units of Moreau there and here; its ratio is "
            "that of our two ratios to Moreau.",
            f"Rivals are timed on at most so many instances of a batch: {limits}.",
            "Largest duality gap / infeasibility on ten instances:",
            table(["size", "compiled", "torch", "Moreau", "DIFFCP"], errors, "errors"),
            "What we aim at, at paper size:",
            table(["ours", "rival", "mode", "batch", "at least", "measured", ""], aims, "aims"),
        ]
    )


def judge(rows: list[dict[str, Any]], solver: str, opponent: str, mode: str, batch: int, least: float) -> tuple[str, str]:
    """The ratio that was measured, and whether it is what we aim at."""
    for row in rows:
        if (row["size"], row["mode"], row["batch"]) == ("paper", mode, batch):
            ratio = row[opponent] / row[solver]
            return f"{ratio:.3g}x", "met" if ratio >= least else f"missed by a factor of {least / ratio:.1f}"
    return "-", "not measured"
