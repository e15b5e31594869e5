"""What programs share: options and what is wrong with them in one sentence, names, one thread, the output folder; with `output`."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import itertools
import json
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
import tyro

import torchcmdp as tc
from torchcmdp.folder import RunFolder
from torchcmdp.learners import LEARNERS, UOBREPS, WCOPS, Guarded, Learner

# what programs say comes from here as well, so that they know of one place
from .output import bar, collect, forget_tables, interrupted, mean_and_half, on_terminal, plus_minus  # noqa: F401  # isort: skip
from .output import publish, table, watch, with_interval, write_table, writer_of  # noqa: F401  # isort: skip

Options = TypeVar("Options")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Bound(NamedTuple):
    """What the numbers of an option must keep, said in its type."""

    holds: Callable[[float], bool]
    words: str


@dataclasses.dataclass(frozen=True, eq=False)
class Among:
    """The names that an option takes, said in its type."""

    names: Iterable[str]


POSITIVE = Bound(lambda value: value > 0, "it must be greater than zero")
NOT_NEGATIVE = Bound(lambda value: value >= 0, "it must not be negative")
Count, Positive = Annotated[int, POSITIVE], Annotated[float, POSITIVE]
Share = Annotated[float, Bound(lambda value: 0 < value <= 1, "it must be greater than zero and at most 1")]
Whole, NotNegative = Annotated[int, NOT_NEGATIVE], Annotated[float, NOT_NEGATIVE]
MAY_BE_EMPTY = "may be empty"  # in the type of an option with several values; others need one at least


def at_least(least: int, what: str) -> Bound:
    """The bound of a number of which something needs so many, such as an interval."""
    return Bound(lambda value: value >= least, f"{what} needs at least {least}")


IN_A_CLONE = "python -m train"
_called = IN_A_CLONE
SHARED_HELP = """A command that prints tables takes --json: they are one JSON object on standard output, the rest on standard error.
Shell completion: `python -m train completion` prints a script for bash or zsh and where to put it."""


def spoken(text: str) -> str:
    """A text about commands, as whoever reads it calls them: `python -m train` in a clone, `torchcmdp` where that was typed."""
    return text.replace(IN_A_CLONE, _called)


def look_at(folder: str | Path) -> str:
    """The command that shows a folder of runs in a browser."""
    return f"TensorBoard: {spoken(IN_A_CLONE)} tensorboard --logdir {folder}"


@contextlib.contextmanager
def called(name: str) -> Iterator[None]:
    """Speak of the commands by this name."""
    global _called
    before, _called = _called, name
    try:
        yield
    finally:
        _called = before


def begin(
    options: type[Options], arguments: Sequence[str], command: str, quick: Mapping[str, Any] | None = None
) -> tuple[Options, Path]:
    """The options of a command and the folder that it writes to, which is not made yet; with --quick, those for a minute."""
    found: Any = parse(options, arguments, prog=f"python -m train {command}")
    folder = experiment_folder(found.logdir, found.name)
    if quick is not None and found.quick:
        return dataclasses.replace(found, **quick), folder.with_name(f"{folder.name}-quick")
    return found, folder


def parse(options: type[Options], arguments: Sequence[str], *, prog: str) -> Options:
    """Read a dataclass of options from the command line; `InvalidInput` has one sentence for anything that cannot be read."""
    complaint, prog = io.StringIO(), spoken(prog)
    try:
        with contextlib.redirect_stderr(complaint):
            found, unknown = tyro.cli(
                options,
                prog=prog,
                # whole: of its own accord tyro leaves out the section of examples
                description=spoken(f"{inspect.getdoc(options)}\n\n{SHARED_HELP}"),
                args=list(arguments),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        _complain(options, arguments, complaint.getvalue(), prog)
    if unknown:
        _complain_unknown(options, unknown[0], prog)
    _check_numbers(found, typed(arguments))
    return found


def typed(arguments: Sequence[str]) -> set[str]:
    """The names of the options that somebody typed, whether or not with the values that they have anyway."""
    return {token.partition("=")[0][2:].replace("-", "_") for token in arguments if token.startswith("--")}


def changed(options: Any) -> dict[str, Any]:
    """By name the options that are not at their defaults."""
    values = {field.name: (getattr(options, field.name), field.default) for field in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}


def retyped(options: Any, *without: str) -> str:
    """The options that are not at their defaults as one types them, but for some."""
    words = []
    for name, value in changed(options).items():
        if name not in without:
            values = () if value is True else value if isinstance(value, tuple) else (value,)
            words += [spelled(name), *map(str, values)]
    return "".join(f" {word}" for word in words)


def _check_numbers(found: Any, given: set[str]) -> None:
    """What holds for the options of every command: numbers are finite and within bounds, lists that were given hold something."""
    types = typing.get_type_hints(type(found), include_extras=True)
    for field in dataclasses.fields(found):
        value, option, kind = getattr(found, field.name), spelled(field.name), types[field.name]
        if value == () and field.name in given and MAY_BE_EMPTY not in getattr(kind, "__metadata__", ()):
            raise tc.InvalidInput(f"{option} got no value; expected {_expected(typing.get_type_hints(type(found))[field.name])}.")
        for mark in getattr(kind, "__metadata__", ()):
            for name in value if isinstance(mark, Among) else ():
                choose(name, mark.names, f"one of {option}")
        bound = _bound(kind)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise tc.InvalidInput(f"{option} is {number}; it must be a finite number.")
            if bound and number is not None and not bound.holds(number):
                raise tc.InvalidInput(f"{option} is {number:g}; {bound.words}.")
    seed = getattr(found, "seed", 0)
    if not 0 <= seed < 2**32:
        raise tc.InvalidInput(f"--seed is {seed}; it must be a whole number with 0 <= seed < 2**32.")
    delta = getattr(found, "delta", 0.5)
    if not 0 < delta < 1:
        raise tc.InvalidInput(f"--delta is {delta}; it must lie strictly between 0 and 1.")


def _bound(kind: Any) -> Bound | None:
    """What the type of an option says about its numbers, `tuple[Count, ...]` as well as `Count | None`."""
    own = next((mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, Bound)), None)
    return own or next(filter(None, map(_bound, typing.get_args(kind))), None)


def check_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise tc.InvalidInput(f"--device {name} cannot be used here: PyTorch finds no such device; try --device cpu.") from error
    if device.type == "meta":
        raise tc.InvalidInput("--device meta holds no numbers; try --device cpu.")
    return device


def experiment_folder(logdir: str, name: str) -> Path:
    """<logdir>/<name>, where the name is one plain folder."""
    if not name or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise tc.InvalidInput(f"--name {name!r} must be one plain folder name inside {logdir}, without slashes.")
    folder = Path(logdir) / name
    ancestor = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise tc.InvalidInput(f"{folder} cannot be written to, because {ancestor} is not a folder in which you may write.")
    return folder


def _complain_unknown(options: type, token: str, prog: str) -> NoReturn:
    if not token.startswith("-"):
        raise tc.InvalidInput(f"{token!r} is not an option of {prog}; see {prog} --help.")
    given = token.partition("=")[0]
    near = difflib.get_close_matches(given, [spelled(f.name) for f in dataclasses.fields(options)], n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else f"see {prog} --help."
    raise tc.InvalidInput(f"{given} is not an option of {prog}; {hint}")


def _complain(options: type, arguments: Sequence[str], message: str, prog: str) -> NoReturn:
    """Turn tyro's framed paragraphs into one sentence about the option they name."""
    complaint = message.partition("Argument helptext")[0]  # in which other options may be named
    text = " ".join(re.sub(r"[^\x20-\x7e\n]", " ", complaint).split())
    types = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        option = spelled(field.name)
        if re.search(rf"{re.escape(option)}(?![\w-])", text):
            raise tc.InvalidInput(f"{option} got {_given(arguments, option)}; expected {_expected(types[field.name])}.")
    raise tc.InvalidInput(f"{text[:200].rstrip('. ')}; see {prog} --help.")


def _given(arguments: Sequence[str], option: str) -> str:
    """The values that followed an option, in words."""
    tokens = [part for token in arguments for part in (token.split("=", 1) if token.startswith("--") else [token])]
    last = max((j for j, token in enumerate(tokens) if token == option), default=len(tokens))
    values = list(itertools.takewhile(lambda value: not value.startswith("--"), tokens[last + 1 :]))
    return repr(" ".join(values)) if values else "no value"


def _expected(kind: Any) -> str:
    """What an option of this type takes, in words."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(kind) is tuple:
        return {int: "whole numbers", float: "numbers"}.get(arguments[0], "values") + " separated by spaces"
    if type(None) in arguments:
        return _expected(next(a for a in arguments if a is not type(None)))
    return {int: "a whole number", float: "a number", bool: "no value, since it is a switch"}.get(kind, "a value")


def spelled(name: str) -> str:
    """The option of that name as one types it."""
    return "--" + name.replace("_", "-")


def choose(name: str, names: Iterable[str], what: str) -> None:
    """Refuse a name that is none of these, and say which of them is nearest."""
    if name not in (known := list(names)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}."
        raise tc.InvalidInput(f"{name!r} is not {what}; {hint}")


def hand_over(package: str, commands: Mapping[str, str], name: str, arguments: Sequence[str], what: str) -> int:
    """Run the command of that name, a module of the package; returns the exit code, which is 0 where its `main` names none."""
    choose(name, commands, spoken(what))
    module = importlib.import_module(f"{package}.{name}")
    try:
        return module.main(arguments) or 0
    except tc.InvalidInput as error:
        raise tc.InvalidInput(in_options(str(error), getattr(module, "Options", None))) from error


def hand_to_part(package: str, parts: Mapping[str, str], usual: str, arguments: Sequence[str]) -> int:
    """Run the part of a command that is named first, or the usual one; returns the exit code."""
    named = bool(arguments) and not arguments[0].startswith("-")
    name, rest = (arguments[0], arguments[1:]) if named else (usual, arguments)
    return hand_over(package, parts, name, rest, f"a part of {IN_A_CLONE} {package.rpartition('.')[2]}")


def listing(usage: str, commands: Mapping[str, str]) -> str:
    """How commands are called, and a line for each of them."""
    return "\n".join([f"usage: {spoken(usage)}\n", *(f"  {name:<12}{purpose}" for name, purpose in commands.items())])


def settings_of(learner: str) -> set[str]:
    """The names of the settings that a learner takes on the command line, where --solver names solvers of the projection."""
    kind = LEARNERS[learner]
    names = set(inspect.signature(kind).parameters)
    if issubclass(kind, UOBREPS):  # its class takes what WC-OPS takes, but it does not look at costs
        names -= {"bonus_scale", "threshold_scale", "cap_scale", "violation_threshold"}
    return names if issubclass(kind, WCOPS) else names - {"solver"}


LEAST_MARGIN = 1e-6  # of a policy that can be a baseline


def guarded(key: str) -> bool:
    """Whether the learner of that name is given a baseline."""
    return issubclass(LEARNERS.get(key, Learner), Guarded)


def has_margin(cmdp: tc.LayeredCMDP) -> bool:
    """Whether some policy can be a baseline, in every CMDP of a batch."""
    return bool((tc.slater_gap(cmdp) > LEAST_MARGIN).all())


def protection(key: str, cmdp: tc.LayeredCMDP, share: float, **luck: Any) -> dict[str, Any]:
    """What a learner that is safe from the first episode is given: a baseline with a share of the Slater gap, and whose coins.

    `luck` is the `seed`, `first_run` and `distinct_runs` of the simulator; the CMDP is one for all runs or one a run.
    """
    if not guarded(key):
        return {}
    gap = tc.slater_gap(cmdp)
    return {"baseline": tc.baseline(cmdp, None if gap.isinf().all() else share * gap), **luck}


def told(key: str, cmdp: tc.LayeredCMDP, share: float, **luck: Any) -> dict[str, Any]:
    """All that the learner of that name cannot do without; the arguments are those of `protection`."""
    gap = {"slater_gap": tc.slater_gap(cmdp)} if key == "opt-primal-dual" else {}
    return {**gap, **protection(key, cmdp, share, **luck)}


def check_settings(learner: str, typed: set[str], names: Sequence[str], taken: set[str] | None = None) -> None:
    """Refuse settings, of these names, that a learner does not have; `taken` are those it has where that is not by its class."""
    taken = settings_of(learner) if taken is None else taken
    for name in names:
        if name in typed and name not in taken:
            own = ", ".join(spelled(other) for other in names if other in taken) or "none of these settings"
            raise tc.InvalidInput(f"{spelled(name)} is not a setting of {learner}, which takes {own}.")
    if "baseline_share" in typed and not guarded(learner):
        raise tc.InvalidInput(f"--baseline-share belongs to s-ops, ma-ops and dope, and --learner is {learner}.")


def in_options(sentence: str, options: type | None) -> str:
    """A sentence of the library about an argument, said of the option that it came from."""
    names = [field.name for field in dataclasses.fields(options)] if options is not None else []
    verb = r"(?= (?:\(|(?:is|are|has|have|contains?|must|needs?|sums?)\b))"
    return re.sub(rf"^({'|'.join(names)}){verb}", lambda match: spelled(match[0]), sentence) if names else sentence


# Peak memory of WC-OPS, measured: so many float64 tensors of every transition, and as many of every pair for m + 2 things.
COPIES = 12


def bytes_per_run(layout: tc.Layout, constraints: int, points: int) -> int:
    """What one run of WC-OPS takes at its peak, about: its tensors, those of the projection, and its curves."""
    transitions, pairs = layout.transition_mask().numel(), layout.pair_mask().numel()
    return 8 * (COPIES * transitions + COPIES * (constraints + 2) * pairs + points * (4 + 3 * constraints))


def play_split(
    make: Callable[[int, int], tuple[Learner, tc.Simulator]], runs: int, episodes: int, folder: Path, shown: Any, **options: Any
) -> tc.RunResult:
    """`run_split` that moves a bar over the episodes of several runs, from where it stands; `shown` is None where there is none."""
    made: list[tuple[Learner, tc.Simulator]] = []

    def remembered(count: int, first: int) -> tuple[Learner, tc.Simulator]:
        made[:] = [make(count, first)]
        return made[0]

    tell = None if shown is None else watch(shown, int(shown.n), lambda: made[0][1].episode if made else 0)
    return tc.run_split(remembered, runs, episodes, folder, progress=False, images=False, on_progress=tell, **options)


def claim(folder: Path, settings: Mapping[str, Any], fresh: bool) -> None:
    """Refuse a folder that holds something with other settings, and note these."""
    noted = json.loads(json.dumps(settings))
    RunFolder(folder, fresh).checkpoint(noted)
    (folder / "config.json").write_text(json.dumps(noted, indent=2) + "\n")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread, unless OMP_NUM_THREADS is set: the tensors of an episode are too small to share among threads.

    Two torch threads on a busy machine can be 20 times slower than one; the compiled kernels have threads of their own.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
