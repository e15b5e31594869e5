"""TensorBoard events, with the same tags for every learner so that curves overlay."""

from __future__ import annotations

import io
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcmdp.files import append_to_file, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVENTS = "events.out.tfevents.*"

# Among what goes to TensorBoard alone: when the point was made, in seconds since 1970. It becomes no curve.
WALL_TIME = "wall_time"

# A row holds the 95% half-width of the mean `tag` under `tag + HALF_WIDTH`.
HALF_WIDTH = "/ci95"

# The ends of a band are tags of their own, gathered under a heading that sorts last, so as not to crowd out what people look at.
BAND = "~bands/{tag}/{end}"

# TensorBoard sorts headings, and what is below them, by their letters; and in the HParams tab it shows the metrics that come first
# in that order. These are to come first, and so they have numbers there.
HEADLINES = {
    "Regret/cumulative": "1 Results/1 regret",
    "Violation/cumulative": "1 Results/2 violation",
    "Violation/positive": "1 Results/3 positive violation",
    "Violation/unsafe_share": "1 Results/4 unsafe share",
}

# The charts of the Custom Scalars tab that come first, in this order; others with a band follow.
CHARTS = {
    "Regret/cumulative": "regret",
    "Violation/cumulative": "violation",
    "Violation/positive": "positive violation",
    "Metrics/EpRet": "reward an episode",
}


def shown(tag: str) -> str:
    """A tag as TensorBoard has it: "1 Results/1 regret" for the regret, and most others as they are, such as "Metrics/EpRet"."""
    return HEADLINES.get(tag, tag)


def band_tags(tag: str) -> tuple[str, str, str]:
    """The mean, the lower and the upper end of the 95% band of one metric, as TensorBoard has them."""
    return shown(tag), BAND.format(tag=tag, end="low"), BAND.format(tag=tag, end="high")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as one level, {"learner": {"eta": 0.1}} becoming {"learner.eta": 0.1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


class RunWriter:
    """Writes the event file of one run into its folder, created if need be: one TensorBoard sub-run.

    Nothing is written behind the caller's back: a full disk is met here, and after every point the file holds it. One made `anew`
    repeats what an older one holds, which a TensorBoard that is looking on must forget.
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

        # SummaryWriter.add_hparams would open a sub-run of its own, named after the clock. Without a list of columns, which would
        # be that of one run for all, TensorBoard makes it from all runs, and settings in which they differ come first.
        _, start, _ = hparams(_hyperparameters(config), {})
        self._event(summary=start)
        titles = {tag: title for tag, title in CHARTS.items() if tag in banded} | {tag: tag for tag in banded if tag not in CHARTS}
        charts: dict[str, dict[str, list[Any]]] = {"Mean and 95% band": {}}
        for tag, title in reversed(titles.items()):  # TensorBoard shows the last of a category first
            group = "Mean and 95% band" if tag in CHARTS else "More"
            charts.setdefault(group, {})[title] = ["Margin", list(band_tags(tag))]
        self._event(summary=custom_scalars(charts))
        self.texts({"Configuration": settings_table(config)})

    def texts(self, texts: Mapping[str, str]) -> None:
        """Put Markdown in the Text tab, by title."""
        from torch.utils.tensorboard.summary import text

        for title, words in texts.items():
            self._event(step=0, summary=text(title, words))

    def add(self, episode: int, row: Mapping[str, float]) -> None:
        """Take in one logging point: a scalar for each tag, and the ends of the band for each tag with a half-width."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars: dict[str, float] = {}
        for tag, value in row.items():
            if tag == WALL_TIME or tag.endswith(HALF_WIDTH):
                continue
            scalars[shown(tag)] = value
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
            write_file(self.path, content)
        elif content:
            append_to_file(self.path, content)
        self._new = False
        self._buffer.seek(0)
        self._buffer.truncate()

    def _event(self, *, wall_time: float | None = None, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time() if wall_time is None else wall_time, **content)
        self._records.write(event.SerializeToString())


def _hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The columns of the HParams tab: the learner's settings by their own names, and the plain numbers of the rest."""
    learner, rest = config.get("learner", {}), {key: value for key, value in config.items() if key != "learner"}
    numbers = {name: value for name, value in flatten(rest).items() if isinstance(value, int | float)}
    found = {name: value for name, value in (numbers | flatten(learner)).items() if value is not None}
    return {name: value if isinstance(value, bool | int | float | str) else json.dumps(value) for name, value in found.items()}


def settings_table(config: Mapping[str, Any]) -> str:
    """All settings as a Markdown table."""
    rows = [f"| {name} | `{json.dumps(value)}` |" for name, value in flatten(config).items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])
