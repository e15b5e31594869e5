"""The run folder: TensorBoard events, with the same tags for every learner so that curves overlay, checkpoint, settings, table."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import time
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchcmdp.errors import RunFolderError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 3
ADVICE = "take another folder (--name), or start over with fresh=True (--fresh)"
EVENTS = "events.out.tfevents.*"

# Among what goes to TensorBoard alone: when the point was made, in seconds since 1970. It becomes no curve.
WALL_TIME = "wall_time"

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

    Nothing is written behind the caller's back: a full disk is met here, and after every point the file holds it.

    Args:
        folder: The run's folder, created if need be: one TensorBoard sub-run.
        anew: The file repeats what an older one holds, which a TensorBoard that is looking on must forget.
    """

    def __init__(self, folder: str | os.PathLike[str], anew: bool = False) -> None:
        from torch.utils.tensorboard import RecordWriter  # slow to import, and needed only where a run has a folder

        stamp = f"{int(time.time()):010d}.{platform.node() or 'host'}.{os.getpid()}"
        self.path = Path(folder) / EVENTS.replace("*", stamp)
        self._new, self._buffer = True, io.BytesIO()
        self._records = RecordWriter(self._buffer)
        self._event(file_version="brain.Event:2")
        if anew:
            from tensorboard.compat.proto.event_pb2 import SessionLog

            self._event(step=0, session_log=SessionLog(status=SessionLog.START))

    def describe(self, config: Mapping[str, Any], banded: Sequence[str]) -> None:
        """Put the settings in the HParams tab and one margin chart a metric in the Custom Scalars tab."""
        from torch.utils.tensorboard.summary import custom_scalars, hparams

        experiment, start, _ = hparams(_hyperparameters(config), dict.fromkeys(HPARAM_METRICS, 0.0))
        # SummaryWriter.add_hparams would open a sub-run of its own, named after the clock
        self._event(summary=experiment)
        self._event(summary=start)
        charts: dict[str, dict[str, list[Any]]] = {}
        for tag in banded:
            group = tag.partition("/")[0]
            charts.setdefault(group, {})[f"{tag}, mean and 95% band"] = ["Margin", list(band_tags(tag))]
        self._event(summary=custom_scalars(charts))

    def add(self, episode: int, row: Mapping[str, float]) -> None:
        """Take in one logging point: a scalar for each tag, and the ends of the band for each tag with a half-width."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars: dict[str, float] = {}
        for tag, value in row.items():
            if tag == WALL_TIME or tag.endswith(HALF_WIDTH):
                continue
            scalars[tag] = value
            half = row.get(tag + HALF_WIDTH)
            if half is not None:
                half = half if math.isfinite(half) else 0.0  # a single run has no band
                scalars.update(zip(band_tags(tag)[1:], (value - half, value + half), strict=True))
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._event(step=episode, summary=Summary(value=values), wall_time=row.get(WALL_TIME))

    def point(self, episode: int, row: Mapping[str, float]) -> None:
        """Write one logging point."""
        self.add(episode, row)
        self.flush()

    def images(self, figures: Mapping[str, Figure], episode: int) -> None:
        """Put figures in the Images tab."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from torch.utils.tensorboard.summary import image

        for name, figure in figures.items():
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            pixels = np.asarray(canvas.buffer_rgba())[..., :3].copy()
            self._event(step=episode, summary=image(f"Figures/{name}", pixels, dataformats="HWC"))

    def finish(self) -> None:
        """Mark the run as successful in the HParams tab."""
        from torch.utils.tensorboard.summary import hparams

        self._event(summary=hparams({}, {})[2])

    def flush(self) -> None:
        """Write what was taken in; the first time in one step, so that a reader sees all of it or nothing."""
        content = self._buffer.getvalue()
        if self._new:
            with _disk(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, content)
        elif content:
            append_to_file(self.path, content)
        self._new = False
        self._buffer.seek(0)
        self._buffer.truncate()

    def close(self) -> None:
        self.flush()

    def _event(self, *, wall_time: float | None = None, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time() if wall_time is None else wall_time, **content)
        self._records.write(event.SerializeToString())


class RunFolder:
    """The folder of one run. Only one process may use it at a time.

    Whatever a process that dies leaves behind, the checkpoint is whole: `begin` makes the other files again from what it holds.

    Args:
        path: Where; created if need be.
        fresh: Forget what it holds.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path, self.fresh = path, fresh
        self._writer: RunWriter | None = None
        self._columns: list[str] = []
        self._resuming = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._release = _lock(self)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be used as a run folder: {error.strerror or error}.") from error

    def checkpoint(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state to continue from, None where there is none; one damaged or of other settings is refused. Writes nothing."""
        if self.fresh:
            return None
        try:
            state = _load(self.path / "checkpoint.pt")
            if state is not None:
                _compare(self.path, json.loads(state["config"]), config)
            elif (self.path / "config.json").exists():
                _compare(self.path, _read_json(self.path / "config.json"), config)
        except BaseException:
            self.close()
            raise
        self._resuming = state is not None
        return state

    def begin(
        self,
        config: Mapping[str, Any],
        rows: Sequence[Mapping[str, float]],
        banded: Sequence[str],
        extras: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """Bring the files to the state of a run with these logging points.

        Args:
            config: All settings.
            rows: The logging points so far.
            banded: The tags with a 95% band.
            extras: Of each of the points, what goes to TensorBoard alone.
        """
        write_file(self.path / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        old = {file for name in (".*.tmp", EVENTS) for file in self.path.glob(name)}
        old |= set() if self._resuming else {self.path / "checkpoint.pt"}
        old |= set() if rows else {self.path / "metrics.csv"}
        self._writer = RunWriter(self.path, anew=self._resuming)
        self._writer.describe(config, banded)
        for row, extra in zip(rows, extras or [{}] * len(rows), strict=True):
            self._writer.add(int(row["episode"]), _scalars(row, extra))
        self._writer.flush()
        if rows:
            self._columns = list(rows[0])
            table = _header(self._columns) + "".join(_line(self._columns, row) for row in rows)
            write_file(self.path / "metrics.csv", table.encode())
        with _disk(self.path):
            for file in sorted(old - {self._writer.path}):  # the checkpoint goes first: without it the others mean nothing
                file.unlink(missing_ok=True)

    def save(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Write a checkpoint; until it is safe on the disk the previous one stays."""
        content = io.BytesIO()
        torch.save({"format": FORMAT, "config": json.dumps(config), **state}, content)
        write_file(self.path / "checkpoint.pt", content.getbuffer())

    def append(self, row: Mapping[str, float], extra: Mapping[str, float]) -> None:
        """Write one logging point; `extra` goes to TensorBoard alone."""
        self.append_row(row)
        if self._writer is not None:
            self._writer.point(int(row["episode"]), _scalars(row, extra))

    def append_row(self, row: Mapping[str, float]) -> None:
        """Write one row of `metrics.csv` and nothing to TensorBoard."""
        head = "" if self._columns else _header(list(row))
        self._columns = self._columns or list(row)
        append_to_file(self.path / "metrics.csv", (head + _line(self._columns, row)).encode())

    def finish(self, figures: Mapping[str, Figure], episode: int) -> None:
        """Add the figures and mark the run as successful."""
        if self._writer is not None:
            self._writer.images(figures, episode)
            self._writer.finish()
            self._writer.flush()

    def close(self) -> None:
        """Leave the folder to others."""
        self._release()


def _lock(folder: RunFolder) -> Callable[[], Any]:
    """Refuse a folder that another process is using; the lock ends with its process, however that ends, or with a call."""
    try:
        import fcntl
    except ImportError:  # Windows
        return lambda: None
    descriptor = os.open(folder.path, os.O_RDONLY)
    release = weakref.finalize(folder, os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        release()
        raise RunFolderError(
            f"{folder.path} is in use by another process; wait until it ends, or take another folder (--name)."
        ) from None
    except OSError:  # a file system without locks
        pass
    return release


def _scalars(row: Mapping[str, float], extra: Mapping[str, float]) -> dict[str, float]:
    return {**{tag: value for tag, value in row.items() if tag != "episode"}, **extra}


def _header(columns: Sequence[str]) -> str:
    return _line(columns, dict(zip(columns, columns, strict=True)))


def _line(columns: Sequence[str], row: Mapping[str, Any]) -> str:
    """One line of the table."""
    text = io.StringIO(newline="")
    values = {tag: int(value) if isinstance(value, float) and tag == "episode" else value for tag, value in row.items()}
    csv.DictWriter(text, columns, extrasaction="ignore").writerow(values)
    return text.getvalue()


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Say in one sentence what a disk that is full or read-only says in a traceback."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written ({error.strerror or error}); what was saved before is untouched: make room or give "
            "access, and the same command continues from the last checkpoint."
        ) from error


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Replace a file in one step: after a crash at any moment it holds the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name.replace('tfevents', 'events')}.tmp")  # TensorBoard reads whatever is called tfevents
    with _disk(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)


def append_to_file(path: Path, content: bytes) -> None:
    """Add to the end of a file."""
    with _disk(path), open(path, "ab") as file:
        file.write(content)


def _sync_folder(path: Path) -> None:
    """Let the new name of a file survive a power failure, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
