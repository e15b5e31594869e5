"""What a checkpoint is asked before a run continues from it: keys, types, counts that agree, and nothing lost in loading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn

from torchcmdp.errors import InvalidInput
from torchcmdp.events import WALL_TIME
from torchcmdp.identity import digest
from torchcmdp.run.session import SPEED, Session

# In the file beside a session's own state; what it says was compared before.
BESIDE = ("format", "config", "standing", "attributes")


def enter(session: Session, state: Mapping[str, Any]) -> None:
    """Continue from a checkpoint whose counts were checked, or refuse it in one sentence.

    A component knows best what fits it, and raises what it likes; what it takes must then come out of it as it went in.
    """
    _check_types("the checkpoint", state, {name: part for name, part in session.state().items() if name not in ("axes", *BESIDE)})
    session.restore(state)
    _check_attributes(session, state["attributes"])
    if int(session.env.episode) != session.first_episode + session.played:
        raise InvalidInput(f"its simulator stands at episode {session.env.episode}, not {session.first_episode + session.played}.")
    tags = session.diagnostics.tags  # which only ever grow
    for row in session.rows:
        own = [name for name in row if name not in session.row_names()]
        if own != tags[: len(own)]:
            raise InvalidInput(f"a row of its logging points has the diagnostics {own}; expected the first of {tags}.")
    if [int(row["episode"]) for row in session.rows] != session.points:
        raise InvalidInput(f"its logging points are not those of {session.played} episodes with one in {session.log_every}.")
    for name, value in session.state().items():
        if name not in BESIDE and digest(value) != digest(state[name]):
            raise InvalidInput(f"what it holds for {name} is not what comes out when it is loaded.")


def _check_attributes(session: Session, kept: Mapping[str, Any]) -> None:
    """Refuse to continue where something that changed while it was played has not come back with the state."""
    now = session.changed_attributes()
    wrong = [f"{kind}.{name}" for kind, names in kept.items() for name in names if now.get(kind, {}).get(name) != names[name]]
    # of a finished run nothing is continued, and processes that share the runs know no attributes
    if wrong and session.crew.size == 1 and not session.completed:
        raise InvalidInput(f"{_named(wrong)} changed while it was played, and load_state_dict does not bring it back.")


def forgotten(session: Session) -> str:
    """What has changed since the run began and a module's own `state_dict` does not hold, as a clause; empty if nothing has."""
    learner = session.learner
    if not isinstance(learner, nn.Module) or type(learner).load_state_dict is not nn.Module.load_state_dict:
        return ""  # who writes it knows what to bring back, and is asked when a run is continued
    kind, held = type(learner).__name__, {key.partition(".")[0] for key in learner.state_dict()}
    missing = [f"{kind}.{name}" for name in session.changed_attributes().get(kind, {}) if name not in held]
    return f"{_named(missing)} changes and is not in the state_dict; register it as a buffer, or" if missing else ""


def _named(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_counts(session: Session, state: Mapping[str, Any]) -> None:
    """The parts of a state that are the session's own."""
    for name, least, most in (("played", 1, session.episodes), ("first_episode", 0, math.inf), ("first_update", 0, math.inf)):
        value = state.get(name)
        if type(value) is not int or not least <= value <= most:
            raise InvalidInput(f"its {name} is {_brief(value)}; expected a whole number from {least} to {most}.")
    if not isinstance(state.get("standing"), str):
        raise InvalidInput(f"its standing is {_brief(state.get('standing'))}; expected a text.")
    seconds = state.get("seconds")
    if type(seconds) is not float or not 0 <= seconds < math.inf:
        raise InvalidInput(f"its seconds are {_brief(seconds)}; expected a number that is not negative.")
    told = state.get("attributes")
    if not isinstance(told, Mapping) or not all(isinstance(names, Mapping) for names in told.values()):
        raise InvalidInput(f"its attributes are {_brief(told)}; expected their values by class and name.")
    rows, extras = state.get("rows"), state.get("extras")
    if not isinstance(rows, list) or not isinstance(extras, list) or len(rows) != len(extras):
        raise InvalidInput(f"its rows are {_brief(rows)} and its extras {_brief(extras)}; expected two lists of one length.")
    wanted = session.row_names()
    before: set[str] = set()
    for row, extra in zip(rows, extras, strict=True):
        _check_numbers("a row", row, wanted | before)
        _check_numbers("an extra", extra, {SPEED, WALL_TIME})
        before = set(row)


def _check_numbers(what: str, row: Any, wanted: set[str]) -> None:
    if not isinstance(row, dict) or not wanted <= set(row):
        missing = sorted(wanted - set(row)) if isinstance(row, dict) else wanted
        raise InvalidInput(f"{what} of its logging points is {_brief(row)}, without {', '.join(sorted(missing)[:3])}.")
    for name, value in row.items():
        if type(value) is not float or not isinstance(name, str):
            raise InvalidInput(f"{what} of its logging points has {_brief(value)} for {name}; expected a number.")


def _check_types(name: str, value: Any, fresh: Any) -> None:
    """Refuse what is of another kind than the same entry of a session that has just begun; there None may become anything."""
    if fresh is None:
        return
    kinds: tuple[Any, ...] = (Tensor, Mapping, Real, str, list | tuple)
    if not isinstance(value, next((kind for kind in kinds if isinstance(fresh, kind)), type(fresh))):
        raise InvalidInput(f"{name} is {_brief(value)}; expected a {type(fresh).__name__}.")
    for key in fresh if isinstance(fresh, Mapping) else ():
        if key not in value:
            raise InvalidInput(f"{name} has no {key}.")
        _check_types(f"{name}'s {key}", value[key], fresh[key])


def _brief(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, Real | str | None) else f"a {type(value).__name__}"
