"""The projection as a network layer: losses or policy logits go in, a safe occupancy and its policy come out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchcmdp.errors import InvalidInput, brief, check_kind, check_tensor, number, tensors_of, whole_number
from torchcmdp.hyperparameters import register
from torchcmdp.layout import Layout
from torchcmdp.occupancy import occupancy_of, policy_of, softmax_policy, uniform_occupancy
from torchcmdp.optimistic import largest_margin
from torchcmdp.planning import least_totals, refuse_unkept
from torchcmdp.projection import ProjectionSolver, project, projection_solver
from torchcmdp.safe_set import SafeSet
from torchcmdp.units import budgets_of

__all__ = ["SafeOccupancy", "SafeOutput"]


class SafeOutput(NamedTuple):
    """What `SafeOccupancy` returns.

    Attributes:
        occupancy: The safe occupancy, `(... x L x S x A x K)`.
        policy: Its policy, `(... x L x S x A)`.
        multipliers: Safety multipliers, `(... x m)`: positive where a constraint binds. Not differentiable.
        status: A `Status`, `(...)` int8: elastic says that no occupancy is safe and this one is the least unsafe.
    """

    occupancy: Tensor
    policy: Tensor
    multipliers: Tensor
    status: Tensor


class SafeOccupancy(nn.Module):
    """argmin eta * <loss, q> + KL(q || reference) over the safe occupancies, as a layer without weights of its own.

    With `logits` the reference is the occupancy of softmax(logits) under the transitions, so that with no loss the layer is a
    shield: it returns the nearest safe occupancy in KL. Every tensor may be given once here, where it becomes a buffer (or, if it
    is an `nn.Parameter`, a parameter), or in every call, which then takes precedence. The layer is differentiable in all of them,
    and batch shapes broadcast. `torch.compile` of a network around it leaves the layer out of the graph.

    Args:
        layout: Layer widths and actions.
        constraints: m.
        transitions: Known transitions, `(... x L x S x A x K)`.
        lower, upper: Or intervals that hold them, `(... x L x S x A x K)` each; then `transitions` serve the reference alone.
        costs: `(... x m x L x S x A)`.
        eta: Step size: a number, or a tensor of the batch shape.
        budget: What each cost may sum to over an episode in expectation, one for all or one each; zero by default.
        solver: "newton", "cvxpy", or a solver with settings. `multiplier_cap` is the penalty where no occupancy is safe; "newton"
            goes beyond it where one is, however costly.
    """

    transitions: Tensor | None
    lower: Tensor | None
    upper: Tensor | None
    costs: Tensor | None
    eta: Tensor
    budget: Tensor | None

    def __init__(
        self,
        layout: Layout,
        constraints: int,
        *,
        transitions: Tensor | None = None,
        lower: Tensor | None = None,
        upper: Tensor | None = None,
        costs: Tensor | None = None,
        eta: Tensor | float = 1.0,
        budget: object = None,
        solver: str | ProjectionSolver = "newton",
    ) -> None:
        super().__init__()
        check_kind("layout", layout, Layout, "a Layout")
        self.layout = layout
        self.constraints = whole_number("constraints", constraints, least=0)
        self.register_buffer("budget", None if budget is None else budgets_of(budget, self.constraints))
        self.solver = projection_solver(solver)
        transitions, lower, upper, costs = tensors_of(transitions, lower, upper, costs)
        tensors = {"transitions": transitions, "lower": lower, "upper": upper, "costs": costs}
        for name, tensor in tensors.items():
            if tensor is not None:
                layout.check_shape(name, tensor, kind="pair" if name == "costs" else "transition")
        if isinstance(eta, Tensor):
            check_tensor("eta", eta)
        step = eta if isinstance(eta, Tensor) else torch.tensor(number("eta", eta), dtype=torch.float64)
        for name, tensor in {**tensors, "eta": step}.items():
            register(self, name, tensor)
        self._check_rows()
        self._check_budget()

    def _check_rows(self) -> None:
        """Refuse transitions that are no distributions, since those that miss it by rounding are normalised."""
        if self.transitions is None or self.transitions.device.type == "meta":
            return
        sums = self.transitions.detach().sum(-1)
        # zeros are what a layer is made with that a state will be loaded into; nothing can be played with them
        wrong = ~(((sums - 1).abs() <= 1e-3) | (sums == 0)) & self.layout.pair_mask(sums.device)
        if wrong.any():
            index = wrong.nonzero()[0].tolist()
            raise InvalidInput(
                f"transitions sum to {sums[tuple(index)].item():.6g} at layer {index[-3]}, state {index[-2]}, action {index[-1]}; "
                "every row must sum to one."
            )

    def _check_budget(self) -> None:
        """Refuse budgets that no policy keeps, alone or together, where transitions and costs are known and not trained."""
        known = (self.transitions, self.costs)
        if self.budget is None or self.lower is not None or any(each is None or isinstance(each, nn.Parameter) for each in known):
            return
        costs, transitions = self._costs(None), self._normalised(self.transitions)
        if transitions is None or "meta" in (costs.device.type, transitions.device.type):
            return
        least = self.budget + least_totals(costs, transitions, self.layout)
        # a constraint is scale free, and each is judged where its largest cost is one
        size = costs.abs().amax((-3, -2, -1), keepdim=True)
        judged = SafeSet(self.layout, transitions, transitions, costs.double() / torch.where(size > 0, size, 1))
        one, scales = torch.ones_like(self.budget), 1 + self.budget.abs()
        refuse_unkept(least, self.budget, scales, one, self.layout.layers, lambda: largest_margin(judged)[0])

    def forward(
        self,
        loss: Tensor | None = None,
        costs: Tensor | None = None,
        *,
        logits: Tensor | None = None,
        reference: Tensor | None = None,
        transitions: Tensor | None = None,
        lower: Tensor | None = None,
        upper: Tensor | None = None,
        eta: Tensor | float | None = None,
    ) -> SafeOutput:
        """The safe occupancy and its policy.

        All are tensors, or arrays.

        Args:
            loss: `(... x L x S x A)`; zero by default.
            costs: `(... x m x L x S x A)`.
            logits: Of the policy to stay near to, `(... x L x S x A)`.
            reference: Or the occupancy to stay near to, `(... x L x S x A x K)`. Without either, that of the uniform policy.
            transitions, lower, upper, eta: As in the constructor.
        """
        if loss is None and logits is None and reference is None:
            raise InvalidInput("SafeOccupancy needs a loss, logits or a reference; it got none of them.")
        loss, costs, logits, reference, transitions, lower, upper = given = tensors_of(
            loss, costs, logits, reference, transitions, lower, upper
        )
        for name, tensor in zip(("loss", "costs", "logits", "reference", "transitions", "lower", "upper"), given, strict=True):
            if tensor is not None:
                check_tensor(name, tensor)
        costs = self._costs(costs)
        transitions = self._normalised(self.transitions if transitions is None else transitions)
        safe_set = SafeSet(self.layout, *self._intervals(transitions, lower, upper), costs)
        dtype = next(tensor.dtype for tensor in (loss, logits, reference) if tensor is not None)
        reference = self._reference(logits, reference, transitions, costs).to(dtype)
        if loss is None:
            loss = torch.zeros(self.layout.pair_shape, dtype=dtype, device=reference.device)
        eta = self.eta if eta is None else eta
        if isinstance(eta, Tensor) and eta.device.type == "meta" != loss.device.type:
            raise InvalidInput(f"eta is {brief(eta)} without values, on the meta device; the loss is on {loss.device}.")
        step = eta.to(loss) if isinstance(eta, Tensor) else eta
        result = project(loss, reference, safe_set, step, solver=self.solver)
        return SafeOutput(result.occupancy, policy_of(result.occupancy, self.layout), result.multipliers, result.status)

    def extra_repr(self) -> str:
        """What `print(layer)` shows between the brackets."""
        return f"widths={self.layout.widths}, actions={self.layout.actions}, constraints={self.constraints}"

    def _costs(self, costs: Tensor | None) -> Tensor:
        costs = self.costs if costs is None else costs
        if costs is None:
            raise InvalidInput("SafeOccupancy needs costs (m x L x S x A), in its constructor or in the call.")
        if costs.dim() < 4 or costs.shape[-4] != self.constraints:
            raise InvalidInput(
                f"costs has shape {tuple(costs.shape)}; expected (... x m x L x S x A) with m = {self.constraints} constraints."
            )
        if self.budget is None:
            return costs
        share = (self.budget.to(costs) / self.layout.layers)[:, None, None, None]  # an episode has one pair in every layer
        return (costs - share) * self.layout.pair_mask(costs.device)

    def _intervals(self, transitions: Tensor | None, lower: Tensor | None, upper: Tensor | None) -> tuple[Tensor, Tensor]:
        """Those of the call, else the layer's own, else the transitions as intervals of no width."""
        lower = self.lower if lower is None else lower
        upper = self.upper if upper is None else upper
        if lower is not None and upper is not None:
            return lower, upper
        if transitions is None or lower is not None or upper is not None:
            raise InvalidInput("SafeOccupancy needs transitions, or both lower and upper, in its constructor or in the call.")
        return transitions, transitions

    def _normalised(self, transitions: Tensor | None) -> Tensor | None:
        """Rows that sum to one in float64, which the solver works in, also where those given are rounded to float32."""
        if transitions is None:
            return None
        transitions = transitions.double()
        total = transitions.sum(-1, keepdim=True)
        return transitions / torch.where(total > 0, total, 1)

    def _reference(self, logits: Tensor | None, reference: Tensor | None, transitions: Tensor | None, costs: Tensor) -> Tensor:
        """The occupancy to stay near to."""
        if reference is not None:
            if logits is not None:
                raise InvalidInput("SafeOccupancy got logits and a reference; it can stay near to one of them only.")
            return reference
        if logits is None:
            if transitions is None:
                return uniform_occupancy(self.layout, dtype=costs.dtype, device=costs.device)
            logits = torch.zeros(self.layout.pair_shape, dtype=costs.dtype, device=costs.device)
        if transitions is None:
            raise InvalidInput("SafeOccupancy needs transitions to know the occupancy of logits; it was made with intervals alone.")
        self.layout.check_shape("logits", logits, kind="pair")
        return occupancy_of(softmax_policy(logits, self.layout).to(transitions), transitions, self.layout)
