"""Checkpoints whose content was changed: each gets one sentence, and stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hedge import Hedge, Killed, kill
from torch import Tensor

import torchcmdp as tc
from torchcmdp.folder import _load
from torchcmdp.identity import digest
from torchcmdp.run import run

CMDP = tc.random_cmdp((1, 2, 1), 2, 1, seed=0)
RUNS, EPISODES, LOG_EVERY, STOP = 3, 5, 3, 5
GONE = object()


def objects(kind: str, at: int = 0) -> tuple[Any, tc.Simulator]:
    if kind == "adversarial":
        rewards: tc.Process = tc.Recorder(tc.OGDAdversary(CMDP.rewards, sign=-1, step=0.3), 4)
        costs: tc.Process = tc.Switching([CMDP.costs, -CMDP.costs], [3])
        learner: Any = Hedge(CMDP.layout, at=at, action=kill)
    else:
        rewards, costs = tc.Bernoulli(CMDP.rewards), tc.Bernoulli(CMDP.costs, low=-1)
        learner = tc.WCOPS(CMDP.layout, 1, EPISODES, runs=RUNS)
    return learner, tc.Simulator(CMDP, rewards, costs, runs=RUNS)


def play(folder: Path, kind: str, at: int = 0) -> tc.RunResult:
    return run(*objects(kind, at), EPISODES, folder, LOG_EVERY, progress=False, images=False, checkpoint_every=0)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every entry of a checkpoint, those that hold others too, with the way to it."""
    if path:
        yield path, value
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from leaves(entry, (*path, key))


def mutations(value: Any) -> dict[str, Any]:
    """What is structurally something else in the place of a value."""
    found: dict[str, Any] = {"gone": GONE, "none": None, "text": "text", "list": ["x"], "mapping": {"x": 1}}
    if isinstance(value, Tensor):
        found |= {"axis": value[None].clone(), "number": 3}
        found |= {"type": value.to(torch.float16 if value.is_floating_point() else torch.int32)}
        found |= {"short": value[:-1].clone(), "long": torch.cat([value, value])} if value.dim() and len(value) else {}
    elif isinstance(value, int | float):
        found |= {"tensor": torch.tensor(1.0)}
    elif isinstance(value, str):
        found |= {"number": 3}
    elif isinstance(value, list):
        found |= {"longer": [*value, *value[-1:]], "shorter": value[:-1]} if value else {}
    return {name: other for name, other in found.items() if type(other) is not type(value) or digest(other) != digest(value)}


def changes(value: Any) -> dict[str, Any]:
    """Other values of the same structure."""
    if isinstance(value, Tensor) and value.numel():
        other = value.clone()
        other.view(-1)[0] = not other.view(-1)[0] if value.dtype == torch.bool else other.view(-1)[0] + 1
        return {"more": other} | ({"nan": torch.full_like(value, torch.nan)} if value.is_floating_point() else {})
    if isinstance(value, int | float):
        return {"more": value + 1, "nan": float("nan")}
    return {"other": value + "x"} if isinstance(value, str) else {}


def mutated(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return state


def interrupted(folder: Path, kind: str) -> dict[str, Any]:
    if kind == "adversarial":
        with pytest.raises(Killed):
            play(folder, kind, at=STOP)
    else:
        play(folder, kind)
    return dict(torch.load(folder / "checkpoint.pt", weights_only=True))


def refused(attempt: Callable[[], object], path: Path) -> str:
    """Why a checkpoint was refused; empty where it was not, or not as it should be."""
    before = path.read_bytes()
    try:
        attempt()
    except tc.RunFolderError as error:
        sentence = str(error)
        good = "\n" not in sentence and sentence.endswith(".") and str(path.parent) in sentence and path.read_bytes() == before
        return sentence if good else ""
    except Exception:
        return ""
    return ""


EVERY = [pytest.param(1, marks=pytest.mark.slow), 9]  # all of them, or one in nine


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", ["adversarial", "stochastic"])
def test_content_that_was_changed_is_refused_by_its_checksum(tmp_path: Path, kind: str, every: int) -> None:
    state, path = interrupted(tmp_path, kind), tmp_path / "checkpoint.pt"
    _load(path)
    table = [(where, *each) for where, value in leaves(state) for each in {**mutations(value), **changes(value)}.items()]
    assert len(table) > 700
    wrong = []
    for where, name, other in table[::every]:
        torch.save(mutated(state, where, other), path)
        if "cannot be read" not in refused(lambda: _load(path), path):
            wrong.append((where, name))
    assert not wrong, "\n".join(map(str, wrong))
    torch.save(state, path)
    assert play(tmp_path, kind).completed


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", ["adversarial", "stochastic"])
def test_another_structure_is_refused_although_its_checksum_is_right(tmp_path: Path, kind: str, every: int) -> None:
    state, path = interrupted(tmp_path, kind), tmp_path / "checkpoint.pt"
    del state["checksum"]
    table = [(where, *each) for where, value in leaves(state) for each in mutations(value).items()]
    assert len(table) > 500
    wrong = []
    for where, name, other in table[::every]:
        if name == "gone" and where[0] == "rows" and where[-1] == state["diagnostics"]["tags"][-1]:
            continue  # a learner may begin to report something later
        if name == "gone" and where[0] == "attributes" and len(where) > 1:
            continue  # of what no change was recorded none is asked for
        content = mutated(state, where, other)
        torch.save({**content, "checksum": digest(content)}, path)
        if not refused(lambda: play(tmp_path, kind), path):
            wrong.append((where, name))
    assert not wrong


@pytest.mark.parametrize("kind", ["adversarial", "stochastic"])
def test_what_is_missing_or_of_another_kind_is_named(tmp_path: Path, kind: str) -> None:
    """Not an AttributeError of whoever stumbles over it, but where it stands and what was expected."""
    state, path = interrupted(tmp_path, kind), tmp_path / "checkpoint.pt"
    del state["checksum"]
    parts = [(where, value) for where, value in leaves(state) if where[0] in ("learner", "env", "tracker", "diagnostics")]
    table = [(where, *each) for where, value in parts for each in mutations(value).items()]
    table = [row for row in table if row[1] in ("gone", "none", "text", "number") and isinstance(row[0][-1], str)]
    assert len(table) > 100
    wrong = []
    for where, name, other in table:
        content = mutated(state, where, other)
        torch.save({**content, "checksum": digest(content)}, path)
        sentence = refused(lambda: play(tmp_path, kind), path)
        if f"has no {where[-1]};" not in sentence if name == "gone" else f"'s {where[-1]} is " not in sentence:
            wrong.append((where, name, sentence[-120:]))
    assert not wrong, "\n".join(map(str, wrong))
