"""The constants of `WCOPS.practical`, as multiples of the paper's, and the study that found them."""

from __future__ import annotations

# Placeholder
STUDY_COMMAND = "python -m train tune"
PRACTICAL_SCALES = {"eta_scale": 1.0, "gamma_scale": 1.0, "bonus_scale": 0.1, "width_scale": 0.1, "threshold_scale": 1e-3}
