"""The run folder: one process at a time, a checkpoint that is always whole, the settings, the table, the TensorBoard events."""

from __future__ import annotations

import csv
import io
import json
import os
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcmdp.errors import RunFolderError
from torchcmdp.events import EVENTS, RunWriter, flatten
from torchcmdp.files import append_to_file, disk, write_file
from torchcmdp.identity import digest, untold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, float]  # a logging point
FORMAT = 6
CURVES_FILE = "curves.npz"
ADVICE = "take another folder (--name), or start over with fresh=True (--fresh)"


class RunFolder:
    """The folder of one run, created if need be; `fresh` forgets what it holds. Only one process may use it at a time.

    Whatever a process that dies leaves behind, the checkpoint is whole: `begin` makes the other files again from what it holds.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path, self.fresh = path, fresh
        self._writer: RunWriter | None = None
        self._columns: list[str] = []
        self._resuming = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.close = _lock(self)  # leaves the folder to others
        except OSError as error:
            raise RunFolderError(f"{path} cannot be used as a run folder: {error.strerror or error}.") from error

    def checkpoint(self, config: Mapping[str, Any], lacking: str = "") -> dict[str, Any] | None:
        """The state to continue from, None where there is none; one damaged or of other settings is refused. Writes nothing.

        Where such a run is `lacking` what it would need to be continued, one that is not finished is refused as well.
        """
        if self.fresh:
            return None
        state, begun = _load(self.path / "checkpoint.pt"), (self.path / "config.json").exists()
        if state is not None and not _same(config, state.get("standing", "")):
            _compare(self.path, json.loads(state["config"]), config)
        elif state is None and begun:
            _compare(self.path, _read_json(self.path / "config.json"), config)
        if lacking and (begun if state is None else state.get("played") != config["episodes"]):
            raise RunFolderError(
                f"{self.path} holds a run that was interrupted and cannot be continued, since {lacking}; {ADVICE}."
            )
        self._resuming = state is not None
        return state

    def begin(self, config: Mapping[str, Any], rows: Sequence[Row], banded: Sequence[str], extras: Sequence[Row] = ()) -> None:
        """Bring the files to the state of a run with these logging points, of which `extras` are for TensorBoard alone.

        The `banded` tags have a 95% band.
        """
        write_file(self.path / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        old = {file for name in (".*.tmp", EVENTS) for file in self.path.glob(name)}
        old |= set() if self._resuming else {self.path / "checkpoint.pt", self.path / CURVES_FILE}
        old |= set() if rows else {self.path / "metrics.csv"}
        self._writer = RunWriter(self.path, anew=self._resuming)
        self._writer.describe(config, banded)
        for row, extra in zip(rows, extras or [{}] * len(rows), strict=True):
            self._writer.add(int(row["episode"]), _scalars(row, extra))
        self._writer.flush()
        if rows:
            self._columns = list(rows[0])
            write_file(self.path / "metrics.csv", _table(self._columns, rows, head=True))
        with disk(self.path):
            for file in sorted(old - {self._writer.path}):  # the checkpoint goes first: without it the others mean nothing
                file.unlink(missing_ok=True)

    def save(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Write a checkpoint; until it is safe on the disk the previous one stays."""
        content = io.BytesIO()
        whole = {"format": FORMAT, "config": json.dumps(config), **state}
        torch.save({**whole, "checksum": digest(whole)}, content)
        write_file(self.path / "checkpoint.pt", content.getbuffer())

    def keep(self, curves: bytes | memoryview) -> None:
        """Write what was measured in every run."""
        write_file(self.path / CURVES_FILE, curves)

    def append(self, row: Row, extra: Row) -> None:
        """Write one logging point; `extra` goes to TensorBoard alone."""
        self.append_row(row)
        if self._writer is not None:
            self._writer.point(int(row["episode"]), _scalars(row, extra))

    def append_row(self, row: Row) -> None:
        """Write one row of `metrics.csv` and nothing to TensorBoard."""
        new, self._columns = not self._columns, self._columns or list(row)
        append_to_file(self.path / "metrics.csv", _table(self._columns, [row], head=new))

    def finish(self, figures: Mapping[str, Figure], episode: int) -> None:
        """Add the figures and mark the run as successful."""
        if self._writer is not None:
            self._writer.images(figures, episode)
            self._writer.finish()
            self._writer.flush()


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


def _scalars(row: Row, extra: Row) -> dict[str, float]:
    return {**{tag: value for tag, value in row.items() if tag != "episode"}, **extra}


def _table(columns: Sequence[str], rows: Sequence[Row], *, head: bool) -> bytes:
    """Lines of `metrics.csv`."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    if head:
        writer.writeheader()
    writer.writerows({**row, "episode": int(row["episode"])} for row in rows)
    return text.getvalue().encode()


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
        if state.pop("checksum") != digest(state):
            raise ValueError("its content is not what was saved: the checksum differs")
        if not all(isinstance(json.loads(text), dict) for text in (state["config"], state.get("standing") or "{}")):
            raise ValueError("its settings are of another type")
        return dict(state)
    except Exception as error:  # whatever a damaged file makes zipfile, pickle, torch or json raise
        raise RunFolderError(f"the checkpoint {path} cannot be read ({first_line(error)}); {ADVICE}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({first_line(error)}); {ADVICE}.") from error


def _same(config: Mapping[str, Any], standing: str) -> bool:
    """Whether these are the settings of the objects that were interrupted, as they were then: the same ones, still in memory."""
    return bool(standing) and not any(untold(config)) and json.loads(standing) == json.loads(json.dumps(config))


def _compare(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to mix two runs in one folder, naming the first setting in which they differ."""
    for name, kind in untold(new):
        raise RunFolderError(
            f"{path} holds a run, and whether it is this one cannot be told, since {name} is {kind}; write a method config() that "
            f"returns what defines its owner, or {ADVICE}."
        )
    before, after = flatten(old), flatten(new)
    for name in [*after, *(name for name in before if name not in after)]:
        if json.dumps(before.get(name)) != json.dumps(after.get(name)):
            raise RunFolderError(
                f"{path} holds a run with {name} = {json.dumps(before.get(name))}, and this one has {json.dumps(after.get(name))}; "
                f"{ADVICE}."
            )


def first_line(error: Exception) -> str:
    """The first line of an error, without its full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:200]
