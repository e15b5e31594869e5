"""The kernels' own functions, launched over a grid in numba's CUDA simulator, against the same functions compiled for the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import PROCESSES, parts
from projection_instances import random_instances
from simulated_cuda import PARTS, after_episodes

import torchcmdp as tc
from torchcmdp.kernels import cuda
from torchcmdp.kernels.engine import using
from torchcmdp.kernels.geometry import geometry_of
from torchcmdp.kernels.projection import Limits, project_batch
from torchcmdp.kernels.pull import pull_batch
from torchcmdp.kernels.system import respond_batch, solve_batch
from torchcmdp.kernels.work import room
from torchcmdp.learners.compiled import obstacle
from torchcmdp.run.session import Session
from torchcmdp.status import Status
from train.bench.fuzz import wild_units

GAMES = [
    *(("wc-ops", process) for process in PROCESSES),
    *((learner, "bernoulli") for learner in ("wc-ops, prior, margin, drift", "uob-reps")),
    *((learner, "bernoulli") for learner in ("opt-cmdp", "greedy", "opt-primal-dual", "pdb-ps")),
]
CUDA = torch.device("cuda")


class Given:
    """Instances with every outcome: solved, elastic, invalid; with one iteration, those that are given up."""

    def __init__(self) -> None:
        loss, reference, safe = random_instances((1, 3, 2, 1), 2, 2, 4, seed=0)
        self.layout = safe.layout
        mask = self.layout.transition_mask()
        target = (np.log(np.where(mask, reference, 1.0)) - loss.unsqueeze(-1).numpy() * mask.numpy()).reshape(4, -1)
        costs = safe.costs.numpy().reshape(4, 2, -1).copy()
        costs[1] = np.abs(costs[1]) + 0.1 * self.layout.pair_mask().numpy().ravel()  # no policy is safe
        target[2, 0] = np.nan
        lower, upper = (end.numpy().reshape(4, -1) for end in (safe.lower, safe.upper))
        self.inputs = {"target": target, "lower": lower, "upper": upper, "costs": costs}
        rng = np.random.default_rng(0)
        self.grad = rng.normal(size=target.shape) * mask.numpy().ravel()
        self.columns = rng.normal(size=(4, 2, self.layout.layers * self.layout.width))


@pytest.fixture(scope="module")
def given() -> Given:
    return Given()


@pytest.fixture(scope="module")
def simulated(given: Given, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came out of one process with the simulator, which everything here shares because it takes seconds to start."""
    folder = tmp_path_factory.mktemp("simulated")
    layout = given.layout
    arrays = {**given.inputs, "grad": given.grad, "columns": given.columns}
    np.savez(folder / "in.npz", widths=layout.widths, actions=layout.actions, **arrays)
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(Path(__file__).with_name("simulated_cuda.py")), str(folder), json.dumps(GAMES)]
    subprocess.run(command, check=True, env=environment)
    return torch.load(folder / "out.pt", weights_only=False)


@pytest.mark.parametrize("most", [500, 1])
def test_the_simulated_gpu_projects_and_differentiates_as_the_cpu_does(given: Given, simulated: dict[str, Any], most: int) -> None:
    found, layout = simulated["projected"][most], given.layout
    geometry, inputs = geometry_of(layout), tuple(given.inputs.values())
    expected = project_batch(geometry, *inputs, states=layout.layers * layout.width, limits=Limits(200.0, 1e-11, most))
    wanted = {Status.SOLVED, Status.ELASTIC, Status.INVALID} if most > 1 else {Status.MAX_ITERATIONS, Status.INVALID}
    assert set(expected.status.tolist()) == {int(status) for status in wanted}
    for name, values in expected._asdict().items():
        if name in ("status", "iterations"):
            assert np.array_equal(found[name], values), name
        else:
            np.testing.assert_allclose(found[name], values, rtol=1e-9, atol=1e-11, err_msg=name)
    pulled = tuple(np.zeros(array.shape) for array in inputs)
    pull_batch(geometry, 2, (*inputs, expected.potentials, expected.multipliers, given.grad), pulled)
    good = expected.status < Status.MAX_ITERATIONS
    for j, values in enumerate(pulled):
        np.testing.assert_allclose(found[f"pulled {j}"][good], values[good], rtol=1e-6, atol=1e-9, err_msg=str(j))
        assert most == 1 or np.abs(values[good]).max() > 0
    answered, columns = respond_batch(geometry, *inputs, expected.potentials, expected.multipliers), given.columns.copy()
    solve_batch(geometry, answered[0], answered[1], answered[3], columns)
    for j, values in enumerate((*answered, columns)):
        np.testing.assert_allclose(found[f"answered {j}"][good], values[good], rtol=1e-6, atol=1e-9, err_msg=str(j))
        assert most == 1 or np.abs(values[good]).max() > 0


def test_both_modes_of_the_derivative_agree_where_bounds_meet_in_a_corner(simulated: dict[str, Any]) -> None:
    """Of points for intervals, at which kernels and torch say differently which end holds."""
    lower, upper = (getattr(wild_units(3, 20)[1], end) for end in ("lower", "upper"))
    assert torch.equal(lower, upper) and simulated["disagreeing"] == 0


def check_close(found: Any, expected: Any, exact: bool) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            check_close(found[name], value, exact or name in ("visits", "transition_visits", "episode", "path_violation"))
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact else 1e-12, equal_nan=True)
    else:
        assert found == expected


@pytest.mark.parametrize("game", GAMES)
def test_the_simulated_gpu_plays_as_the_cpu_does(game: tuple[str, str], simulated: dict[str, Any]) -> None:
    """Five episodes: to the bit, but for what follows from a projection or from exponentials, which the CPU sums in another order
    and takes four at a time."""
    expected, found = after_episodes("compiled", *game), simulated["played"][game]
    assert int(expected["learner"]["episode"]) == 5
    rounds = hasattr(parts(*game)[0], "log_occupancy") or game[0] == "pdb-ps"
    for name in PARTS:
        check_close(found[name], expected[name], exact=not rounds)


def test_without_a_gpu_the_engine_of_one_is_refused_in_a_sentence() -> None:
    with pytest.raises(tc.InvalidInput, match=r'engine is "cuda", but kernels on a GPU take CUDA tensors, and these are on cpu'):
        tc.run(*parts("wc-ops", "bernoulli"), 2, engine="cuda", progress=False)
    with pytest.raises(tc.InvalidInput, match=r'backend is "cuda", but kernels on a GPU take CUDA tensors, and these are on cpu'):
        tc.Newton(backend="cuda").settings(torch.device("cpu"))


@pytest.mark.parametrize("usable", [True, False])
def test_cuda_tensors_go_to_the_kernels_where_there_are_any_and_to_torch_elsewhere(
    usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "usable", lambda: usable)
    monkeypatch.setattr(cuda, "simulated", lambda: False)
    assert tc.Newton().settings(CUDA).backend == ("cuda" if usable else "torch")
    assert tc.Newton(fixed_iterations=3).settings(CUDA).backend == "torch"
    assert tc.Newton(backend="torch").settings(CUDA).backend == "torch"
    assert tc.Newton().settings(torch.device("cpu")).backend == "compiled"
    learner, env = parts("wc-ops", "bernoulli")
    session = Session(learner, env, 2, 2, tc.distributed.Crew(3, alone=True))
    monkeypatch.setattr(type(learner), "device", property(lambda _: CUDA))
    monkeypatch.setattr(env, "device", CUDA)
    monkeypatch.setattr("torchcmdp.simulator.is_packable", lambda process, device: device == CUDA)
    needs = "kernels on a GPU need numba-cuda"
    assert session.obstacle.startswith("" if usable else needs) and bool(session.obstacle) != usable
    with using("compiled"):
        assert "these kernels compute on the CPU" in session.obstacle
    with using("torch"):
        assert session.obstacle == 'engine is "torch"'
    if not usable:
        with pytest.raises(tc.InvalidInput, match=f'backend is "cuda", but {needs}'):
            tc.Newton(backend="cuda").settings(CUDA)


def test_solvers_that_want_torch_are_left_to_it_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "obstacle", lambda device: "")
    for solver, why in ((tc.Newton(), ""), (tc.Newton(fixed_iterations=8), "asked to use torch"), ("cvxpy", "its solver is Cvxpy")):
        env = parts("wc-ops", "bernoulli")[1]
        found = obstacle(tc.WCOPS.for_env(env, horizon=10, solver=solver), gpu=True)
        assert (why in found) and bool(found) == bool(why)


def test_what_an_earlier_call_left_in_the_work_space_counts_for_nothing(given: Given) -> None:
    """A GPU's work space holds anything at first, and the CPU's what the instance before left, NaN among it."""
    layout, inputs = given.layout, tuple(given.inputs.values())
    geometry, found = geometry_of(layout), []
    for rubbish in (0.0, np.nan):

        def litter(rubbish: float = rubbish) -> None:
            reals, codes = room(geometry, 2)
            reals[:], codes[:] = rubbish, 3 if rubbish else 0

        litter()
        solved = project_batch(geometry, *inputs, states=layout.layers * layout.width, limits=Limits(200.0, 1e-11, 500))
        pulled = tuple(np.zeros(array.shape) for array in inputs)
        litter()
        pull_batch(geometry, 2, (*inputs, solved.potentials, solved.multipliers, given.grad), pulled)
        litter()
        found.append((*solved, *pulled, *respond_batch(geometry, *inputs, solved.potentials, solved.multipliers)))
    for clean, dirty in zip(*found, strict=True):
        assert np.array_equal(clean, dirty, equal_nan=True)
