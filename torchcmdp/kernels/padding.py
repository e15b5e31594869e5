"""From the padded memory of tensors to arrays without padding, and back: `places` are those of a geometry's pairs or entries."""

from __future__ import annotations

from torchcmdp.kernels.options import formula


@formula
def take(places, padded, row, compact):
    """compact <- one row of a padded tensor, `(rows x padded)`."""
    for j in range(compact.shape[0]):
        compact[j] = padded[row, places[j]]


@formula
def put(places, compact, row, padded):
    """One row of a padded tensor, `(rows x padded)`, <- compact."""
    for j in range(compact.shape[0]):
        padded[row, places[j]] = compact[j]


@formula
def take_each(places, padded, row, compact):
    """compact <- for each constraint one row of a padded tensor, `(rows x m x padded)`."""
    for i in range(compact.shape[0]):
        for j in range(compact.shape[1]):
            compact[i, j] = padded[row, i, places[j]]


@formula
def put_each(places, compact, row, padded):
    """For each constraint one row of a padded tensor, `(rows x m x padded)`, <- compact."""
    for i in range(compact.shape[0]):
        for j in range(compact.shape[1]):
            padded[row, i, places[j]] = compact[i, j]
