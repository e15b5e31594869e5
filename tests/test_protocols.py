"""What the library's own parts are, and what a part with less is not."""

from __future__ import annotations

from dataclasses import fields

import torch

import torchcmdp as tc
from torchcmdp.protocols import EnvironmentLike, LearnerLike, ProcessLike, TrackerLike, first_axes
from torchcmdp.run.options import RunKeywords, RunOptions


def test_the_librarys_own_parts_are_what_a_run_asks_for(cmdp):
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.OGDAdversary(cmdp.costs, sign=1, step=0.1, low=-1), runs=2)
    assert isinstance(tc.WCOPS(cmdp.layout, 2, 10, runs=2), LearnerLike) and not isinstance(env, LearnerLike)
    assert isinstance(env, EnvironmentLike) and not isinstance(env.rewards, EnvironmentLike)
    assert isinstance(env.rewards, ProcessLike) and isinstance(env.costs, ProcessLike) and not isinstance(env, ProcessLike)
    assert isinstance(tc.Tracker(env), TrackerLike) and not isinstance(env, TrackerLike)


def test_tensors_have_the_runs_on_their_first_axis_unless_all_runs_share_them():
    state = {"a": torch.zeros(3, 2), "b": {"c": torch.zeros(()), "d": torch.zeros(3)}, "e": 4}
    assert first_axes(state) == {"a": 0, "b": {"c": None, "d": 0}, "e": None}
    assert first_axes(state, shared=2) == {"a": None, "b": {"c": None, "d": 0}, "e": None}


def test_the_options_of_a_run_are_its_keywords():
    assert [field.name for field in fields(RunOptions)] == ["log_every", *RunKeywords.__annotations__]
