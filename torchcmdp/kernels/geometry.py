"""The numbering that kernels work in: states, pairs and entries of a layout one after the other, without padding."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torchcmdp.layout import Layout

# Multiplications of a block factorisation, per entry, from which conjugate gradients are the cheaper way.
SPARSE = 2000
# Pairs that a sweep takes side by side.
ABREAST = 4


class Geometry(NamedTuple):
    """States are numbered layer by layer; pair p = state * actions + a; an entry is a pair with one of its possible successors.

    A pair whose action its state does not have is there, without entries: kernels pass it over.

    Attributes:
        first: `(L + 1)`, the first state of each decision layer; n = first[L] is also the number of the terminal state.
        actions: A.
        row: `(P + 1)`, the entries of pair p are row[p] .. row[p + 1] - 1; E = row[P].
        successor: `(E)`, the state each entry leads to, ascending within a pair.
        dense: `(L)`, one where every pair of the layer has the whole next layer as successors, in its order.
        lane, stride: `(P)` each: where the first successor of a pair is in memory that has a dense layer's pairs side by side, and
            how far it is from one successor to the next; zero where the layer is not dense or leads to a single state.
        state_at, pair_at, entry_at: positions in the flattened padded (L x S), (L x S x A) and (L x S x A x K) tensors.
        diagonal: `(L + 1)`, where the n_k x n_k block of layer k starts in the block-tridiagonal Hessian.
        above: `(L + 1)`, where the n_{k-1} x n_k block above it starts.
        iterative: One where the Newton system is solved by conjugate gradients, because its blocks are wide and sparse.
    """

    first: np.ndarray
    actions: int
    row: np.ndarray
    successor: np.ndarray
    dense: np.ndarray
    lane: np.ndarray
    stride: np.ndarray
    state_at: np.ndarray
    pair_at: np.ndarray
    entry_at: np.ndarray
    diagonal: np.ndarray
    above: np.ndarray
    iterative: int


@lru_cache(maxsize=256)
def geometry_of(layout: Layout) -> Geometry:
    """The geometry of a layout: its successor lists, or where it has none every state of the next layer."""
    widths = np.array(layout.widths, dtype=np.int64)
    first = _starts(widths[:-1])
    state_at = np.flatnonzero(layout.state_mask().numpy())
    pair_at = (state_at[:, None] * layout.actions + np.arange(layout.actions)).flatten()
    lists = layout.successors().numpy().reshape(-1, layout.slots)[pair_at]
    layer_of_pair = pair_at // (layout.width * layout.actions)
    pair, slot = (lists >= 0).nonzero()
    counts = (lists >= 0).sum(1)
    whole = (counts == widths[layer_of_pair + 1]) | (counts == 0)
    in_order = ((lists == np.arange(layout.slots)) | (lists < 0)).all(1) & whole
    dense = np.ones(layout.layers, dtype=bool)
    np.logical_and.at(dense, layer_of_pair, in_order)
    pairs, places = np.bincount(layer_of_pair), np.where(dense & (widths[1:] > 1), widths[1:], 0)
    strides = np.where(places > 0, -(-pairs // ABREAST) * ABREAST, 0)
    within = np.arange(len(pair_at)) - _starts(pairs)[layer_of_pair]
    return Geometry(
        first=first,
        actions=layout.actions,
        row=_starts(counts),
        successor=first[1:][layer_of_pair[pair]] + lists[pair, slot],
        dense=dense.astype(np.int8),
        lane=_starts(strides * places)[layer_of_pair] + within,
        stride=strides[layer_of_pair],
        state_at=state_at,
        pair_at=pair_at,
        entry_at=pair_at[pair] * layout.slots + slot,
        diagonal=_starts(widths[:-1] ** 2),
        above=np.append(0, _starts(widths[1:-1] * widths[:-2])),
        iterative=int(_block_work(widths[:-1]) > SPARSE * counts.sum()),
    )


def _block_work(widths: np.ndarray) -> int:
    """Multiplications of a block Cholesky factorisation over layers of these widths."""
    wide, before = widths, np.append(0, widths[:-1])
    return int((wide**3 // 6 + wide**2 * before // 2 + wide * before**2 // 2).sum())


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where pieces of these sizes start when laid end to end; the last entry is their total."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
