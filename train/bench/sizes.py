"""What an episode and a projection cost where few successors are possible: on environments people know, and as sizes grow."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

import torchcmdp as tc

from ..program import Among, Count, bar, begin, one_thread, plus_minus, publish, table
from . import BenchOptions, median_seconds

WORLDS = ("frozen-lake", "taxi")
# Seconds of CPU of an episode of one run before there were successor lists, and the aims.
BEFORE = {"frozen-lake": 0.340, "taxi": 36.0}
AIMS = {"frozen-lake": 0.340 / 20, "taxi": 0.5}
WIDTH, ACTIONS, SLOTS = 8, 3, 3


@dataclass
class Options(BenchOptions):
    """Time episodes of WC-OPS on FrozenLake 8x8 with 50 steps and Taxi with 30 steps and its drawn start, one run, one core.

    Each is measured in a process of its own, for its peak memory: with successor lists, and without where that is asked for. Then
    projections of random instances over lists are timed while layers, and successors of a pair, grow in number; the exponent b
    says that the time of a Newton iteration grows as size^b, fitted to the larger half. Written to LOGDIR/NAME/sizes.md.

    Examples:
      python -m train bench sizes
      python -m train bench sizes --dense frozen-lake --episodes 50
    """

    worlds: Annotated[tuple[str, ...], Among(WORLDS)] = WORLDS  # Environments: frozen-lake, taxi.
    dense: Annotated[tuple[str, ...], Among(WORLDS)] = ("frozen-lake",)
    """Which of them also without lists; taxi then takes 5 GB and minutes."""
    episodes: Count = 20  # Episodes of a measurement, after two that are not timed.
    layers: tuple[Count, ...] = (8, 16, 32, 64, 128)  # Layers of 8 states, 3 actions, 3 successors a pair; at least three sizes.
    successors: tuple[Count, ...] = (2, 4, 8, 16)  # Successors of a pair in 8 layers of 16 states, 3 actions; at least three sizes.
    repeats: Count = 5  # Measurements of each size; the intervals of the exponents are 95% over them.


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    options, folder = begin(Options, arguments, "bench sizes")
    options.check_sizes("layers", "successors")
    asked = [(world, dense) for world in options.worlds for dense in (False, True) if not dense or world in options.dense]
    rows = []
    for each in bar(asked, "environments", leave=False):
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process that has done nothing else
            rows.append(pool.apply(measure, (*each, options.episodes, options.seed)))
    header = ["environment", "successors", "L x S x A x K", "transitions", "ms CPU per episode", "before / now", "aim"]
    text = table([*header, "peak MB", "of which not libraries"], rows, "episodes")
    times, fits = [], []
    with one_thread():
        for name in ("layers", "successors"):
            of_sizes, exponents = grow(name, options)
            times += of_sizes
            fits += exponents
    text += f"\n\n{table(['what grows', 'size', 'transitions', 'us per Newton iteration', 'ns per transition'], times, 'times')}"
    text += f"\n\n{table(['what grows', 'against', 'cost grows as its power'], fits, 'exponents')}"
    publish(folder / "sizes.md", text)
    return 0


def measure(world: str, dense: bool, episodes: int, seed: int) -> list[str]:
    """Episodes of WC-OPS with the paper's constants, one run: the row of the table. The peak is that of this process."""
    from torchcmdp.adapters import tabular

    torch.set_num_threads(1)
    small = tc.two_path_cmdp()  # which loads all kernels, whose memory is not the problem's
    time_episodes(small, tc.Bernoulli(small.costs, low=-1), 1, 0, seed)
    before = _peak()
    if world == "taxi":
        imported = tabular.from_gymnasium("Taxi-v4", 30, tabular.broke_a_rule, 1.0)
    else:
        imported = tabular.from_gymnasium("FrozenLake8x8-v1", 50, tabular.fell_in_a_hole, 0.1)
    cmdp = imported.cmdp
    if dense:
        cmdp = tc.LayeredCMDP(cmdp.layout.full, cmdp.layout.dense(cmdp.transitions), cmdp.rewards, cmdp.costs)
    seconds = time_episodes(cmdp, imported.cost_process(), 2, episodes, seed)
    aim = "-" if dense else f"{1e3 * AIMS[world]:,.0f} ms, {'met' if seconds <= AIMS[world] else 'missed'}"
    sizes = [" x ".join(map(str, cmdp.layout.transition_shape)), f"{int(cmdp.layout.transition_mask().sum()):,}"]
    times = [f"{1e3 * seconds:,.1f}", f"{BEFORE[world] / seconds:,.1f}x", aim]
    peak = _peak()
    return [world, "all of the next layer" if dense else "lists", *sizes, *times, f"{peak:,.0f}", f"{peak - before:,.0f}"]


def time_episodes(cmdp: tc.LayeredCMDP, costs: tc.Process, untimed: int, episodes: int, seed: int) -> float:
    """CPU seconds of an episode, in the mean after some that are not timed."""
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), costs, seed=seed)
    learner = tc.WCOPS.for_env(env, horizon=10_000)
    for t in range(untimed + episodes):
        if t == untimed:
            start = time.process_time()
        learner.update(env.rollout(learner.policy))
    return (time.process_time() - start) / episodes if episodes else 0.0


def _peak() -> float:
    """Of the memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def grow(name: str, options: Options) -> tuple[list[list[str]], list[list[str]]]:
    """Time projections of one instance while one size grows: rows of the times of an iteration, and of their exponents."""
    sizes, transitions, rows = sorted(set(getattr(options, name))), [], []
    seconds = torch.zeros(options.repeats, len(sizes), dtype=torch.float64)
    for j, size in enumerate(bar(sizes, name, leave=False)):
        layout = random_layout(size, WIDTH, SLOTS, options.seed) if name == "layers" else random_layout(8, 16, size, options.seed)
        loss, safe_set, reference = instance(layout, options.seed)
        iterations = int(tc.project(loss, reference, safe_set, 1.0).iterations)
        transitions.append(entries := int(layout.transition_mask().sum()))
        for repeat in range(options.repeats):
            seconds[repeat, j] = median_seconds(lambda: tc.project(loss, reference, safe_set, 1.0), 5, 0.05) / max(iterations, 1)  # noqa: B023
        middle = float(seconds[:, j].median())
        rows.append([name, f"{size:,}", f"{entries:,}", f"{1e6 * middle:,.1f}", f"{1e9 * middle / entries:,.0f}"])
    fits = []
    for what, against in ((name, sizes), ("transitions", transitions)):
        mean, half = tc.growth_exponent(torch.tensor(against, dtype=torch.float64), seconds)
        fits.append([name, what, plus_minus(float(mean), float(half), ".2f")])
    return rows, fits


def random_layout(layers: int, width: int, successors: int, seed: int) -> tc.Layout:
    """So many layers of states between the first and the last, in which every pair has that many successors or all there are.

    The first layers widen as fast as every state can still be reached; of each layer the states are dealt to the pairs before it.
    """
    rng = np.random.default_rng(seed)
    inner = [min(width, ACTIONS * successors)]
    while len(inner) < layers:
        inner.append(min(width, inner[-1] * ACTIONS * successors))
    widths = (1, *inner, 1)
    lists = np.full((len(widths) - 1, width, ACTIONS, min(successors, width)), -1)
    for k, following in enumerate(widths[1:]):
        slots = min(lists.shape[-1], following)
        dealt = rng.permutation(following)[np.arange(widths[k] * ACTIONS * slots) % following]
        lists[k, : widths[k], :, :slots] = np.sort(dealt.reshape(widths[k], ACTIONS, slots))
    return tc.Layout(widths, ACTIONS, lists)


def instance(layout: tc.Layout, seed: int) -> tuple[Tensor, tc.SafeSet, Tensor]:
    """A loss, wide intervals with two constraints, and the uniform occupancy."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.rand(layout.pair_shape, generator=generator, dtype=torch.float64) * layout.pair_mask()
    costs = (torch.rand(2, *layout.pair_shape, generator=generator, dtype=torch.float64) - 0.6) * layout.pair_mask()
    center = layout.uniform_transitions()
    safe_set = tc.SafeSet(layout, 0.2 * center, (3 * center).clamp_max(1), costs)
    return loss, safe_set, tc.uniform_occupancy(layout)
