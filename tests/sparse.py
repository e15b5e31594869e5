"""Layouts with successor lists and action masks, and CMDPs over them, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.layout import Layout


def spelled_out(layout: Layout) -> Layout:
    """The same layout with all of the next layer listed, in order."""
    return Layout(layout.widths, layout.actions, layout.successors(), layout.action_mask())


def sparse_layout(
    widths: Sequence[int] = (1, 4, 5, 4, 1), actions: int = 3, most: int = 3, seed: int = 0, masked: bool = True
) -> Layout:
    """Every pair has one to `most` successors, with gaps in the lists, and some states lack some of their actions."""
    rng = np.random.default_rng(seed)
    shape = (len(widths) - 1, max(widths), actions)
    mask = rng.random(shape) < 0.6
    mask[..., 0] |= ~mask.any(-1)
    mask[0] = True
    if not masked:
        mask[:] = True
    lists = np.full((*shape, most), -1)
    for k in range(shape[0]):
        pairs = np.argwhere(mask[k, : widths[k]]).tolist()
        for j, (x, a) in enumerate(pairs):
            own = list(range(j, widths[k + 1], len(pairs)))  # so that every state follows some pair
            others = [y for y in rng.permutation(widths[k + 1]).tolist() if y not in own]
            reached = own + others[: max(0, int(rng.integers(1, most + 1)) - len(own))]
            lists[k, x, a, np.sort(rng.permutation(most)[: len(reached)])] = np.sort(reached)
    return Layout(widths, actions, lists, mask if masked else None)


def supported(layout: Layout, support: np.ndarray) -> Layout:
    """The same layout with the successors listed, each in its place, at which `support` `(L x S x A x S)` is true."""
    return Layout(layout.widths, layout.actions, np.where(support, np.arange(layout.width), -1))


def random_on(layout: Layout, constraints: int = 2, seed: int = 0) -> LayeredCMDP:
    """Random transitions over the possible successors, random rewards and costs; one action of every state is safe."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(layout.transition_shape, generator=generator, dtype=torch.float64) + 0.05
    weights = weights * layout.transition_mask()
    total = weights.sum(-1, keepdim=True)
    rewards = torch.rand(layout.pair_shape, generator=generator, dtype=torch.float64) * layout.pair_mask()
    costs = 2 * torch.rand(constraints, *layout.pair_shape, generator=generator, dtype=torch.float64) - 1
    first = layout.pair_mask().to(torch.int8).argmax(-1, keepdim=True) == torch.arange(layout.actions)
    costs = torch.where(first, -costs.abs(), costs) * layout.pair_mask()
    return LayeredCMDP(layout, weights / torch.where(total > 0, total, 1), rewards, costs)


def on_full(cmdp: LayeredCMDP) -> LayeredCMDP:
    """The same CMDP without successor lists."""
    return LayeredCMDP(cmdp.layout.full, cmdp.layout.dense(cmdp.transitions), cmdp.rewards, cmdp.costs)
