"""The constants of `WCOPS.practical`, as multiples of the paper's, and the study that found them."""

from __future__ import annotations

# Placeholder
PRACTICAL_SCALES = {"eta_scale": 1.0, "gamma_scale": 1.0, "bonus_scale": 0.1, "width_scale": 0.1}
