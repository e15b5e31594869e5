"""The predict program: both ways are safe, learn, and are measured on contexts that they have not seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import torchcmdp as tc
from torchcmdp.nn import SafeOccupancy
from train.__main__ import main
from train.predict import METHODS, Options, best_eta, best_safe_reward, draw, train

SMALL = ["predict", "--steps", "6", "--contexts", "12", "--held-out", "5", "--runs", "2", "--batch", "4"]


def test_it_writes_its_files_and_prints_its_table(tmp_path, capsys):
    assert main([*SMALL, "--logdir", str(tmp_path)]) == 0
    folder, out = tmp_path / "predict", capsys.readouterr().out
    folders = {method.replace(" ", "-") for method in METHODS}
    assert {file.name for file in folder.iterdir()} == {"predict.png", "predict.pdf", "predict.md", *folders}
    assert all(list((folder / name).glob("events.out.tfevents.*")) for name in folders)
    for words in (*METHODS, "true losses known", "5 held-out contexts", "+-"):
        assert words in out


def test_contexts_are_held_out_and_repetitions_differ():
    cmdp, options = tc.random_cmdp(seed=0), Options(runs=2)
    seen, unseen = draw(cmdp, options, 20, 0), draw(cmdp, options, 20, 1)
    assert not torch.isin(seen.contexts, unseen.contexts).any()
    assert torch.equal(seen.rewards, draw(cmdp, options, 20, 0).rewards)  # the same losses belong to the same contexts
    assert not torch.equal(seen.rewards[0], seen.rewards[1])
    assert set(seen.realised.unique().tolist()) == {0.0, 1.0} and (seen.rewards[..., ~cmdp.layout.pair_mask()] == 0).all()
    many = draw(cmdp, options, 4_000, 0)
    assert (many.realised.mean(1) - many.rewards.mean(1)).abs().max() < 0.05
    # the curvature bends: without it the losses are linear in the context up to the sigmoid
    u = torch.logit(draw(cmdp, replace(options, curvature=0.0), 50, 0).rewards[0][:, cmdp.layout.pair_mask()])
    contexts = draw(cmdp, options, 50, 0).contexts[0]
    assert (u - contexts @ torch.linalg.lstsq(contexts, u).solution).abs().max() < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_both_ways_learn_and_are_safe(method):
    cmdp = tc.random_cmdp(seed=0)
    options = Options(runs=2, steps=60, contexts=60, held_out=30, batch=16)
    seen, unseen = draw(cmdp, options, options.contexts, 0), draw(cmdp, options, options.held_out, 1)
    curves = train(method, cmdp, options, seen, unseen, None)
    reward = curves["Metrics/EpRet"].mean(0)
    assert reward[-1] > reward[0] + 0.1 and curves["Violation/positive"].max() < 1e-8
    assert (curves["Metrics/EpRet"] <= best_safe_reward(cmdp, unseen)[:, None] + 1e-8).all()


def test_the_best_step_size_is_chosen_run_by_run():
    cmdp, options = tc.random_cmdp(seed=0), Options(runs=2)
    data = draw(cmdp, options, 10, 0)
    layer = SafeOccupancy(cmdp.layout, 2, transitions=cmdp.transitions, costs=cmdp.costs, solver=tc.Newton(multiplier_cap=1e4))
    losses = torch.stack([1 - data.realised[0], data.realised[1]])  # the second run's predictions are upside down
    assert best_eta(layer, losses, data.realised).flatten().tolist() == [100.0, 1.0]


def test_mistakes_get_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, words in ((["--contexts", "0"], "--contexts is 0"), (["--curvatur", "1"], "did you mean --curvature?")):
        assert main(["predict", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
