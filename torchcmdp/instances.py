"""CMDPs to try things on: random ones with a chosen kind of feasibility, and two small ones solved by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief, check_memory, check_place, choice, number, whole_number
from torchcmdp.layout import Layout
from torchcmdp.planning import slater_gap

FEASIBILITIES = ("any", "feasible", "strict", "binding", "tight")
MAX_DRAWS = 1000


def random_cmdp(
    widths: Sequence[int] = (1, 4, 4, 4, 1),
    actions: int = 3,
    constraints: int = 2,
    seed: int = 0,
    *,
    feasibility: str = "feasible",
    margin: float = 0.1,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> LayeredCMDP:
    """Transitions from Dirichlet(1), rewards from U[0, 1], costs from U[-1, 1] and drawn again until they are as feasible as asked.

    Args:
        widths: Layer widths, beginning and ending with 1.
        actions: Number of actions.
        constraints: m; zero for none.
        seed: Of this instance alone; the global generator is neither read nor moved.
        feasibility: "any" asks nothing; "feasible" asks for a safe policy; "strict" for one that is safe by `margin`, that is
            `slater_gap >= margin`; "binding" shifts the costs so that the safest policy is safe by `margin` and no more, or by
            less where they then have to be scaled back into [-1, 1]; "tight" is that with margin 0: no policy is strictly safe.
        margin: For "strict" and "binding".
        dtype, device: Of the result; the numbers drawn do not depend on them.
    """
    layout = Layout(widths, actions)
    choice("feasibility", feasibility, FEASIBILITIES)
    constraints = whole_number("constraints", constraints, least=0)
    seed = whole_number("seed", seed, least=0)
    if seed >= 2**63:
        raise InvalidInput(f"seed is {brief(seed)}; it must be below 2**63.")
    margin = number("margin", margin)
    check_place(dtype, device)
    check_memory(f"{constraints} costs over widths {layout.widths}", 2 * constraints * math.prod(layout.pair_shape))
    if feasibility in ("binding", "tight") and constraints == 0:
        raise InvalidInput(f'feasibility "{feasibility}" needs at least one constraint, and constraints is 0.')
    generator = torch.Generator().manual_seed(seed)
    # Dirichlet(1): exponential variables divided by their sum
    weights = torch.empty(layout.transition_shape, dtype=torch.float64).exponential_(generator=generator) * layout.transition_mask()
    total = weights.sum(-1, keepdim=True)
    transitions = weights / torch.where(total > 0, total, 1)
    rewards = _uniform(layout.pair_shape, generator) * layout.pair_mask()
    needed = {"feasible": 0.0, "strict": margin}.get(feasibility, -torch.inf)
    gap = -torch.inf
    for _ in range(MAX_DRAWS):
        costs = (2 * _uniform((constraints, *layout.pair_shape), generator) - 1) * layout.pair_mask()
        cmdp = LayeredCMDP(layout, transitions, rewards, costs).to(dtype=dtype)
        if feasibility in ("binding", "tight"):
            cmdp = _shifted(cmdp, margin if feasibility == "binding" else 0.0)
        elif feasibility != "any":
            gap = max(gap, drawn := float(slater_gap(cmdp)))
            if drawn < needed:
                continue
        return cmdp.to(device)
    raise InvalidInput(
        f"None of {MAX_DRAWS} draws of {constraints} costs over widths {layout.widths} has a Slater gap of at least {needed:g}, "
        f"the best has {gap:g}; ask for a smaller margin, fewer constraints or more actions."
    )


def single_state_cmdp(rewards: Sequence[float], costs: Sequence[Sequence[float]] = ()) -> LayeredCMDP:
    """A bandit: one state, one step, an action an arm; the mean reward of each of A arms, and m lists of their mean costs."""
    for name, values in (("rewards", rewards), ("costs", costs)):
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise InvalidInput(f"{name} is {brief(values)}; it must be a list.")
    for a, value in enumerate(rewards):
        number(f"the reward of arm {a}", value)
    layout = Layout((1, 1), len(rewards))
    for i, row in enumerate(costs):
        for value in row if isinstance(row, Sequence) else ():
            number(f"a cost of constraint {i}", value)
        if not isinstance(row, Sequence) or len(row) != len(rewards):
            raise InvalidInput(f"costs of constraint {i} are {row}; expected a list of {len(rewards)} numbers, one an arm.")
    g = torch.tensor(costs, dtype=torch.float64).reshape(len(costs), *layout.pair_shape)
    r = torch.tensor(rewards, dtype=torch.float64).reshape(layout.pair_shape)
    return LayeredCMDP(layout, torch.ones(layout.transition_shape, dtype=torch.float64), r, g)


def two_path_cmdp() -> LayeredCMDP:
    """A fast but costly path and a slow but safe one: widths (1, 2, 1), two actions, one constraint, everything known by hand.

    In x_0 action 0 reaches the fast state with probability 0.8 and the slow one otherwise, action 1 always reaches the slow one;
    both give nothing and cost nothing. In the fast state action 0 gives 1 at cost 0.6 and action 1 gives 0 at cost 1. In the slow
    state action 0 gives 0.2 at cost -0.2 and action 1 gives 0 at cost -0.2. Action 1 is therefore never useful in the second
    layer.

    With p the probability of action 0 in x_0, the cost is 0.6 * 0.8 p - 0.2 (1 - 0.8 p) = 0.64 p - 0.2 and the reward 0.2 + 0.64
    p. The best policy plays p = 1 and has value 0.84. The best safe one plays p = 0.3125, mixing both actions, and has value 0.4.
    The Slater gap is 0.2, at p = 0.
    """
    layout = Layout((1, 2, 1), 2)
    transitions = torch.zeros(layout.transition_shape, dtype=torch.float64)
    transitions[0, 0] = torch.tensor([[0.8, 0.2], [0.0, 1.0]], dtype=torch.float64)
    transitions[1, :, :, 0] = 1
    rewards = torch.zeros(layout.pair_shape, dtype=torch.float64)
    rewards[1] = torch.tensor([[1.0, 0.0], [0.2, 0.0]], dtype=torch.float64)
    costs = torch.zeros(1, *layout.pair_shape, dtype=torch.float64)
    costs[0, 1] = torch.tensor([[0.6, 1.0], [-0.2, -0.2]], dtype=torch.float64)
    return LayeredCMDP(layout, transitions, rewards, costs)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _shifted(cmdp: LayeredCMDP, gap: float) -> LayeredCMDP:
    """Shift all costs alike so that the Slater gap becomes `gap`, and scale them back into [-1, 1], which keeps its sign."""
    # a few units of rounding on the safe side, so that the safe set stays nonempty in this precision
    slack = 4 * torch.finfo(cmdp.dtype).eps
    shift = (slater_gap(cmdp) - gap) / cmdp.layout.layers - slack
    costs = (cmdp.costs + shift) * cmdp.layout.pair_mask(cmdp.device)
    return LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, costs / costs.abs().amax().clamp_min(1))
