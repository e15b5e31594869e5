"""The projection in graphs and without values: one operator under `torch.compile`, shapes alone on meta, right or refused."""

from __future__ import annotations

import pytest
import torch
from projection_instances import random_problem
from sparse import random_on, sparse_layout
from torch.autograd import forward_ad

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput
from torchcmdp.instances import random_cmdp
from torchcmdp.layout import Layout
from torchcmdp.nn import SafeOccupancy
from torchcmdp.projection import Newton, operators

SMALL = (1, 3, 2, 1)


def layer_of(cmdp: LayeredCMDP, **options) -> SafeOccupancy:
    return SafeOccupancy(cmdp.layout, cmdp.constraints, transitions=cmdp.transitions, costs=cmdp.costs, eta=2.0, **options)


def logits_of(cmdp: LayeredCMDP) -> torch.Tensor:
    noise = torch.randn(3, *cmdp.layout.pair_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (3 * cmdp.costs.sum(0) + noise) * cmdp.layout.pair_mask()


def in_graph(function, backend: str = "aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_graphs_without_a_break_around_two_layouts(backend):
    """One function with a dense and a sparse layer: each operator finds its own layout again."""
    dense, sparse = random_cmdp(SMALL, actions=2, constraints=2, seed=3), random_on(sparse_layout())
    layers = [layer_of(cmdp, solver=Newton(backend=backend)) for cmdp in (dense, sparse)]
    inputs = [logits_of(cmdp).requires_grad_() for cmdp in (dense, sparse)]

    def values(*logits):
        outputs = [layer(logits=each) for layer, each in zip(layers, logits, strict=True)]
        return sum((out.policy * cmdp.rewards).sum() for out, cmdp in zip(outputs, (dense, sparse), strict=True))

    expected = values(*inputs)
    found = in_graph(values)(*inputs)
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(expected, inputs)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    torch.testing.assert_close(torch.autograd.grad(found, inputs), gradients)


def test_vmap_inside_a_graph_is_one_larger_batch(monkeypatch):
    cmdp = random_cmdp(SMALL, actions=2, constraints=2, seed=3)
    layer, logits = layer_of(cmdp), logits_of(cmdp)
    expected, solve, sizes = layer(logits=logits).policy, operators.backends.solve, []
    monkeypatch.setattr(operators.backends, "solve", lambda inputs, *how: sizes.append(len(inputs[0])) or solve(inputs, *how))
    torch.testing.assert_close(in_graph(torch.vmap(lambda one: layer(logits=one).policy))(logits), expected)
    assert sizes == [3]


def test_what_a_graph_cannot_differentiate_is_refused():
    cmdp = random_cmdp(SMALL, actions=2, constraints=2, seed=3)
    layer, logits = layer_of(cmdp), logits_of(cmdp).requires_grad_()

    def value(logits):
        return (layer(logits=logits).policy * cmdp.rewards).sum()

    (gradient,) = torch.autograd.grad(in_graph(value, "eager")(logits), logits, create_graph=True)
    with pytest.raises(InvalidInput, match="first derivatives only"):
        gradient.square().sum().backward()
    compiled, plain = in_graph(value, "eager"), logits.detach()
    compiled(plain)  # traced without tangents
    for function in (compiled, in_graph(value)):
        with forward_ad.dual_level(), pytest.raises(Exception, match="forward mode"):
            function(forward_ad.make_dual(plain, plain))
    with pytest.raises(Exception, match="forward mode"):
        in_graph(lambda x: torch.func.jvp(value, (x,), (x,))[1])(plain)


def test_meta_has_the_shapes_types_and_derivatives():
    cmdp = random_on(sparse_layout())
    here, there = layer_of(cmdp), layer_of(cmdp).to("meta")
    logits = logits_of(cmdp)
    for real, shape in zip(here(logits=logits), there(logits=logits.to("meta")), strict=True):
        assert shape.is_meta and (shape.shape, shape.dtype) == (real.shape, real.dtype)
    leaf = logits.to("meta").requires_grad_()
    there(logits=leaf).policy.sum().backward()
    assert leaf.grad.is_meta and leaf.grad.shape == logits.shape
    assert torch.func.grad(lambda x: there(logits=x).policy.sum())(logits.to("meta")).shape == logits.shape
    assert torch.vmap(lambda x: there(logits=x).policy)(logits.to("meta")).shape == logits.shape


@pytest.mark.parametrize("layout", [Layout(SMALL, 2), sparse_layout(SMALL, 2, 2)], ids=["dense", "sparse"])
def test_operators_keep_the_rules_of_torch(layout):
    target, safe_set = random_problem(layout, 2, (2,), seed=0)
    inputs = (target, safe_set.lower, safe_set.upper, safe_set.costs)
    place = operators._place(layout)
    copies = [Layout(SMALL, 2, layout.successors(), layout.action_mask()) for _ in range(2)]
    assert operators._place(copies[0]) == operators._place(copies[1])
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    torch.library.opcheck(operators._project, (*leaves, place, "compiled", 200.0, 1e-11, 500, 0))
    outputs = operators._project(*inputs, place, "compiled", 200.0, 1e-11, 500, 0)
    torch.library.opcheck(operators._pull, (*inputs, outputs[2], outputs[3], outputs[0], place, "compiled"))
