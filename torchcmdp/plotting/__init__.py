"""Figures in one house style: curves with 95% bands, growth on logarithmic axes, and regret beside violation."""

from torchcmdp.plotting.curves import Panel, draw
from torchcmdp.plotting.results import balance, bounds_of, figures, growth_panels, overview, panels, plot_curves
from torchcmdp.plotting.style import INK, PALETTE, SMALL, TITLE, blank, darker, save

__all__ = ["Panel", "draw"]
__all__ += ["balance", "bounds_of", "figures", "growth_panels", "overview", "panels", "plot_curves"]
__all__ += ["INK", "PALETTE", "SMALL", "TITLE", "blank", "darker", "save"]
