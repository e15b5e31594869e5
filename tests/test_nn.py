"""The safe layer: what it returns is safe and nearest, its gradients are right, and it behaves as a module."""

from __future__ import annotations

import warnings

import pytest
import torch

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput
from torchcmdp.nn import SafeOccupancy
from torchcmdp.occupancy import expected_value, flow_residual, occupancy_of, pair_occupancy_of, uniform_policy
from torchcmdp.projection import Newton, project
from torchcmdp.safe_set import SafeSet


def tempted(cmdp: LayeredCMDP, *batch: int, seed: int = 0) -> torch.Tensor:
    """Logits of policies that like what is costly, so that the constraints bind."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*batch, *cmdp.layout.pair_shape, generator=generator, dtype=torch.float64)
    return (3 * cmdp.costs.sum(0) + 0.5 * noise) * cmdp.layout.pair_mask()


def made(cmdp: LayeredCMDP, **options) -> SafeOccupancy:
    return SafeOccupancy(cmdp.layout, cmdp.constraints, transitions=cmdp.transitions, costs=cmdp.costs, **options)


def safety(cmdp: LayeredCMDP, occupancy: torch.Tensor) -> torch.Tensor:
    return expected_value(cmdp.costs, occupancy.sum(-1).unsqueeze(-4))


def kl(q: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Unnormalised KL(q || reference) of a batch of occupancies."""
    return (torch.special.xlogy(q, q / reference.clamp_min(1e-300)) - q + reference).sum(dim=(-1, -2, -3, -4))


def test_logits_give_the_nearest_safe_policy(cmdp, random_policy):
    logits = tempted(cmdp, 4)
    output = made(cmdp)(logits=logits)
    policy = logits.softmax(-1) * cmdp.layout.pair_mask()
    reference = occupancy_of(policy, cmdp.transitions)
    assert (safety(cmdp, reference).amax(-1) > 0.05).all()  # or there would be nothing to protect from
    assert safety(cmdp, output.occupancy).max() < 1e-9 and (output.multipliers.amax(-1) > 0).all() and (output.status == 0).all()
    assert flow_residual(output.occupancy).max() < 1e-9
    torch.testing.assert_close(output.occupancy, occupancy_of(output.policy, cmdp.transitions))
    # no mixture with another safe occupancy is nearer
    others = made(cmdp)(logits=torch.log(random_policy(cmdp.layout, 4, seed=1) + 1e-9)).occupancy
    for weight in (0.01, 0.1, 0.5):
        mixture = (1 - weight) * output.occupancy + weight * others
        assert (kl(mixture, reference) >= kl(output.occupancy, reference) - 1e-12).all()


def test_a_safe_policy_passes_unchanged(cmdp):
    logits = -tempted(cmdp, 3)
    policy = logits.softmax(-1) * cmdp.layout.pair_mask()
    assert safety(cmdp, occupancy_of(policy, cmdp.transitions)).max() < 0
    torch.testing.assert_close(made(cmdp)(logits=logits).policy, policy)


def test_losses_are_projected_from_the_uniform_policy(cmdp):
    loss = -cmdp.costs.sum(0)
    output = made(cmdp, eta=3.0)(loss)
    uniform = occupancy_of(uniform_policy(cmdp.layout), cmdp.transitions)
    safe_set = SafeSet(cmdp.layout, cmdp.transitions, cmdp.transitions, cmdp.costs)
    torch.testing.assert_close(output.occupancy, project(loss, uniform, safe_set, 3.0).occupancy)
    assert output.multipliers.max() > 0


def test_a_call_takes_precedence_over_the_constructor(cmdp):
    loss, reference = -cmdp.costs.sum(0), occupancy_of(uniform_policy(cmdp.layout), cmdp.transitions)
    lower, upper = 0.9 * cmdp.transitions, (1.1 * cmdp.transitions).clamp(max=1)
    bare = SafeOccupancy(cmdp.layout, cmdp.constraints)
    given = bare(loss, cmdp.costs, reference=reference, lower=lower, upper=upper, eta=2.0)
    expected = project(loss, reference, SafeSet(cmdp.layout, lower, upper, cmdp.costs), 2.0)
    assert torch.equal(given.occupancy, expected.occupancy)
    full = SafeOccupancy(cmdp.layout, cmdp.constraints, lower=cmdp.transitions, upper=upper, costs=-cmdp.costs, eta=9.0)
    assert torch.equal(full(loss, cmdp.costs, reference=reference, lower=lower, eta=2.0).occupancy, expected.occupancy)


def test_gradients(cmdp):
    layer, mask = made(cmdp), cmdp.layout.pair_mask()
    edges = cmdp.layout.transition_mask()
    logits, loss = tempted(cmdp, 2)[..., mask], torch.rand(2, int(mask.sum()), dtype=torch.float64)

    def pairs(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*values.shape[:-1], *mask.shape, dtype=values.dtype).masked_scatter(mask, values)

    def output(logits, loss, costs, eta, transitions):
        P = torch.zeros(edges.shape, dtype=transitions.dtype).masked_scatter(edges, transitions)
        result = layer(pairs(loss), pairs(costs), logits=pairs(logits), eta=eta, transitions=P)
        assert (result.multipliers.amax(-1) > 0).all()  # the gradient goes through an active constraint
        return result.policy, result.occupancy

    eta = torch.tensor([0.5, 1.5], dtype=torch.float64)
    inputs = (logits, loss, cmdp.costs[..., mask], eta, cmdp.transitions[edges])
    assert torch.autograd.gradcheck(output, [x.clone().requires_grad_() for x in inputs], fast_mode=True)


def test_gradients_in_reference_and_intervals(cmdp):
    loss, edges = -2 * cmdp.costs.sum(0), cmdp.layout.transition_mask()
    layer = SafeOccupancy(cmdp.layout, cmdp.constraints, costs=cmdp.costs)
    reference = occupancy_of(uniform_policy(cmdp.layout), cmdp.transitions)

    def output(*values):
        reference, lower, upper = (torch.zeros(edges.shape, dtype=v.dtype).masked_scatter(edges, v) for v in values)
        return layer(loss, reference=reference, lower=lower, upper=upper).occupancy

    tensors = (reference, 0.8 * cmdp.transitions, 1.2 * cmdp.transitions)
    assert torch.autograd.gradcheck(output, [x[edges].clone().requires_grad_() for x in tensors], fast_mode=True)


def test_float32_agrees_with_float64(cmdp):
    layer = made(cmdp).to(torch.float32)
    assert layer.transitions.dtype == layer.costs.dtype == torch.float32
    logits = tempted(cmdp, 4)
    output, exact = layer(logits=logits.float()), made(cmdp)(logits=logits)
    assert output.occupancy.dtype == output.policy.dtype == torch.float32
    torch.testing.assert_close(output.policy.double(), exact.policy, atol=1e-5, rtol=1e-4)
    assert (output.policy[..., ~cmdp.layout.pair_mask()] == 0).all() and output.status.max() == 0


def test_batch_shapes_broadcast(cmdp):
    logits = tempted(cmdp, 3, 2)
    costs = torch.stack([cmdp.costs, 0.5 * cmdp.costs - 0.01 * cmdp.layout.pair_mask()])
    output = made(cmdp)(costs=costs, logits=logits)
    assert output.policy.shape == (3, 2, *cmdp.layout.pair_shape) and output.multipliers.shape == (3, 2, 2)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(output.policy[i, j], made(cmdp)(costs=costs[j], logits=logits[i, j]).policy)


def test_state_dict_and_parameters(cmdp):
    layer = made(cmdp, eta=torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    assert [name for name, _ in layer.named_parameters()] == ["eta"] and set(layer.state_dict()) == {"transitions", "costs", "eta"}
    other = SafeOccupancy(
        cmdp.layout, cmdp.constraints, transitions=torch.zeros_like(cmdp.transitions), costs=torch.zeros_like(cmdp.costs), eta=0.0
    )
    other.load_state_dict(layer.state_dict())
    loss = -cmdp.costs.sum(0)
    assert torch.equal(layer(loss).occupancy, other(loss).occupancy)
    layer(loss).policy.square().sum().backward()
    assert layer.eta.grad is not None and layer.eta.grad != 0


@pytest.mark.parametrize("device", ["meta"])
def test_it_moves_with_its_network(cmdp, device):
    layer = made(cmdp, solver=Newton(fixed_iterations=3)).to(device)
    output = layer(logits=tempted(cmdp, 2).to(device))
    assert output.policy.device.type == device and output.policy.shape == (2, *cmdp.layout.pair_shape)


def network(cmdp: LayeredCMDP) -> torch.nn.Sequential:
    torch.manual_seed(0)
    shape = cmdp.layout.pair_shape
    head = torch.nn.Linear(8, shape[0] * shape[1] * shape[2], dtype=torch.float64)
    body = torch.nn.Linear(5, 8, dtype=torch.float64)
    return torch.nn.Sequential(body, torch.nn.Tanh(), head, torch.nn.Unflatten(-1, shape), made(cmdp, eta=20.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_network_gives_the_same_answer_and_gradient(cmdp, backend):
    net, contexts = network(cmdp), torch.randn(4, 5, dtype=torch.float64)
    assert net(contexts).multipliers.max() > 0

    def gradients(model) -> tuple[torch.Tensor, list[torch.Tensor]]:
        net.zero_grad()
        policy = model(contexts).policy
        (policy * cmdp.rewards).sum().backward()
        return policy, [p.grad.clone() for p in net.parameters()]

    policy, expected = gradients(net)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled_policy, found = gradients(torch.compile(net, backend=backend))
    torch.testing.assert_close(compiled_policy, policy)
    torch.testing.assert_close(found, expected)
    assert max(g.abs().max() for g in expected) > 0


def test_a_few_gradient_steps_raise_the_reward_and_stay_safe(cmdp):
    net, contexts = network(cmdp), torch.randn(4, 5, dtype=torch.float64)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    values = []
    for _ in range(15):
        output = net(contexts)
        value = expected_value(cmdp.rewards, pair_occupancy_of(output.policy, cmdp.transitions)).mean()
        optimiser.zero_grad()
        (-value).backward()
        optimiser.step()
        assert safety(cmdp, output.occupancy).max() < 1e-9
        values.append(float(value.detach()))
    assert values[-1] > values[0] + 0.05


def test_an_impossible_constraint_says_so(cmdp):
    costs = cmdp.layout.pair_mask().double().expand(cmdp.constraints, -1, -1, -1)
    assert made(cmdp)(costs=costs, logits=tempted(cmdp)).status == 1


def test_both_solvers_agree(cmdp):
    logits = tempted(cmdp, 2)
    newton, cone = made(cmdp)(logits=logits), made(cmdp, solver="cvxpy")(logits=logits)
    torch.testing.assert_close(newton.policy, cone.policy, atol=1e-4, rtol=1e-3)


def test_without_constraints(cmdp):
    layer = SafeOccupancy(cmdp.layout, 0, transitions=cmdp.transitions, costs=cmdp.costs[:0])
    logits = tempted(cmdp)
    torch.testing.assert_close(layer(logits=logits).policy, logits.softmax(-1) * cmdp.layout.pair_mask())


def test_arrays_are_taken_where_tensors_are_meant(cmdp):
    layer, logits = made(cmdp), tempted(cmdp)
    torch.testing.assert_close(layer(logits=logits.numpy()).policy, layer(logits=logits).policy)
    given = layer(logits.numpy(), cmdp.costs.numpy(), transitions=cmdp.transitions.numpy())
    torch.testing.assert_close(given.policy, layer(logits).policy)


def test_mistakes_get_a_sentence(cmdp):
    layer, loss = made(cmdp), torch.zeros(cmdp.layout.pair_shape, dtype=torch.float64)
    bare = SafeOccupancy(cmdp.layout, cmdp.constraints)
    intervals = SafeOccupancy(cmdp.layout, 2, lower=cmdp.transitions, upper=cmdp.transitions, costs=cmdp.costs)
    for words, call in {
        "needs a loss, logits or a reference": lambda: layer(),
        "needs costs": lambda: bare(loss),
        "needs transitions, or both lower and upper": lambda: bare(loss, cmdp.costs),
        "m = 2 constraints": lambda: layer(loss, cmdp.costs[:1]),
        "logits and a reference": lambda: layer(logits=loss, reference=cmdp.transitions),
        "intervals alone": lambda: intervals(logits=loss),
        "did you mean 'newton'": lambda: made(cmdp, solver="newtom"),
        "loss, reference or eta cannot be used at instance 0": lambda: layer(loss / 0),
        "costs has shape": lambda: SafeOccupancy(cmdp.layout, 2, costs=cmdp.costs[..., :1]),
        r"loss is \[0.0\]; it must be a torch tensor": lambda: layer([0.0]),
        "transitions sum to 3 at layer 0, state 0, action 0": lambda: SafeOccupancy(
            cmdp.layout, 2, transitions=3 * cmdp.transitions
        ),
        "transitions sum to nan at layer 0": lambda: SafeOccupancy(cmdp.layout, 2, transitions=cmdp.transitions / 0),
    }.items():
        with pytest.raises(InvalidInput, match=words):
            call()
