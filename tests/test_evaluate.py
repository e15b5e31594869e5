"""Any policy, exactly evaluated; and what is taken, or refused in a sentence, where a policy or a process is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchcmdp as tc
from torchcmdp.adapters.steps import Steps

MakePolicy = Callable[..., Tensor]


def test_a_policy_has_the_value_and_the_violations_of_its_occupancy(cmdp: tc.LayeredCMDP, random_policy: MakePolicy) -> None:
    policies = random_policy(cmdp.layout, 5)
    found = tc.evaluate(policies, cmdp)
    assert found.value.shape == (5,) and found.violations.shape == (5, 2) and found.safe.shape == (5,)
    for j, policy in enumerate(policies):
        q = tc.pair_occupancy_of(policy, cmdp.transitions)
        assert float(found.value[j]) == pytest.approx(float((q * cmdp.rewards).sum()))
        assert found.violations[j].tolist() == pytest.approx((q * cmdp.costs).sum((-1, -2, -3)).tolist())
        assert bool(found.safe[j]) == bool((found.violations[j] <= 1e-9).all())
        alone = tc.evaluate(policy.numpy(), cmdp)
        assert torch.equal(alone.value, found.value[j]) and alone.safe.shape == ()


def test_the_safe_optimum_is_safe_and_the_best_policy_is_best(cmdp: tc.LayeredCMDP) -> None:
    safe, best = tc.safe_optimum(cmdp), tc.unconstrained_optimum(cmdp)
    found = tc.evaluate(tc.policy_of(safe.occupancy, cmdp.layout), cmdp)
    assert bool(found.safe) and float(found.value) == pytest.approx(float(safe.value))
    other = tc.evaluate(tc.policy_of(best.occupancy, cmdp.layout), cmdp)
    assert float(other.value) == pytest.approx(float(best.value)) and other.value >= found.value
    unsafe = tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, cmdp.costs.abs())
    assert not bool(tc.evaluate(tc.uniform_policy(cmdp.layout), unsafe).safe)


def test_one_policy_for_a_batch_of_cmdps(random_policy: MakePolicy) -> None:
    cmdps = [tc.random_cmdp((1, 3, 2, 1), 2, 2, seed=seed) for seed in range(3)]
    policy = random_policy(cmdps[0].layout)
    found = tc.evaluate(policy, tc.stack_cmdps(cmdps))
    assert found.value.tolist() == pytest.approx([float(tc.evaluate(policy, cmdp).value) for cmdp in cmdps])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_is_asked_for_all_states_one_hot(cmdp: tc.LayeredCMDP, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = cmdp.layout
    network = nn.Sequential(nn.Linear(layout.total_states, layout.actions), nn.Softmax(-1)).to(dtype)
    table = torch.zeros(layout.pair_shape, dtype=dtype)
    steps = Steps(cmdp, None, None, 1, None, None)
    for k in range(layout.layers):
        for x in range(layout.widths[k]):
            state = steps.observation(torch.tensor(k), torch.tensor(x), one_hot=True).to(dtype)
            table[k, x] = network(state).detach()
    one, two = tc.evaluate(network, cmdp), tc.evaluate(table, cmdp)
    assert float(one.value) == pytest.approx(float(two.value), rel=1e-6)
    assert one.violations.tolist() == pytest.approx(two.violations.tolist(), rel=1e-5, abs=1e-7)
    assert not one.value.requires_grad
    function = tc.evaluate(lambda states: np.full((len(states), layout.actions), 1 / layout.actions), cmdp)
    assert float(function.value) == pytest.approx(float(tc.evaluate(tc.uniform_policy(layout), cmdp).value))


class Owner:
    def policy(self, states: Tensor) -> Tensor:
        return states


def doubled(layout: tc.Layout) -> Tensor:
    policy = tc.uniform_policy(layout).clone()
    policy[1, 2] *= 2
    return policy


WRONG: dict[str, tuple[Callable[[tc.Layout], Any], str]] = {
    "sum": (doubled, "policy sums to 2 .*at layer 1, state 2; expected one"),
    "negative": (lambda layout: -tc.uniform_policy(layout), "expected a probability"),
    "nan": (lambda layout: tc.uniform_policy(layout) * torch.nan, "policy is nan .*at layer 0, state 0, action 0"),
    "none": (lambda layout: None, "policy is None; expected a tensor or an array of probabilities"),
    "list": (lambda layout: [1.0], "policy is a list; expected a tensor"),
    "integers": (lambda layout: torch.ones(layout.pair_shape, dtype=torch.int64), "policy is a tensor of torch.int64"),
    "shape": (lambda layout: torch.ones(2, 2), r"policy has shape \(2, 2\)"),
}


@pytest.mark.parametrize("how", ["rollout", "evaluate"])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_policy_gets_a_sentence(cmdp: tc.LayeredCMDP, kind: str, how: str) -> None:
    make, sentence = WRONG[kind]
    use = (
        tc.Simulator(cmdp, cmdp.rewards, cmdp.costs, runs=2).rollout
        if how == "rollout"
        else lambda policy: tc.evaluate(policy, cmdp)
    )
    with pytest.raises(tc.InvalidInput, match=sentence) as caught:
        use(make(cmdp.layout))
    assert "\n" not in str(caught.value)


def test_a_method_is_no_policy_to_play_and_no_table_to_evaluate(cmdp: tc.LayeredCMDP) -> None:
    with pytest.raises(tc.InvalidInput, match="policy is a method; .* such as what it returns"):
        tc.Simulator(cmdp, cmdp.rewards, cmdp.costs).rollout(Owner().policy)  # type: ignore[arg-type]
    with pytest.raises(
        tc.InvalidInput, match=r"the policy returned \(11, 11\) for the one-hot states; expected \(N x A\) = \(11, 3\)"
    ):
        tc.evaluate(Owner().policy, cmdp)


def test_the_padding_of_a_policy_is_not_looked_at(cmdp: tc.LayeredCMDP) -> None:
    """The softmax of logits that are -inf there is NaN there."""
    mask = cmdp.layout.pair_mask()
    policy = torch.zeros(cmdp.layout.pair_shape, dtype=torch.float64).masked_fill(~mask, -torch.inf).softmax(-1)
    assert policy.isnan().any()
    one, two = (tc.Simulator(cmdp, cmdp.rewards, cmdp.costs, runs=4) for _ in range(2))
    assert torch.equal(one.rollout(policy).states, two.rollout(tc.uniform_policy(cmdp.layout)).states)
    assert torch.equal(tc.evaluate(policy, cmdp).value, tc.evaluate(tc.uniform_policy(cmdp.layout), cmdp).value)


def test_an_array_is_played_like_a_tensor(cmdp: tc.LayeredCMDP, random_policy: MakePolicy) -> None:
    policy = random_policy(cmdp.layout, 4)
    one, two = (tc.Simulator(cmdp, cmdp.rewards, cmdp.costs, runs=4) for _ in range(2))
    assert torch.equal(one.rollout(policy.numpy()).actions, two.rollout(policy).actions)  # type: ignore[arg-type]


def test_a_tensor_where_a_process_is_meant_is_fixed(cmdp: tc.LayeredCMDP) -> None:
    given = tc.Simulator(cmdp, rewards=cmdp.rewards, costs=cmdp.costs.numpy(), runs=2)  # type: ignore[arg-type]
    meant = tc.Simulator(cmdp, tc.Fixed(cmdp.rewards), tc.Fixed(cmdp.costs), runs=2)
    assert isinstance(given.rewards, tc.Fixed) and given.config() == meant.config()
    policy = tc.uniform_policy(cmdp.layout)
    assert torch.equal(given.rollout(policy).costs, meant.rollout(policy).costs)


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        (None, r"rewards is None; expected a process such as Bernoulli\(cmdp.rewards\), or a tensor of means\.$"),
        ("text", "rewards is a str; .*: it has no stationary, values"),
        (tc.Bernoulli, "rewards is the class Bernoulli; expected a process"),
        (0.5, "rewards is a float"),
    ],
)
def test_what_is_no_process_gets_a_sentence(cmdp: tc.LayeredCMDP, rewards: Any, sentence: str) -> None:
    with pytest.raises(tc.InvalidInput, match=sentence):
        tc.Simulator(cmdp, rewards, cmdp.costs)


def test_unroll_takes_arrays() -> None:
    generator = np.random.default_rng(0)
    P, r, g = generator.dirichlet(np.ones(3), (3, 2)), generator.random((3, 2)), generator.uniform(-1, 1, (1, 3, 2))
    one, two = tc.unroll(P, r, g, horizon=3), tc.unroll(*(torch.from_numpy(x) for x in (P, r, g)), horizon=3)
    assert (
        torch.equal(one.transitions, two.transitions)
        and torch.equal(one.rewards, two.rewards)
        and torch.equal(one.costs, two.costs)
    )
