"""The kernels' own functions, launched over a grid in numba's CUDA simulator, against the same functions compiled for the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from projection_instances import random_instances

from torchcmdp.kernels.geometry import geometry_of
from torchcmdp.kernels.projection import Limits, project_batch
from torchcmdp.status import Status


@pytest.mark.parametrize("most", [500, 1])
def test_the_simulated_gpu_projects_as_the_cpu_does(tmp_path, most):
    """All statuses: solved, elastic, invalid; with one iteration, those that are given up."""
    loss, reference, safe = random_instances((1, 3, 2, 1), 2, 2, 4, seed=0)
    layout = safe.layout
    mask = layout.transition_mask()
    target = (np.log(np.where(mask, reference, 1.0)) - loss.unsqueeze(-1).numpy() * mask.numpy()).reshape(4, -1)
    costs = safe.costs.numpy().reshape(4, 2, -1).copy()
    costs[1] = np.abs(costs[1]) + 0.1 * layout.pair_mask().numpy().ravel()  # no policy is safe
    target[2, 0] = np.nan
    lower, upper = (end.numpy().reshape(4, -1) for end in (safe.lower, safe.upper))
    inputs = {"target": target, "lower": lower, "upper": upper, "costs": costs}
    np.savez(tmp_path / "in.npz", widths=layout.widths, actions=layout.actions, most=most, **inputs)
    script, files = Path(__file__).with_name("simulated_cuda.py"), [str(tmp_path / name) for name in ("in.npz", "out.npz")]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, str(script), *files], check=True, env=environment)
    found = np.load(files[1])
    expected = project_batch(
        geometry_of(layout), *inputs.values(), states=layout.layers * layout.width, limits=Limits(200.0, 1e-11, most)
    )
    wanted = {Status.SOLVED, Status.ELASTIC, Status.INVALID} if most > 1 else {Status.MAX_ITERATIONS, Status.INVALID}
    assert set(expected.status.tolist()) == {int(status) for status in wanted}
    for name, values in expected._asdict().items():
        if name in ("status", "iterations"):
            assert np.array_equal(found[name], values), name
        else:
            np.testing.assert_allclose(found[name], values, rtol=1e-9, atol=1e-11, err_msg=name)
