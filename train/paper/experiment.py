"""Play one experiment with one family of constants: every learner on its own sequence, and on one recorded sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.trajectory import Trajectory
from train.paper.presets import PRESETS, WC_OPS, Player, Preset, instance, learner, processes

OWN, REPLAY = "own sequence", "replay"
BEAT = 50  # episodes between two signs of life
POINTS = 200


@dataclass(frozen=True)
class Job:
    """One experiment with one family of constants.

    Attributes:
        preset: Its name.
        family: "theory" or "practical".
        episodes, runs: How much is played.
        folder: Of the experiment: its learners' folders go into <family> and <family>-replay.
        fresh: Forget what the folders hold.
    """

    preset: str
    family: str
    episodes: int
    runs: int
    folder: Path
    fresh: bool

    @property
    def total(self) -> int:
        """Episodes to be played, over all learners."""
        preset = PRESETS[self.preset]
        players = len(preset.players_of(self.family))
        return self.episodes * (2 * players + 1 if preset.adaptive else players)  # own sequences, replays and the recording


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        job: What was asked.
        results: Sequence ("own sequence" or "replay") and label to what the learner's run measured.
        policies: Label to the policies at the logging points, `(points x runs x L x S x A)`; of simplex experiments only.
    """

    job: Job
    results: Mapping[tuple[str, str], tc.RunResult]
    policies: Mapping[str, Tensor]

    @property
    def completed(self) -> bool:
        return all(result.completed for result in self.results.values())


class WatchedSimulator(tc.Simulator):
    """A simulator that gives a sign of life now and then, and keeps the policies at regular episodes if asked to.

    Args:
        beat: Called with the number of episodes since the last call.
        keep_every: Episodes between policies that are kept; 0 keeps none.
    """

    def __init__(self, *arguments: Any, beat: Any = None, keep_every: int = 0, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._beat, self._keep_every = beat, keep_every
        self._policies: list[Tensor] = []

    @property
    def policies(self) -> Tensor:
        """`(kept x runs x L x S x A)`."""
        return torch.stack(self._policies) if self._policies else torch.zeros(0, self.runs, *self.layout.pair_shape)

    def rollout(self, policy: Tensor) -> Trajectory:
        if self._keep_every and self.episode % self._keep_every == 0:
            self._policies.append(policy.detach().clone())
        trajectory = super().rollout(policy)
        if self._beat is not None and self.episode % BEAT == 0:
            self._beat(BEAT)
        return trajectory

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"policies": self.policies} if self._keep_every else {})}

    def state_axes(self) -> dict[str, Any]:
        return {**super().state_axes(), **({"policies": 1} if self._keep_every else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rest = dict(state)
        self._policies = list(rest.pop("policies", ()))
        super().load_state_dict(rest)


def play(job: Job, beat: Any = None) -> Outcome:
    """Play all of a job, or what is left of it; stops early if interrupted."""
    preset = PRESETS[job.preset]
    cmdp = instance(preset)
    results: dict[tuple[str, str], tc.RunResult] = {}
    policies: dict[str, Tensor] = {}
    players = preset.players_of(job.family)
    for player in players:
        env = _simulator(job, preset, cmdp, processes(preset, cmdp, job.episodes), beat)
        result = _run(job, player, preset, cmdp, env, job.family)
        results[OWN, player.name] = result
        if preset.setting == "simplex":
            policies[player.name] = env.policies
        if not result.completed:
            return Outcome(job, results, policies)
    if preset.adaptive:
        sequences = _record(job, preset, cmdp, beat)
        for player in players if sequences else ():
            env = _simulator(job, preset, cmdp, _replay(preset, cmdp, job.episodes, sequences), beat)
            results[REPLAY, player.name] = _run(job, player, preset, cmdp, env, f"{job.family}-replay")
            if not results[REPLAY, player.name].completed:
                break
    return Outcome(job, results, policies)


def _simulator(
    job: Job, preset: Preset, cmdp: tc.LayeredCMDP, feedback: tuple[tc.Process, tc.Process], beat: Any, runs: int | None = None
) -> WatchedSimulator:
    keep = max(1, job.episodes // POINTS) if preset.setting == "simplex" else 0
    seeds: dict[str, Any] = {"runs": runs or job.runs, "seed": preset.seed}
    return WatchedSimulator(cmdp, *feedback, **seeds, beat=beat, keep_every=keep)


def _run(
    job: Job, player: Player, preset: Preset, cmdp: tc.LayeredCMDP, env: WatchedSimulator, folder: str, runs: int | None = None
) -> tc.RunResult:
    who = learner(player, preset, cmdp, job.family, job.episodes, runs or job.runs)
    logdir = job.folder / folder / player.folder
    every = max(10, job.episodes // POINTS)  # a logging point costs as much as some episodes
    return tc.run(who, env, job.episodes, logdir, every, progress=False, fresh=job.fresh, images=False)


def _record(job: Job, preset: Preset, cmdp: tc.LayeredCMDP, beat: Any) -> tuple[Tensor, Tensor] | None:
    """The sequences that the adversary produces against a single run of WC-OPS; None if interrupted."""
    recorders = tuple(tc.Recorder(process, job.episodes) for process in processes(preset, cmdp, job.episodes))
    env = _simulator(job, preset, cmdp, recorders, beat, runs=1)
    if not _run(job, Player(WC_OPS.key, "recorded"), preset, cmdp, env, f"{job.family}-recording", runs=1).completed:
        return None
    rewards, costs = (recorder.sequence for recorder in recorders)
    # the recording has one run, and everybody meets it
    return (rewards[:, 0] if rewards.dim() == 5 else rewards), (costs[:, 0] if costs.dim() == 6 else costs)


def _replay(preset: Preset, cmdp: tc.LayeredCMDP, episodes: int, sequences: tuple[Tensor, Tensor]) -> tuple[tc.Process, tc.Process]:
    """The recorded sequences where there was an adversary, and the same noise as ever where there was none."""
    live = processes(preset, cmdp, episodes)
    rewards = tc.Replay(sequences[0]) if preset.rewards.startswith("ogd") else live[0]
    costs = tc.Replay(sequences[1]) if preset.costs.startswith("ogd") else live[1]
    return rewards, costs
