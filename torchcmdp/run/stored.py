"""A result in one file of the run folder, and back, without the learner and the simulator that it came from."""

from __future__ import annotations

import io
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchcmdp.errors import RunFolderError, check_folder
from torchcmdp.folder import CURVES_FILE, first_line
from torchcmdp.run.result import RunResult

PLAIN = ("config", "completed", "seconds")
BY_TAG = ("bounds", "diagnostics", "counts", "units")
TENSORS = tuple(field.name for field in fields(RunResult) if field.name not in (*PLAIN, *BY_TAG))


def pack(result: RunResult) -> memoryview:
    """A compressed archive of NumPy arrays, by the names of the attributes: "regret", ..., "counts/Solver/elastic", ..."""
    arrays = {name: getattr(result, name) for name in TENSORS}
    arrays |= {f"{kind}/{tag}": value for kind in BY_TAG for tag, value in getattr(result, kind).items()}
    about = json.dumps({name: getattr(result, name) for name in PLAIN})
    content = io.BytesIO()
    np.savez_compressed(content, about=np.array(about), **{name: value.detach().cpu().numpy() for name, value in arrays.items()})
    return content.getbuffer()


def load(folder: str | os.PathLike[str]) -> RunResult:
    """What a run measured, finished or interrupted, as of its last checkpoint, from its folder alone.

    Args:
        folder: The `logdir` of a run.
    """
    check_folder("folder", folder)
    path = Path(folder) / CURVES_FILE
    if not path.exists():
        raise RunFolderError(
            f"{folder} holds no run that has come to a checkpoint after a logging point: there is no {CURVES_FILE}."
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        about: dict[str, Any] = json.loads(str(arrays.pop("about")))
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        by_tag = {kind: {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(f"{kind}/")} for kind in BY_TAG}
        found: dict[str, Any] = {name: tensors[name] for name in TENSORS} | {name: about[name] for name in PLAIN} | by_tag
        return RunResult(**found)
    except Exception as error:  # whatever a damaged file makes zipfile, numpy or json raise
        raise RunFolderError(f"{path} cannot be read ({first_line(error)}); run the same command again to make it anew.") from error
