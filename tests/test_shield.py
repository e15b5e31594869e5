"""The shield program: it writes and prints its comparison, the shielded policy is safe all along, and gradients are right."""

from __future__ import annotations

import pytest
import torch

import torchcmdp as tc
from torchcmdp.occupancy import expected_value
from train.__main__ import main
from train.comparison import Curves, SeedNetworks, rounded
from train.shield import METHODS, Options, reinforce, train

SMALL = ["shield", "--steps", "12", "--episodes", "4", "--runs", "3"]


def test_it_writes_its_files_and_prints_its_table(tmp_path, capsys):
    assert main([*SMALL, "--logdir", str(tmp_path)]) == 0
    folder, out = tmp_path / "shield", capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} == {"shield.png", "shield.pdf", "shield.md", *METHODS}
    for method in METHODS:
        assert len(list((folder / method).glob("events.out.tfevents.*"))) == 1
        assert f"| {method}" in out
    assert "+-" in out and "48 episodes each" in out and (folder / "shield.md").read_text().strip() in out
    main([*SMALL, "--logdir", str(tmp_path)])  # once more: TensorBoard must not overlay two runs
    assert len(list((folder / "shield").glob("events.out.tfevents.*"))) == 1


def test_the_shield_is_safe_from_the_first_episode_and_learns():
    cmdp, options = tc.random_cmdp(seed=0), Options(steps=60, episodes=8, runs=3, learning_rate=0.03)
    shielded, bare = (train(method, cmdp, options, None) for method in ("shield", "unprotected"))
    assert shielded["Violation/positive"].max() < 1e-9 and bare["Violation/positive"].mean() > 0.05
    for curves in (shielded, bare):
        reward = curves["Metrics/EpRet"].mean(0)
        assert reward[-10:].mean() > reward[:10].mean() + 0.03
    assert shielded["Metrics/EpRet"].max() <= float(tc.safe_optimum(cmdp).value) + 1e-9


def test_the_penalty_reduces_the_violation():
    cmdp, options = tc.random_cmdp(seed=0), Options(steps=150, episodes=8, runs=3, multiplier_rate=0.5)
    penalised, bare = (train(method, cmdp, options, None) for method in ("penalty", "unprotected"))
    assert penalised["Violation/positive"][:, -20:].mean() < 0.5 * bare["Violation/positive"][:, -20:].mean()


def test_the_gradient_estimate_is_unbiased(cmdp, random_policy):
    """REINFORCE's mean gradient is that of the expected reward, up to the 1/n that the shared baseline takes away."""
    logits = random_policy(cmdp.layout).clamp_min(1e-9).log().requires_grad_()
    mask, episodes = cmdp.layout.pair_mask(), 40_000
    policy = (logits.softmax(-1) * mask).unsqueeze(0)
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=episodes, seed=0)
    (estimate,) = torch.autograd.grad(reinforce(policy, env.rollout(policy[0])).sum(), logits, retain_graph=True)
    value = expected_value(cmdp.rewards, tc.pair_occupancy_of(policy[0], cmdp.transitions))
    (exact,) = torch.autograd.grad(value, logits)
    assert (estimate - exact).abs().max() < 0.01 and exact.abs().max() > 0.05


def test_networks_do_not_see_each_other():
    many, few = SeedNetworks((4, 5, 2), 3, seed=1), SeedNetworks((4, 5, 2), 2, seed=1)
    x = torch.randn(3, 7, 6, 4, dtype=torch.float64)
    assert many(x).shape == (3, 7, 6, 2) and torch.equal(many(x)[:2], few(x[:2]))
    assert not torch.equal(many.weights[0][0], many.weights[0][1])


def test_curves_and_intervals():
    curves = Curves(None)
    for step in (1, 5):
        curves.add(step, {"a": torch.tensor([1.0, 3.0]) * step})
    assert curves.steps.tolist() == [1, 5] and curves["a"].tolist() == [[1.0, 5.0], [3.0, 15.0]]
    assert rounded(torch.tensor([1.0, 1.0])) == "1.000 +- 0.000" and rounded(torch.tensor([-1e-9])) == "0.000"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps is 0; it must be greater than zero."),
        (["--learning-rate", "x"], "--learning-rate got 'x'; expected a number."),
        (["--stepz", "3"], "--stepz is not an option of python -m train shield; did you mean --steps?"),
        (["--name", "a/b"], "one plain folder name"),
    ],
)
def test_a_mistake_gets_one_sentence(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["shield", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == "" and list(tmp_path.iterdir()) == []


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["shield", "--help"])
    out = capsys.readouterr().out
    assert "python -m train shield --steps 200" in out and "--multiplier-rate" in out
