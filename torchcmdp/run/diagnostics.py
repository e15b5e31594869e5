"""What a learner reports about itself, added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief
from torchcmdp.protocols import Axes


class Diagnostics:
    """Adds up a learner's diagnostics since the last logging point and over the run, and the episodes in which each was positive.

    Args:
        runs: How many runs report.
        device: Where the sums continue from a state.
    """

    def __init__(self, runs: int, device: torch.device | None = None) -> None:
        self.runs, self.device, self.window_episodes = runs, device, 0
        self.tags: list[str] = []
        self._sums = dict.fromkeys(("window", "total", "positive"), torch.zeros(0, runs, dtype=torch.float64))

    def add(self, diagnostics: Mapping[str, Tensor]) -> None:
        """Take in one episode's, `(runs,)` each; a tag that is missing counts as zero."""
        self.window_episodes += 1
        if not diagnostics:
            return
        for tag, value in diagnostics.items():
            if not isinstance(value, Tensor) or tuple(value.shape) not in ((), (1,), (self.runs,)):
                raise InvalidInput(
                    f"the learner's diagnostics have {tag} = {brief(value)}; expected a tensor with one value a run."
                )
        device = next(iter(diagnostics.values())).device
        self._grow(diagnostics, device)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        values = [diagnostics.get(tag, zero).detach().to(torch.float64).expand(self.runs) for tag in self.tags]
        now = torch.stack(values)
        terms = {"window": now, "total": now, "positive": now > 0}
        self._sums = {name: sums + terms[name] for name, sums in self._sums.items()}

    def _grow(self, tags: Iterable[str], device: torch.device) -> None:
        """Make room for tags that were not met before."""
        if new := [tag for tag in tags if tag not in self.tags]:
            room = torch.zeros(len(new), self.runs, dtype=torch.float64, device=device)
            self._sums = {name: torch.cat([sums.to(device), room]) for name, sums in self._sums.items()}
            self.tags = [*self.tags, *new]

    def room_for(self, tags: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """Copies of the sums, `(tags x runs)` each, for somebody to add episodes with these tags to; `take` takes them back."""
        self._grow(tags, device)
        if self.tags != list(tags):
            raise InvalidInput(
                f"the learner reports {', '.join(tags)}, but this run has reports of {', '.join(self.tags)} as well."
            )
        return {name: sums.clone(memory_format=torch.contiguous_format) for name, sums in self._sums.items()}

    def take(self, sums: dict[str, Tensor], episodes: int) -> None:
        """Sums that so many episodes were added to."""
        self._sums, self.window_episodes = sums, self.window_episodes + episodes

    def close_window(self) -> dict[str, Tensor]:
        """By tag, means over the episodes since this was last called, `(runs,)` each."""
        means = self._by_tag("window", self.window_episodes)
        self._sums["window"], self.window_episodes = torch.zeros_like(self._sums["window"]), 0
        return means

    def means(self, episodes: int) -> dict[str, Tensor]:
        """By tag, means over `episodes` episodes, `(runs,)` each."""
        return self._by_tag("total", episodes)

    def counts(self) -> dict[str, Tensor]:
        """By tag, in how many episodes it was positive, `(runs,)` int64 each."""
        return {tag: sums.to(torch.int64) for tag, sums in self._by_tag("positive", 1).items()}

    def _by_tag(self, name: str, episodes: int) -> dict[str, Tensor]:
        return {tag: sums / max(episodes, 1) for tag, sums in zip(self.tags, self._sums[name], strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """The tags and the sums, `(tags x runs)` each."""
        return {"tags": self.tags, "window_episodes": self.window_episodes, **self._sums}

    def state_axes(self) -> Axes:
        """Where the runs are in each entry."""
        return {"tags": None, "window_episodes": None, **dict.fromkeys(self._sums, 1)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if not all(isinstance(tag, str) for tag in state["tags"]) or len({*state["tags"]}) < len(state["tags"]):
            raise InvalidInput(f"the diagnostics have the tags {state['tags']}; expected different names.")
        for name in self._sums:
            if tuple(state[name].shape) != (len(state["tags"]), self.runs):
                found, wanted = tuple(state[name].shape), (len(state["tags"]), self.runs)
                raise InvalidInput(f"the diagnostics have {name} of shape {found}; expected (tags x runs) = {wanted}.")
        self.tags, self.window_episodes = list(state["tags"]), int(state["window_episodes"])
        self._sums = {name: state[name].to(self.device, torch.float64) for name in self._sums}
