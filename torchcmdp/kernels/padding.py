"""From the padded memory of tensors to arrays without padding, and back: `places` are those of a geometry's pairs or entries."""

from __future__ import annotations

from torchcmdp.kernels.options import formula

LOAD, STORE = False, True  # which way


@formula
def move(places, padded, row, compact, back):
    """compact <- one row of a padded tensor, `(rows x padded)`; or `back` into it."""
    for j in range(compact.shape[0]):
        if back:
            padded[row, places[j]] = compact[j]
        else:
            compact[j] = padded[row, places[j]]


@formula
def move_each(places, padded, row, compact, back):
    """`move` for each constraint, `(rows x m x padded)`."""
    for i in range(compact.shape[0]):
        for j in range(compact.shape[1]):
            if back:
                padded[row, i, places[j]] = compact[i, j]
            else:
                compact[i, j] = padded[row, i, places[j]]
