"""Table and sentences of a comparison: bold and words follow from the numbers, and no regret is praised without its violation."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from train.output import value_of
from train.verdict import ranking, sentences

NOISE = torch.linspace(-1, 1, 8, dtype=torch.float64)


def result(regret: float, unsafe: float, share: float = 0.5, noise: float = 1.0) -> SimpleNamespace:
    ends = {"regret": regret, "violation": unsafe, "positive_violation": unsafe}
    curves = {name: (end + noise * NOISE)[:, None] for name, end in ends.items()}
    shares = (share + 0.001 * NOISE * (share > 0))[:, None]
    return SimpleNamespace(**curves, unsafe_share=shares, episodes=torch.tensor([100]), diagnostics={})


def row(text: str, label: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"| {label} ")).split("|")[2:-1]


def test_the_least_is_bold_but_a_regret_that_was_bought_is_not():
    table = ranking({"safe": result(50, 10, 0.2), "bold": result(-100, 500, 0.9)})  # type: ignore[dict-item]
    assert [("**" in cell) for cell in row(table, "safe")] == [False, True, True, True]
    assert not any("**" in cell for cell in row(table, "bold"))
    table = ranking({"good": result(5, 10, 0.2), "bad": result(50, 500, 0.9)})  # type: ignore[dict-item]
    assert all("**" in cell for cell in row(table, "good")) and not any("**" in cell for cell in row(table, "bad"))


def test_nothing_is_bold_where_all_are_the_same():
    assert "**" not in ranking({"a": result(1, 1), "b": result(1, 1)})  # type: ignore[dict-item]


def test_the_sentences_say_what_was_traded():
    first, second = sentences({"safe": result(50, 10, 0.2), "bold": result(-100, 500, 0.9)})  # type: ignore[dict-item]
    assert first.startswith("In 100 episodes safe broke the constraints least: positive violation 10.0 +- ")
    assert "unsafe in 20.0% +- " in first and "regret 50.0 +- " in first
    assert second.startswith("The least regret is bold's, -100.0 +- ") and "50.0 times the positive violation, 500.0 +- " in second
    assert second.endswith("a regret below zero is reward that no safe policy can earn.")
    _, second = sentences({"good": result(5, 10), "bad": result(50, 500)})  # type: ignore[dict-item]
    assert second == "It has the least regret, too, so that here nothing was traded for safety."


def test_what_cannot_be_told_apart_is_not_called_better():
    far = {"a": result(10, 10), "b": result(30, 10 + 0.1), "c": result(50, 90)}
    far["b"].positive_violation = far["a"].positive_violation.flip(0) + 0.1  # the difference is noise
    first, _ = sentences(far)  # type: ignore[arg-type]
    assert "a broke the constraints least (b cannot be told from it)" in first
    near = {"a": result(50, 10), "b": result(49.9, 90)}
    near["b"].regret = near["a"].regret.flip(0) - 0.1
    _, second = sentences(near)  # type: ignore[arg-type]
    assert "which cannot be told from a's," in second and "9.0 times the positive violation" in second


def test_without_a_safe_policy_or_a_difference_there_is_something_to_say():
    lost = result(float("nan"), 10)
    first, second = sentences({"a": lost, "b": result(float("nan"), 20)})  # type: ignore[dict-item]
    assert (
        first == "No policy is safe in some of these CMDPs, so that there is no regret."
        and "a broke the constraints least" in second
    )
    free = {"a": result(1, 0, 0, noise=0.0), "b": result(2, 0, 0, noise=0.0)}
    assert sentences(free) == ["In 100 episodes nobody broke a constraint.", "a has the least regret, 1.0 +- 0.0."]  # type: ignore[arg-type]


def test_a_learner_with_a_baseline_is_not_measured_against_those_without():
    """It is said to have one and how often it was played; the others are compared among themselves."""
    helped = result(70, 0, 0, noise=0.0)
    helped.diagnostics = {"Learner/on_baseline": torch.full((8,), 0.9, dtype=torch.float64)}
    others = {"OptCMDP": result(5, 10, 0.2), "bad": result(50, 500, 0.9)}
    first, second = sentences({**others, "S-OPS with a baseline": helped})  # type: ignore[dict-item]
    assert first == (
        "In 100 episodes and given a safe policy to start from, S-OPS broke no constraint and played that policy in 90.0% +- 0.0% "
        "of them, for a regret of 70.0 +- 0.0."
    )
    assert second.startswith("Without one, OptCMDP broke the constraints least: positive violation 10.0 +- ")
    assert second.endswith("; it has the least regret, too, so that here nothing was traded for safety.") and "S-OPS" not in second
    first, _ = sentences({**others, "S-OPS with a baseline": result(70, 3, 0.01)})  # type: ignore[dict-item]
    assert "S-OPS was unsafe in 1.0% +- 0.1% of episodes (positive violation 3.0 +- 0.6), for a regret of 70.0 +- 0.6." in first
    same = {"OptCMDP": result(1, 0, 0, noise=0.0), "bad": result(2, 0, 0, noise=0.0)}
    _, second = sentences({**same, "S-OPS with a baseline": helped})  # type: ignore[dict-item]
    assert second == "Without one, nobody broke a constraint; OptCMDP has the least regret, 1.0 +- 0.0."
    assert len(sentences({"S-OPS with a baseline": helped, "DOPE with a baseline": result(1, 2)})) == 2  # type: ignore[dict-item]
    bought = sentences({"a": result(9, 0, 0, noise=0.0), "b": result(1, 500)})[1]  # type: ignore[dict-item]
    assert "with a far larger positive violation, 500.0 +- " in bought


def test_a_cell_is_read_as_the_number_that_it_is():
    assert value_of("-1,895.9 +- 31.9") == {"mean": -1895.9, "ci95": 31.9} and value_of("**3**") == 3
    assert value_of("12.5%") == 0.125 and value_of("5e-09") == 5e-9 and value_of("-") is None and value_of("14x") == "14x"
    assert value_of("50.0% +- 1.0%") == {"mean": 0.5, "ci95": 0.01} and value_of("WC-OPS") == "WC-OPS"
