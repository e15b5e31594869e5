"""What programs say: progress with the time left, tables for people and for programs, reports with their figures."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from tqdm import tqdm

import torchcmdp as tc
from torchcmdp.events import EVENTS, RunWriter

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def on_terminal() -> bool:
    """Whether somebody is looking on, who wants to see a progress bar."""
    return sys.stderr.isatty()


SILENCE = 10.0  # seconds between two lines of progress where there is no terminal


class _Lines:
    """What tqdm writes, as lines: for a log, in which nothing can be overwritten."""

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        sys.stderr.flush()


def bar(iterable: Iterable[Any] | None, name: str, **options: Any) -> tqdm[Any]:
    """The same things one after the other, with a progress bar on a terminal, and a line now and then where there is none."""
    how: dict[str, Any] = {"dynamic_ncols": True}
    if not on_terminal():
        form = "{desc}: {n_fmt} of {total_fmt}, {elapsed} gone, {remaining} left"
        how = {"file": _Lines(), "delay": SILENCE, "mininterval": SILENCE, "miniters": 1, "bar_format": form}
    return tqdm(iterable, desc=name, **how, **options)


def watch(shown: tqdm[Any], before: int, played: Callable[[], int]) -> Callable[[int], None]:
    """For `run(on_progress=...)`: move a bar over the episodes of several runs, `before` this one and in it."""

    def tell(new: int) -> None:
        now = before + played()
        if shown.n == shown.initial == 0:  # what came before the first episode, such as compiling, says nothing about the others
            shown.start_t = shown.last_print_t = time.time()
        if earlier := max(now - new - int(shown.n), 0):  # played in an earlier sitting, which took none of our time
            shown.initial, shown.n = shown.initial + earlier, shown.n + earlier
        shown.update(now - shown.n)

    return tell


def interrupted(when: str, fresh: bool) -> int:
    """Say that a program stopped early and how it goes on; returns the exit code."""
    command = "the same command without --fresh" if fresh else "the same command"
    print(f"Interrupted{when}; {command} continues from there.", file=sys.stderr)
    return 130


BOLD = "**"  # around a cell that is to stand out, as Markdown has it
_collected: list[dict[str, Any]] | None = None


def collect(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Keep a table for --json, where that was asked for."""
    if _collected is not None:
        names = [name or f"column {j + 1}" for j, name in enumerate(header)]
        found = [dict(zip(names, map(value_of, row), strict=True)) for row in rows]
        _collected.append({"title": title, "columns": names, "rows": found})


def forget_tables() -> None:
    """What was kept for --json belongs to an earlier state of a report that is written again."""
    if _collected is not None:
        _collected.clear()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """A Markdown table with aligned columns; with --json also what the command prints, where the title says which table it is."""
    collect(header, rows, title)
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[j]) for row in cells) for j in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def value_of(cell: str) -> Any:
    """What a cell says, for programs: a number where it is one, mean and half-width of an interval, a share of a percentage.

    Its digits are those that were printed.
    """
    number = r"(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)(%?)"
    found = re.fullmatch(rf"{number}(?: \+- {number})?", cell.strip(BOLD).strip())
    if not found:
        return None if cell.strip() in ("", "-") else cell.strip(BOLD)
    numbers = [
        float(text.replace(",", "")) / (100 if unit else 1) for text, unit in (found.groups()[:2], found.groups()[2:]) if text
    ]
    return numbers[0] if len(numbers) == 1 else {"mean": numbers[0], "ci95": numbers[1]}


@contextlib.contextmanager
def as_json(wanted: bool) -> Iterator[None]:
    """Print the tables of a command as one JSON object, and everything else that it prints on stderr."""
    global _collected
    if not wanted:
        yield
        return
    _collected = []
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        if _collected:  # where several processes share a job, one of them has tables
            print(json.dumps({"tables": _collected}, indent=2))
    finally:
        _collected = None


def plus_minus(mean: float, half: float, form: str = ",.1f") -> str:
    """A mean and the half-width of its interval; the mean alone where a single run has no interval."""
    return f"{mean:{form}}" if half != half else f"{mean:{form}} +- {half:{form}}"


def mean_and_half(values: Tensor) -> tuple[float, float]:
    """The mean over runs or instances, `(n,)`, and the half-width of its 95% interval, which is NaN where there is one."""
    mean, half = tc.mean_and_interval(values)
    return float(mean), float(half)


def with_interval(values: Tensor, form: str = ",.1f") -> str:
    """The mean over runs or instances, `(n,)`, and its 95% interval."""
    return plus_minus(*mean_and_half(values), form)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file with a row for each, whose columns are those of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def publish(path: Path, text: str, where: str = "", figures: Figure | Mapping[str, Figure] | None = None) -> None:
    """Write a report, with its figures beside it, and print it with a word on where all that belongs to it can be found.

    Args:
        path: Of the report.
        text: Markdown, in which what is bold is also bold on a terminal that can.
        where: What to print below it.
        figures: One, called like the report, or several by name; each as PNG and PDF.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    named = figures if isinstance(figures, Mapping) else {} if figures is None else {path.stem: figures}
    for name, figure in named.items():
        tc.plotting.save(path.parent / f"{name}.png", figure)
    print(f"{_for_terminal(text)}\n\n{where or f'Written to {path}'}")


def _for_terminal(text: str) -> str:
    """Bold where the terminal can, and stars nowhere; the columns of tables stay aligned."""
    on, off = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")

    def plain(line: str) -> str:
        room = " " * 2 * len(BOLD) if line.startswith("|") else ""
        return re.sub(r"\*\*(.+?)\*\*( *)", lambda match: f"{on}{match[1]}{off}{match[2]}{room}", line)

    return "\n".join(map(plain, text.split("\n")))


def writer_of(folder: Path) -> RunWriter:
    """TensorBoard events in place of those of an earlier call, which would show twice."""
    for old in folder.glob(EVENTS):
        old.unlink()
    return RunWriter(folder)
