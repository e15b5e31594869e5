"""Run by `test_kernels_cuda.py` in numba's CUDA simulator: project the instances of a file, and keep what comes out."""

from __future__ import annotations

import sys

import numpy as np
import torch

from torchcmdp.kernels import cuda
from torchcmdp.kernels.projection import Limits
from torchcmdp.layout import Layout

if __name__ == "__main__":
    given = np.load(sys.argv[1])
    assert cuda.usable()
    layout = Layout(tuple(given["widths"].tolist()), int(given["actions"]))
    tensors = [torch.from_numpy(given[name]) for name in ("target", "lower", "upper", "costs")]
    found = cuda.project_batch(layout, *tensors, Limits(200.0, 1e-11, int(given["most"])))
    np.savez(sys.argv[2], **{name: tensor.numpy() for name, tensor in found._asdict().items()})
