"""Cost models: the formulas by hand, what a prior, a margin and a drift test do, and that every learner carries them whole."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from helpers import LAYOUT, SETTINGS, SMALL, World, play, simulator
from helpers import ON_META as META

import torchcmdp as tc
from torchcmdp.costs import CostEvidence, Drift, PaperCosts, PriorCosts
from torchcmdp.errors import InvalidInput
from torchcmdp.estimation import cumulative_surprise, doubly_robust_loss, standard_error
from torchcmdp.kernels.engine import using
from torchcmdp.layout import Layout
from torchcmdp.testing import check_learner

BANDIT = Layout((1, 1), 2)
QUICK = Drift(height=2.0, memory=3.0)
ON_META: dict[str, Any] = {"solver": tc.Newton(backend="torch", fixed_iterations=1)}


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def bandit(costs: Any, **settings: Any) -> tc.WCOPS:
    return tc.WCOPS(BANDIT, 1, 100, costs=costs, **settings)


def pull(learner: tc.Learner, action: int, cost: float) -> None:
    """An episode of a bandit: this arm, at this cost."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    met = torch.full((1, 1), cost, dtype=torch.float64)
    learner.update(tc.Trajectory(zero, zero + action, zero, met * 0 + 0.5, met[..., None]))


class TestPrior:
    def test_it_is_one_sample_more_at_the_end_of_the_range(self) -> None:
        learner = bandit(PriorCosts())
        for cost in (1.0, 1.0, -1.0):
            pull(learner, 0, cost)
        assert learner.costs.optimistic(learner)[0, 0, 0, 0].tolist() == [(1 + 1 - 1 - 1) / 4, -1.0]
        assert learner.costs.pessimistic(learner)[0, 0, 0, 0].tolist() == [(1 + 1 - 1 + 1) / 4, 1.0]

    def test_a_known_lower_end_is_where_the_sample_sits(self) -> None:
        low = torch.tensor([-0.5, 0.25], dtype=torch.float64).view(1, 1, 2)
        learner = bandit(PriorCosts(low=low))
        assert learner.costs.optimistic(learner)[0, 0, 0, 0].tolist() == [-0.5, 0.25]
        with pytest.raises(InvalidInput, match="low has shape"):
            bandit(PriorCosts(low=torch.zeros(3)))
        with pytest.raises(InvalidInput, match=r"it must lie in \[-1, 1\]"):
            PriorCosts(low=-2.0)

    def test_the_optimistic_side_lies_below_the_pessimistic_one_and_padding_is_zero(self) -> None:
        for costs in (PriorCosts(margin=1.0), PaperCosts(drift=QUICK)):
            learner = tc.WCOPS(LAYOUT, 2, 100, runs=2, costs=costs)
            play(learner, World(LAYOUT, 2, 0, [0, 1]), 10)
            low, high = learner.costs.optimistic(learner), learner.costs.pessimistic(learner)
            real = LAYOUT.pair_mask()
            assert (low <= high).all() and (low < high)[..., real].any() and high.max() <= 1
            assert (low[..., ~real] == 0).all() and (high[..., ~real] == 0).all()


class TestMargin:
    def test_the_standard_error_by_hand(self) -> None:
        occupancy, estimate = (torch.tensor(x, dtype=torch.float64) for x in ([[[0.25, 0.75]]], [[[[0.6, 1.0]]]]))
        samples = torch.tensor([[[4.0, 0.0]]], dtype=torch.float64)
        expected = math.sqrt(0.25**2 * 0.64 / 4 + 0.75**2 * 0.05)
        assert math.isclose(standard_error(occupancy, estimate, samples).item(), expected, rel_tol=1e-12)
        assert standard_error(10 * occupancy, estimate, samples).item() == 1

    def test_it_raises_the_cost_of_every_occupancy_by_that_many_standard_errors(self) -> None:
        scale = torch.tensor([0.0, 1.5], dtype=torch.float64)
        spared, plain = (tc.WCOPS(LAYOUT, 2, 100, runs=2, costs=PriorCosts(margin=margin)) for margin in (scale, None))
        for trajectory in play(spared, World(LAYOUT, 2, 1, [0, 1]), 6):
            plain.costs.observe(_evidence(plain, trajectory), plain)
            plain.count_visits(*plain.visited(trajectory))
        more = spared.costs.optimistic(spared) - plain.costs.optimistic(plain)
        added = (more * spared.planned.unsqueeze(1)).sum((-3, -2, -1))
        assert torch.allclose(added, scale[:, None] * spared.costs.standard_error(spared), atol=1e-9) and (added[1] > 0).all()


def _evidence(learner: tc.WCOPS, trajectory: tc.Trajectory) -> CostEvidence:
    found = learner.observe(trajectory)
    return CostEvidence(found.visited, found.path_costs, found.costs)


class TestDrift:
    def test_sums_grow_by_the_surprise_less_the_slack_on_their_own_side(self) -> None:
        sums = cumulative_surprise(torch.tensor([[[1.0, 0.2]]]), torch.tensor([[0.5]]), 0.25)
        assert torch.allclose(sums, torch.tensor([[[1.25, 0.0]]]))

    def test_a_change_rings_and_cuts_the_samples(self) -> None:
        learner = bandit(PriorCosts(drift=Drift(height=2.0, slack=0.125, memory=3.0)))
        for _ in range(10):
            pull(learner, 0, -1.0)
        assert learner.costs.samples[0, 0, 0].tolist() == [10, 0] and (learner.costs.surprises == 0).all()
        rung = []
        for _ in range(2):
            pull(learner, 0, 1.0)
            rung.append(learner.diagnostics()["Learner/drift_alarms"].item())
        # the first surprise is 2 - 1/8; the second, with a mean of -9/11, takes the sum above 2
        assert rung == [0, 1] and learner.costs.samples[0, 0, 0].tolist() == [3, 0] and (learner.costs.surprises == 0).all()
        pull(learner, 0, 1.0)
        before = (-10 + 2) / 12
        assert math.isclose(learner.cost_estimate[0, 0, 0, 0, 0].item(), before + (1 - before) / 4, rel_tol=1e-12)
        assert learner.visits[0, 0, 0].tolist() == [13, 0]  # what is known of the transitions is not forgotten

    def test_a_first_visit_is_no_surprise(self) -> None:
        learner = bandit(PriorCosts(drift=QUICK))
        pull(learner, 0, 1.0)
        pull(learner, 1, -1.0)
        assert (learner.costs.surprises == 0).all()

    def test_height_and_slack_are_in_units_of_an_episodes_noise(self) -> None:
        assert Drift().height * Drift().unit(Layout((1, 4, 4, 4, 1), 3)) == 40
        assert Drift().slack * Drift().unit(Layout((1, 4, 4, 4, 1), 3)) == 0.25
        assert Drift(noise=0.5).unit(BANDIT) == 0.5
        with pytest.raises(InvalidInput, match="height is 0"):
            Drift(height=0)


def test_a_doubly_robust_loss_by_hand() -> None:
    visited, mean = torch.tensor([[[1.0, 0.0]]]).double(), torch.tensor([[[0.5, 0.25]]]).double()
    visits = torch.tensor([[[3.0, 1.0]]]).double()
    loss = doubly_robust_loss(visited, number(0.2)[None], number(0.3)[None], 0.1, mean, visits)
    assert torch.allclose(loss, torch.tensor([[[0.5 * 3 / 4 + (0.8 - 0.5) / 0.4, 0.25 / 2]]]).double())


def test_a_doubly_robust_loss_is_the_papers_where_nothing_was_seen() -> None:
    world = World(LAYOUT, 1, 4, [0])
    robust, paper = (tc.WCOPS(LAYOUT, 1, 100, loss=loss, **SMALL) for loss in ("doubly-robust", "paper"))
    trajectory = world.rollout(robust.policy)
    assert torch.allclose(robust.observe(trajectory).loss, paper.observe(trajectory).loss)
    robust.learn(robust.observe(trajectory))
    seen = robust.visits > 0
    assert torch.allclose(robust.mean_loss[seen], (1 - trajectory.rewards[0])) and (robust.mean_loss[~seen] == 0).all()


def test_the_reference_has_its_share_of_the_uniform_occupancy() -> None:
    learner = tc.WCOPS(LAYOUT, 1, 100, runs=2, share=torch.tensor([0.0, 0.3]), **SMALL)
    play(learner, World(LAYOUT, 1, 0, [0, 1]), 4)
    mask, uniform = LAYOUT.transition_mask(), tc.uniform_occupancy(LAYOUT)
    mixed = learner.log_reference.exp() * mask
    assert torch.equal(mixed[0], learner.occupancy[0])
    assert torch.allclose(mixed[1], 0.7 * learner.occupancy[1] + 0.3 * uniform, atol=1e-15)
    with pytest.raises(InvalidInput, match="share contains 2"):
        tc.WCOPS(LAYOUT, 1, 100, share=2.0)


@pytest.mark.parametrize(
    ("make", "meta"),
    [
        (lambda *size, **options: tc.WCOPS.practical(*size, 100, **options), ON_META),
        (lambda *size, **options: tc.WCOPS(*size, 100, costs=PaperCosts(margin=0.5, drift=QUICK), **SMALL, **options), ON_META),
        (
            lambda *size, **options: tc.OptCMDP.practical(*size, 100, **options),
            {"solver": tc.ColumnGeneration(backend="torch", fixed_iterations=1)},
        ),
        *(
            (
                lambda *size, kind=kind, key=key, costs=costs, **options: kind(
                    *size, 100, **{**SETTINGS[key], "bonus_scale": 1.0}, costs=costs, **options
                ),
                META[key],
            )
            for key, kind, costs in (
                ("s-ops", tc.SOPS, PaperCosts(drift=QUICK)),
                ("ma-ops", tc.MAOPS, PaperCosts(margin=0.5)),
                ("dope", tc.DOPE, PaperCosts(margin=0.5, drift=QUICK)),
            )
        ),
    ],
    ids=["practical WC-OPS", "the paper's with both", "practical OptCMDP", "S-OPS", "MA-OPS", "DOPE"],
)
def test_learners_keep_their_contract_with_every_cost_model(make: Any, meta: dict[str, Any]) -> None:
    check_learner(make, meta=lambda *size, **options: make(*size, **meta, **options))


def test_the_practical_learners_are_what_they_say() -> None:
    cmdp = tc.random_cmdp((1, 2, 3, 1), 2, 2, seed=1)
    learner = tc.WCOPS.practical(cmdp.layout, 2, 100, runs=2)
    found = json.loads(json.dumps(learner.config()))
    assert found["costs"] == {"name": "prior", "margin": 1.0, "drift": Drift().config(), "low": -1.0}
    assert found["loss"] == "doubly-robust" and found["share"] == 1e-4 and tuple(learner.theorems) == ()
    assert tuple(tc.WCOPS(cmdp.layout, 2, 100).theorems) == ("regret", "violation", "positive_violation")
    other = tc.OptCMDP.practical(cmdp.layout, 2, 100).config()
    assert other["costs"]["name"] == "prior" and other["rewards"] == "prior"
    play(tc.Greedy(cmdp.layout, 2, 100, costs=PriorCosts()), simulator(cmdp), 3)


def test_two_learners_share_settings_and_no_state() -> None:
    costs = PriorCosts(drift=QUICK)
    one, other = bandit(costs), bandit(costs)
    pull(one, 0, 1.0)
    assert one.costs.samples.sum() == 1 and other.costs.samples.sum() == 0 and not list(costs.buffers())


def test_what_a_cost_model_does_not_look_at_is_refused() -> None:
    with pytest.raises(InvalidInput, match="bonus_scale means nothing to PriorCosts"):
        bandit(PriorCosts(), bonus_scale=0.1)
    with pytest.raises(InvalidInput, match="costs is 'prior'; it must be a cost model"):
        bandit("prior")
    with pytest.raises(InvalidInput, match="drift is 40"):
        PriorCosts(drift=40)  # type: ignore[arg-type]


def test_gradients_flow_to_a_margin() -> None:
    margin = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    learner = tc.WCOPS(LAYOUT, 1, 100, costs=PriorCosts(margin=margin), **{**SMALL, "bonus_scale": None})
    with using("torch"):
        play(learner, World(LAYOUT, 1, 0, [0]), 5)
    slope = torch.autograd.grad(learner.costs.optimistic(learner).sum(), margin)[0]
    assert slope.isfinite() and slope != 0
