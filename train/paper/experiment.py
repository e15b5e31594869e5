"""Play one experiment with one family of constants: every learner on its own sequence, and on one recorded sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.protocols import Axes

from .presets import WC_OPS, Player, instances, learner, preset_of, processes, spread

OWN, REPLAY = "own sequence", "replay"
POINTS = 100


@dataclass(frozen=True)
class Job:
    """One experiment with one family of constants."""

    preset: str
    family: str  # "theory", "practical", "small" or "tuned"
    episodes: int  # of every run
    instances: int  # how many CMDPs
    runs: int  # of each of them
    folder: Path  # of the experiment: its learners' folders go into <family> and <family>-replay
    fresh: bool  # forget what the folders hold

    @property
    def total(self) -> int:
        """Episodes to be played, over all learners."""
        preset = preset_of(self.preset)
        players = len(preset.players_of(self.family))
        return self.episodes * (2 * players + 1 if preset.adaptive else players)  # own sequences, replays and the recording


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    job: Job
    results: Mapping[tuple[str, str], tc.RunResult]  # by sequence and label
    policies: Mapping[str, Tensor]  # by label, at the logging points, (points x runs x L x S x A); of simplex experiments only

    @property
    def completed(self) -> bool:
        """Whether every run was played to its end."""
        return all(result.completed for result in self.results.values())

    def of(self, sequence: str) -> dict[str, tc.RunResult]:
        """The results of one sequence by label."""
        return {label: result for (where, label), result in self.results.items() if where == sequence}


class RecordingSimulator(tc.Simulator):
    """A simulator that keeps the policies at regular episodes.

    Args:
        keep_every: Episodes between policies that are kept: those between logging points, where blocks of episodes begin.
    """

    plays_in_blocks = True

    def __init__(self, *arguments: Any, keep_every: int, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._keep_every = keep_every
        self._policies: list[Tensor] = []

    @property
    def policies(self) -> Tensor:
        """`(kept x runs x L x S x A)`."""
        return torch.stack(self._policies) if self._policies else torch.zeros(0, self.runs, *self.layout.pair_shape)

    def watch(self, policy: Tensor) -> None:
        """Now and then the policy is kept."""
        if self.episode % self._keep_every == 0:
            self._policies.append(policy.detach().clone())

    def state_axes(self) -> Axes:
        """As of a simulator; the kept policies have the runs on their second axis."""
        return {**super().state_axes(), "policies": 1}

    def state_dict(self) -> dict[str, Any]:
        """As of a simulator, with the policies that were kept."""
        return {**super().state_dict(), "policies": self.policies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        rest = dict(state)
        self._policies = list(rest.pop("policies", ()))
        super().load_state_dict(rest)


class Scene:
    """The instances of a job, and what is played on them; the arguments are those of `play`."""

    def __init__(self, job: Job, beat: Any, stopped: Callable[[], bool]) -> None:
        self.job, self.beat, self.stopped = job, beat, stopped
        self.preset, self.drawn = preset_of(job.preset), _drawn(job.preset, job.instances)

    def processes(self, runs: int) -> tuple[tc.Process, tc.Process]:
        """Rewards and costs for so many runs."""
        return processes(self.preset, *self.drawn, self.job.episodes, runs)

    def play(
        self, player: Player, folder: str, runs: int, feedback: tuple[tc.Process, tc.Process]
    ) -> tuple[tc.RunResult, tc.Simulator]:
        """So many runs of a learner on each instance, or what is left of them."""
        if self.stopped():  # a signal that came with a run's last block has ended nothing
            raise KeyboardInterrupt
        job, cmdp = self.job, spread(self.drawn[0], runs)
        every = max(10, job.episodes // POINTS)
        kind = partial(RecordingSimulator, keep_every=every) if self.preset.setting == "simplex" else tc.Simulator
        env = kind(cmdp, *feedback, runs=job.instances * runs, seed=self.preset.seed)
        who, logdir = learner(player, cmdp, job.family, job.episodes), job.folder / folder / player.folder
        how: dict[str, Any] = {"progress": False, "fresh": job.fresh, "images": False, "on_progress": self.beat}
        return tc.run(who, env, job.episodes, logdir, every, **how), env

    def record(self) -> list[Tensor | None] | None:
        """The sequences that the adversary produces against a single run of WC-OPS on every instance, for all runs of it.

        None where there was no adversary, and None in all if interrupted.
        """
        rewards, costs = (tc.Recorder(process, self.job.episodes) for process in self.processes(1))
        result, _ = self.play(Player(WC_OPS.key, "recorded"), f"{self.job.family}-recording", 1, (rewards, costs))
        if not result.completed:
            return None
        sources, runs = ((rewards, self.preset.rewards), (costs, self.preset.costs)), self.job.runs
        return [who.sequence.repeat_interleave(runs, 1) if source.startswith("ogd") else None for who, source in sources]

    def replay(self, sequences: list[Tensor | None]) -> tuple[tc.Process, tc.Process]:
        """The recorded sequences where there was an adversary, and the same noise as ever where there was none."""
        live = self.processes(self.job.runs)
        rewards, costs = (own if kept is None else tc.Replay(kept) for own, kept in zip(live, sequences, strict=True))
        return rewards, costs


@lru_cache(maxsize=32)
def _drawn(preset: str, count: int) -> tuple[tc.LayeredCMDP, list[int]]:
    """The CMDPs of an experiment and their seeds, the same for every family: to find such as bind takes linear programs."""
    return instances(preset_of(preset), count)


def play(job: Job, beat: Any = None, stopped: Callable[[], bool] = lambda: False) -> Outcome:
    """Play all of a job, or what is left of it; stops early if interrupted, or between two runs where it is `stopped`."""
    scene = Scene(job, beat, stopped)
    results: dict[tuple[str, str], tc.RunResult] = {}
    policies: dict[str, Tensor] = {}
    players = scene.preset.players_of(job.family)
    for player in players:
        result, env = scene.play(player, job.family, job.runs, scene.processes(job.runs))
        results[OWN, player.name] = result
        if isinstance(env, RecordingSimulator):
            policies[player.name] = env.policies[:, : job.runs]  # those of the first instance, which is drawn
        if not result.completed:
            return Outcome(job, results, policies)
    if scene.preset.adaptive and (sequences := scene.record()):
        for player in players:
            results[REPLAY, player.name], _ = scene.play(player, f"{job.family}-replay", job.runs, scene.replay(sequences))
            if not results[REPLAY, player.name].completed:
                break
    return Outcome(job, results, policies)
