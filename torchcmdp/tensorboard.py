"""The run folder: TensorBoard events, with the same tags for every learner so that curves overlay, checkpoint, settings, table."""

from __future__ import annotations

import csv
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchcmdp.errors import RunFolderError

FORMAT = 2
ADVICE = "take another folder (--name), or start over with fresh=True (--fresh)"
EVENTS = "events.out.tfevents.*"

# A row holds the 95% half-width of the mean `tag` under `tag + HALF_WIDTH`.
HALF_WIDTH = "/ci95"

# The ends of a band are tags of their own, gathered under a heading that sorts last, so as not to crowd out what people look at.
BAND = "~bands/{tag}/{end}"

HPARAM_METRICS = ("Regret/cumulative", "Violation/cumulative", "Violation/positive")


def band_tags(tag: str) -> tuple[str, str, str]:
    """The mean, the lower and the upper end of the 95% band of one metric."""
    return tag, BAND.format(tag=tag, end="low"), BAND.format(tag=tag, end="high")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as one level, {"learner": {"eta": 0.1}} becoming {"learner.eta": 0.1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


class RunWriter:
    """Writes the event file of one run.

    Args:
        folder: The run's folder: one TensorBoard sub-run.
        purge_step: When resuming, the first episode whose old events TensorBoard must forget.
    """

    def __init__(self, folder: str | os.PathLike[str], purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and needed only where a run has a folder

        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def describe(self, config: Mapping[str, Any], banded: Sequence[str]) -> None:
        """Put the settings in the HParams tab and one margin chart a metric in the Custom Scalars tab."""
        from torch.utils.tensorboard.summary import hparams

        experiment, start, _ = hparams(_hyperparameters(config), dict.fromkeys(HPARAM_METRICS, 0.0))
        # SummaryWriter.add_hparams would open a sub-run of its own, named after the clock
        self._file.add_summary(experiment)
        self._file.add_summary(start)
        charts: dict[str, dict[str, list[Any]]] = {}
        for tag in banded:
            group = tag.partition("/")[0]
            charts.setdefault(group, {})[f"{tag}, mean and 95% band"] = ["Margin", list(band_tags(tag))]
        self._writer.add_custom_scalars(charts)
        self.flush()

    def point(self, episode: int, row: Mapping[str, float]) -> None:
        """Write one logging point: a scalar for each tag, and the ends of the band for each tag with a half-width."""
        for tag, value in row.items():
            if tag.endswith(HALF_WIDTH):
                continue
            self._writer.add_scalar(tag, value, episode)
            half = row.get(tag + HALF_WIDTH)
            if half is not None:
                half = half if math.isfinite(half) else 0.0  # a single run has no band
                for name, end in zip(band_tags(tag)[1:], (value - half, value + half), strict=True):
                    self._writer.add_scalar(name, end, episode)

    def images(self, figures: Mapping[str, Figure], episode: int) -> None:
        """Put figures in the Images tab."""
        for name, figure in figures.items():
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            pixels = np.asarray(canvas.buffer_rgba())[..., :3].copy()
            self._writer.add_image(f"Figures/{name}", pixels, episode, dataformats="HWC")

    def finish(self) -> None:
        """Mark the run as successful in the HParams tab."""
        from torch.utils.tensorboard.summary import hparams

        self._file.add_summary(hparams({}, {})[2])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    @property
    def _file(self) -> Any:
        return self._writer._get_file_writer()


class RunFolder:
    """The folder of one run.

    Args:
        path: Where; created if need be.
        fresh: Forget what it holds.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path, self.fresh = path, fresh
        self._writer: RunWriter | None = None
        self._columns: list[str] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be used as a run folder: {error.strerror or error}.") from error

    def checkpoint(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state to continue from, None where there is none; one damaged or of other settings is refused. Writes nothing."""
        if self.fresh:
            return None
        state = _load(self.path / "checkpoint.pt")
        if state is not None:
            _compare(self.path, json.loads(state["config"]), config)
        elif (self.path / "config.json").exists():
            _compare(self.path, _read_json(self.path / "config.json"), config)
        return state

    def begin(
        self, config: Mapping[str, Any], rows: Sequence[Mapping[str, float]], banded: Sequence[str], *, purge_step: int | None
    ) -> None:
        """Bring the files to the state of a run with these logging points.

        Args:
            config: All settings.
            rows: The logging points so far; the table is cut back to them.
            banded: The tags with a 95% band.
            purge_step: When resuming, the first episode that TensorBoard must forget; None starts the files anew.
        """
        for name in ["metrics.csv"] if purge_step is not None else ["metrics.csv", "config.json", "checkpoint.pt", EVENTS]:
            for file in self.path.glob(name):
                file.unlink()
        _write(self.path / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        for row in rows:
            self._append_row(row)
        self._writer = RunWriter(self.path, purge_step)
        if purge_step is None:
            self._writer.describe(config, banded)

    def save(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Write a checkpoint."""
        _write(self.path / "checkpoint.pt", {"format": FORMAT, "config": json.dumps(config), **state})

    def append(self, row: Mapping[str, float], extra: Mapping[str, float]) -> None:
        """Write one logging point; `extra` goes to TensorBoard alone."""
        self._append_row(row)
        if self._writer is not None:
            scalars = {tag: value for tag, value in row.items() if tag != "episode"}
            self._writer.point(int(row["episode"]), {**scalars, **extra})

    def finish(self, figures: Mapping[str, Figure], episode: int) -> None:
        """Add the figures and mark the run as successful."""
        if self._writer is not None:
            self._writer.images(figures, episode)
            self._writer.finish()
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _append_row(self, row: Mapping[str, float]) -> None:
        first = not self._columns
        self._columns = self._columns or list(row)
        with open(self.path / "metrics.csv", "w" if first else "a", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if first:
                writer.writeheader()
            writer.writerow({**row, "episode": int(row["episode"])})


def _write(path: Path, content: bytes | Mapping[str, Any]) -> None:
    """Replace a file in one step: after a crash at any moment it holds the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path) -> dict[str, Any] | None:
    """A checkpoint's content, None where there is none."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not check the sums that it stores
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"{broken} has a wrong checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise ValueError(f"it has format {state['format']} and this version reads {FORMAT}")
        return dict(state)
    except Exception as error:  # whatever a damaged file makes zipfile, pickle or torch raise
        raise RunFolderError(f"the checkpoint {path} cannot be read ({brief(error)}); {ADVICE}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({brief(error)}); {ADVICE}.") from error


def _compare(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to mix two runs in one folder, naming the first setting in which they differ."""
    before, after = flatten(old), flatten(new)
    for name in [*after, *(name for name in before if name not in after)]:
        if json.dumps(before.get(name)) != json.dumps(after.get(name)):
            raise RunFolderError(
                f"{path} holds a run with {name} = {json.dumps(before.get(name))}, and this one has {json.dumps(after.get(name))}; "
                f"{ADVICE}."
            )


def brief(error: Exception) -> str:
    """The first line of an error, without its full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:200]


def _hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The columns of the HParams tab: the learner's settings by their own names, and the plain numbers of the rest."""
    learner, rest = config.get("learner", {}), {key: value for key, value in config.items() if key != "learner"}
    numbers = {name: value for name, value in flatten(rest).items() if isinstance(value, int | float)}
    return {name: _hparam(value) for name, value in (numbers | flatten(learner)).items() if value is not None}


def _hparam(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)
