"""WC-OPS written down literally: lists over layers, explicit loops, product weights, a modelling language for the projection.

Slow on purpose, and sharing no code with the library: the tests compare the two.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict

import cvxpy as cp
import numpy as np

FLOOR = 1e-14

Layers = list[np.ndarray]
Pair = tuple[int, int, int]


def greedy_fill(lower: np.ndarray, upper: np.ndarray, values: np.ndarray) -> float:
    """max {p f : lower <= p <= upper, sum p = 1}: start at lower and give the rest to the largest values first."""
    p, rest = lower.copy(), 1.0 - lower.sum()
    for y in sorted(range(len(values)), key=lambda y: -values[y]):
        more = min(upper[y] - lower[y], rest)
        p[y] += more
        rest -= more
    return float(p @ values)


class LiteralWCOPS:
    """One run of Algorithm 1, with the resolutions D1 to D9; `constraints=0` leaves out everything about costs."""

    def __init__(
        self,
        widths: tuple[int, ...],
        actions: int,
        constraints: int,
        horizon: int,
        delta: float,
        *,
        eta: float,
        gamma: float,
        bonus_scale: float = 1.0,
        radius_scale: float = 1.0,
        threshold_scale: float = 1.0,
        cap_scale: float = 1.0,
        penalty: float = 50.0,
    ) -> None:
        self.n, self.A, self.m, self.T, self.delta = widths, actions, constraints, horizon, delta
        self.L, self.X = len(widths) - 1, sum(widths)
        self.eta, self.gamma, self.penalty = eta, gamma, penalty
        self.bonus_scale, self.radius_scale = bonus_scale, radius_scale
        self.threshold_scale, self.cap_scale = threshold_scale, cap_scale
        self.q: Layers = [
            np.full((n, actions, after), 1 / (n * actions * after)) for n, after in zip(widths, widths[1:], strict=False)
        ]
        self.M: Layers = [np.zeros_like(q) for q in self.q]
        self.lower, self.upper = [np.zeros_like(q) for q in self.q], [np.ones_like(q) for q in self.q]
        self.history: dict[Pair, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)  # (beta_i, g_i) at every visit of a pair
        self.S = np.zeros(constraints)
        self.t = 0
        self.elastic_now = False
        self.excess_seen = self.elastic_seen = self.binding_seen = self.polished_seen = 0

    def policy(self) -> Layers:
        return [q.sum(2) / q.sum((1, 2))[:, None] for q in self.q]

    def upper_occupancy(self, target: Pair) -> float:
        """COMP-UOB for one pair: backward from its layer to x_0."""
        K, z, a = target
        policy = self.policy()
        f = np.zeros(self.n[K])
        f[z] = 1.0
        for k in range(K - 1, -1, -1):
            f = np.array(
                [
                    sum(policy[k][x, b] * greedy_fill(self.lower[k][x, b], self.upper[k][x, b], f) for b in range(self.A))
                    for x in range(self.n[k])
                ]
            )
        return float(policy[K][z, a] * f[0])

    def update(self, states: list[int], actions: list[int], rewards: np.ndarray, costs: np.ndarray) -> None:
        """One episode: `states` has L + 1 entries, `rewards` is (L,) and `costs` (L, m)."""
        pairs = [(k, states[k], actions[k]) for k in range(self.L)]
        loss = [np.zeros(q.shape[:2]) for q in self.q]
        for k, x, a in pairs:
            loss[k][x, a] = (1 - rewards[k]) / (self.upper_occupancy((k, x, a)) + self.gamma)
        self.t += 1
        for k, x, a in pairs:
            self.M[k][x, a, states[k + 1]] += 1
        self.remember_costs(pairs, costs)
        self.rebuild_intervals()
        self.project([q * np.exp(-self.eta * w)[:, :, None] for q, w in zip(self.q, loss, strict=True)])

    def remember_costs(self, pairs: list[Pair], costs: np.ndarray) -> None:
        self.S = self.S + costs.sum(0)
        log = math.log(2 * max(self.m, 1) * self.T**2 * self.X * self.A / self.delta)
        C = 21 * self.L * self.X * math.sqrt(2 * self.t * self.A * log)
        excess = np.minimum(np.maximum(self.S - self.threshold_scale * C, 0), self.cap_scale * C)
        self.excess_seen += int((excess > 0).sum())
        for (k, x, a), g in zip(pairs, costs, strict=True):
            visits = self.M[k][x, a].sum()
            self.history[k, x, a].append((np.minimum(1, (1 + excess) / visits), g))

    def rebuild_intervals(self) -> None:
        log = math.log(self.T * self.X * self.A / self.delta)
        for k in range(self.L):
            for x in range(self.n[k]):
                for a in range(self.A):
                    visits = self.M[k][x, a].sum()
                    if visits == 0:
                        continue
                    width = self.radius_scale * math.sqrt(2 * self.n[k + 1] * log / visits)
                    self.lower[k][x, a] = np.maximum(0, self.M[k][x, a] / visits - width)
                    self.upper[k][x, a] = np.minimum(1, self.M[k][x, a] / visits + width)

    def optimistic_costs(self, i: int) -> Layers:
        log = math.log(2 * max(self.m, 1) * self.X * self.A * self.T / self.delta)
        out = [-np.ones(q.shape[:2]) for q in self.q]
        for (k, x, a), seen in self.history.items():
            betas = [beta[i] for beta, _ in seen]
            weights = [b * math.prod(1 - later for later in betas[j + 1 :]) for j, b in enumerate(betas)]
            estimate = sum(w * g[i] for w, (_, g) in zip(weights, seen, strict=True))
            out[k][x, a] = max(-1.0, estimate - self.bonus_scale * math.sqrt(2 * log / len(seen)))
        return out

    def constraint_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Flow E q = e, intervals G q <= 0 and safety C q <= 0 as matrices over the entries of q in reading order."""
        starts = np.cumsum([0] + [q.size for q in self.q])
        index = [start + np.arange(q.size).reshape(q.shape) for start, q in zip(starts, self.q, strict=False)]
        E, G, C = [], [], np.zeros((self.m, starts[-1]))
        for k in range(self.L):
            for x in range(self.n[k]):
                E.append(np.zeros(starts[-1]))
                E[-1][index[k][x]] += 1
                if k > 0:
                    E[-1][index[k - 1][:, :, x]] -= 1
                for a in range(self.A):
                    for y in range(self.n[k + 1] if self.n[k + 1] > 1 else 0):  # a lone successor takes all the mass anyway
                        for sign, bound in ((1, self.upper), (-1, self.lower)):
                            G.append(np.zeros(starts[-1]))
                            G[-1][index[k][x, a]] = -sign * bound[k][x, a, y]
                            G[-1][index[k][x, a, y]] += sign
        for i in range(self.m):
            for k, g in enumerate(self.optimistic_costs(i)):
                C[i, index[k]] = g[:, :, None]
        e = np.zeros(len(E))
        e[0] = 1
        return np.array(E), e, np.array(G).reshape(-1, starts[-1]), C

    def objective(self, q: Layers) -> float:
        """What the last projection minimised, KL(q, target) + penalty * violation up to a constant, at any q."""
        flat = np.concatenate([layer.ravel() for layer in q])
        divergence = float(flat @ (np.log(flat) - self.log_target - 1))
        return divergence + self.penalty * max(0.0, *(self.in_units(self.constraint_rows()[3]) @ flat))

    @staticmethod
    def in_units(C: np.ndarray) -> np.ndarray:
        """Every constraint divided by its largest cost, rounded to a power of two: what violations are compared in."""
        return C / 2.0 ** np.round(np.log2(np.abs(C).max(1, keepdims=True)))

    def project(self, target: Layers) -> None:
        """argmin KL(q, target) over the safe set; where that is empty, KL + penalty * the largest violation."""
        E, e, G, C = self.constraint_rows()
        C = self.in_units(C)
        self.log_target = log_target = np.concatenate([np.log(t).ravel() for t in target])
        q, slack = cp.Variable(len(log_target)), cp.Variable(nonneg=True)
        # entropy and linear part apart: then no number as small as the target's enters a cone
        divergence = -cp.sum(cp.entr(q)) - (log_target + 1) @ q
        flow, intervals, safety = E @ q == e, G @ q <= 0, C @ q <= slack
        least = cp.Problem(cp.Minimize(slack), [flow, intervals, safety, q >= 0]).solve(solver=cp.HIGHS)
        self.elastic_now = bool(least > 1e-9)
        hard = [] if self.elastic_now else [slack == 0]
        problem = cp.Problem(cp.Minimize(divergence + self.penalty * slack), [flow, intervals, safety, *hard])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where rounding stops Clarabel early it says so; `polish` goes on from there
            problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13, max_iter=200)
        prices = np.maximum(safety.dual_value, 0)
        self.binding_seen += int((prices > 1e-3).sum())
        self.elastic_seen += int(self.elastic_now)
        tight = prices > 1e-6 * self.penalty if self.elastic_now else prices > -(C @ q.value)
        together = C[tight]
        if self.elastic_now:  # the tight constraints are violated alike, and their prices sum to the penalty
            prices = np.where(tight, prices, 0) * self.penalty / prices[tight].sum()
            together = C[tight][1:] - C[tight][:1]
        room = -(G @ q.value) / np.maximum(np.abs(G) @ q.value, 1e-300)
        active = intervals.dual_value > room
        rows = np.concatenate([E, G[active], together])
        sides = np.concatenate([e, np.zeros(len(rows) - len(e))])
        paid = E.T @ flow.dual_value + G[active].T @ intervals.dual_value[active] + C[tight].T @ prices[tight]
        polished = polish(log_target - paid, rows, sides)
        close = np.abs(polished - q.value).max() < 1e-4
        self.polished_seen += int(close)
        flat = polished if close else q.value
        parts = np.split(np.maximum(flat, FLOOR), np.cumsum([layer.size for layer in self.q])[:-1])
        self.q = [part.reshape(layer.shape) for part, layer in zip(parts, self.q, strict=True)]


def polish(log_q: np.ndarray, A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Newton's method for A exp(log_q - A^T y) = b: the optimality conditions once the active rows are known.

    Clarabel finds the active rows but stops anywhere between 1e-12 and 1e-5 of the solution, and its accuracy is absolute, while
    the next episode multiplies: an entry of 1e-9 must be right relative to itself. Where a safe set is empty, the active rows of
    pairs with almost no mass are noise, and their entries can still come out wrong relative to themselves.
    """
    log_q = np.clip(log_q, -600, 1)
    for _ in range(50):
        q = np.exp(log_q)
        scaled = A * np.sqrt(q)
        norms = np.maximum(np.linalg.norm(scaled, axis=1), 1e-300)
        step = np.linalg.lstsq(scaled / norms[:, None], (A @ q - b) / norms, rcond=1e-12)[0] / np.sqrt(q)
        log_q = np.clip(log_q - np.clip(step, -20, 20), -600, 1)
        if np.abs(step).max() < 1e-13:
            break
    return np.exp(log_q)
