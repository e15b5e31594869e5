"""What the programs that train networks share: one small network a seed, and curves of several methods side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcmdp.events import HALF_WIDTH

from .program import bar, mean_and_half, with_interval, writer_of

REWARD, UNSAFE = "Metrics/EpRet", "Violation/positive"  # what curves are of


class SeedNetworks(nn.Module):
    """As many independent networks as there are seeds, trained as one: `(runs x ... x sizes[0])` to `(runs x ... x sizes[-1])`.

    Args:
        sizes: Units of each layer, tanh between them.
        runs: How many networks.
        seed: Network j begins with weights of seed (seed, j), whoever else is trained.
        gain: Of the weights at the beginning.
    """

    def __init__(self, sizes: Sequence[int], runs: int, seed: int, gain: float = 1.0) -> None:
        super().__init__()
        generators = [torch.Generator().manual_seed(seed * 100_003 + run) for run in range(runs)]

        def weights(rows: int, columns: int) -> nn.Parameter:
            draws = [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for generator in generators]
            return nn.Parameter(torch.stack(draws) * (gain / rows**0.5))

        self.weights = nn.ParameterList([weights(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)])
        self.biases = nn.ParameterList([torch.zeros(runs, 1, b, dtype=torch.float64) for b in sizes[1:]])

    def forward(self, x: Tensor) -> Tensor:
        """Network j applied to `x[j]`."""
        shape = x.shape[1:-1]
        x = x.flatten(1, -2)
        for j, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            x = x if j + 1 == len(self.weights) else x.tanh()
        return x.unflatten(1, shape)


class Curves:
    """One method's numbers over its training, `(runs,)` each, kept and written to TensorBoard where there is a folder for that."""

    def __init__(self, folder: Path | None) -> None:
        self._writer = None if folder is None else writer_of(folder)
        self._points: list[tuple[int, dict[str, Tensor]]] = []

    def add(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Keep one point, by tag, at a place of the horizontal axis."""
        kept = {tag: value.detach().clone() for tag, value in values.items()}
        self._points.append((step, kept))
        if self._writer is not None:
            row = {}
            for tag, value in kept.items():
                row[tag], row[tag + HALF_WIDTH] = mean_and_half(value)
            self._writer.point(step, row)

    @property
    def steps(self) -> Tensor:
        """Where the points are, `(points,)`."""
        return torch.tensor([step for step, _ in self._points])

    def __getitem__(self, tag: str) -> Tensor:
        """`(runs x points)`."""
        return torch.stack([values[tag] for _, values in self._points], dim=1)


def learn(
    network: nn.Module,
    options: Any,
    points: int,
    name: str,
    folder: Path | None,
    play: Callable[[], tuple[Tensor, Callable[[], Mapping[str, Tensor]]]],
    each: int = 1,
) -> Curves:
    """Take the gradient steps of the options with Adam; returns curves of about so many points, `each` apart for every step.

    `play` gives the loss of every network, and what measures it after the step.
    """
    optimiser, curves = torch.optim.Adam(network.parameters(), lr=options.learning_rate), Curves(folder)
    for step in bar(range(options.steps), name):
        loss, measure = play()
        optimiser.zero_grad()
        loss.sum().backward()
        optimiser.step()
        if step % max(1, options.steps // points) == 0 or step + 1 == options.steps:
            with torch.no_grad():
                curves.add((step + 1) * each, measure())
    return curves


def rounded(values: Tensor) -> str:
    """The mean over runs, `(runs,)`, and its 95% interval to three digits; what is rounded to zero has no sign."""
    return with_interval(values, "z.3f")
