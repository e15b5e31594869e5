"""The experiments: what each plays on, and which learners meet there. The instances were chosen by seed before anything was run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import torchcmdp as tc
from torchcmdp.learners import LEARNERS, Learner
from torchcmdp.learners.practical import PRACTICAL_SCALES

# The two families of constants: multiples of the bonuses and of the transition widths, the same for every learner that has them.
FAMILIES: Mapping[str, Mapping[str, float]] = {
    "theory": {"bonus_scale": 1.0, "radius_scale": 1.0},
    "practical": {"bonus_scale": 0.1, "radius_scale": 0.1},
}

DELTA = 0.01
# The adversary's c in c / sqrt(t) and c / sqrt(T). Its values only ever move one way: with c = 1 they would all have reached the
# end of their range, and the problem be stationary, within a handful of episodes.
STEP = 0.1
SAFE_BY = 0.2  # rho_0: the adversary leaves one policy whose every pair is safe by this much

ARM_COSTS = (-0.3, 0.7)  # of the safest and the least safe arm where there is a single state


@dataclass(frozen=True)
class Player:
    """A learner in an experiment.

    Attributes:
        key: Its name in `LEARNERS`.
        label: What its curve is called; the learner's own name by default.
        options: Further arguments of its class, or of `WCOPS.scaled`.
        families: With which constants it plays.
    """

    key: str
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    families: tuple[str, ...] = tuple(FAMILIES)

    @property
    def name(self) -> str:
        return self.label or LEARNERS[self.key].name

    @property
    def folder(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Preset:
    """One experiment: an instance drawn from `random_cmdp` by its seed, where its rewards and costs come from, and who plays.

    Attributes:
        setting: "stochastic", "adversarial-reward", "adversarial", "simplex" or "waking".
        seed: Of the instance and of the runs.
        players: In the order of the legend.
        widths, actions, constraints: Of `random_cmdp`.
        margin: By how much the safest policy is safe: the costs are shifted to this Slater gap, so that the constraints bind. Drawn
            without, most instances would have a best policy that is safe anyway, and say nothing about safety.
        rewards, costs: "bernoulli"; "ogd sqrt_t" or "ogd sqrt_T", the paper's adversary with its step schedule; or "switching",
            Bernoulli costs whose means change after a third of the episodes.
        families: Which constants are played.
        purpose: One line for the report.
    """

    setting: str
    seed: int
    players: tuple[Player, ...]
    purpose: str
    widths: tuple[int, ...] = (1, 4, 4, 4, 1)
    actions: int = 3
    constraints: int = 1
    margin: float = 0.5
    rewards: str = "bernoulli"
    costs: str = "bernoulli"
    families: tuple[str, ...] = ("theory", "practical")

    def players_of(self, family: str) -> list[Player]:
        """Who plays with this family of constants."""
        return [player for player in self.players if family in player.families]

    @property
    def adaptive(self) -> bool:
        """Whether the adversary answers the learner, so that every learner meets a sequence of its own."""
        return "ogd" in self.rewards + self.costs


WC_OPS, OPT_CMDP, GREEDY = Player("wc-ops"), Player("opt-cmdp"), Player("greedy")
PRIMAL_DUAL, PDB_PS = Player("opt-primal-dual"), Player("pdb-ps", "PDB-PS (reconstruction)")

TUNED = Player("wc-ops", "WC-OPS, tuned", PRACTICAL_SCALES, families=("practical",))  # WCOPS.practical

STOCHASTIC = (WC_OPS, OPT_CMDP, PRIMAL_DUAL, PDB_PS, TUNED)
ADVERSARIAL_REWARD = (WC_OPS, OPT_CMDP, GREEDY, PDB_PS, TUNED)
ADVERSARIAL = (WC_OPS, GREEDY, PDB_PS, TUNED)
SIMPLEX = (WC_OPS, PDB_PS, TUNED)
WAKING = (
    WC_OPS,
    Player("wc-ops", "WC-OPS, threshold x 0.001", {"threshold_scale": 1e-3}),
    Player("wc-ops", "WC-OPS, threshold x 0.0001", {"threshold_scale": 1e-4}),
    Player("wc-ops", "WC-OPS, empirical threshold", {"violation_threshold": "empirical"}),
    TUNED,
)

PRESETS: Mapping[str, Preset] = {
    "stochastic-1": Preset("stochastic", 1, STOCHASTIC, "one constraint, with Slater's condition"),
    "stochastic-2": Preset("stochastic", 2, STOCHASTIC, "two constraints, with Slater's condition", constraints=2),
    "stochastic-3": Preset("stochastic", 3, STOCHASTIC, "one constraint, no strictly safe policy", margin=0.0),
    "adversarial-reward-1": Preset(
        "adversarial-reward", 4, ADVERSARIAL_REWARD, "rewards against the learner, step 0.1/sqrt(t)", rewards="ogd sqrt_t"
    ),
    "adversarial-reward-2": Preset(
        "adversarial-reward", 5, ADVERSARIAL_REWARD, "rewards against the learner, step 0.1/sqrt(T)", rewards="ogd sqrt_T"
    ),
    "adversarial-1": Preset(
        "adversarial", 6, ADVERSARIAL, "rewards and costs against the learner, step 0.1/sqrt(t)",
        rewards="ogd sqrt_t", costs="ogd sqrt_t",
    ),
    "adversarial-2": Preset(
        "adversarial", 7, ADVERSARIAL, "rewards and costs against the learner, step 0.1/sqrt(T)",
        rewards="ogd sqrt_T", costs="ogd sqrt_T",
    ),
    "simplex-1": Preset("simplex", 8, SIMPLEX, "one state, three actions, one constraint", widths=(1, 1)),
    "simplex-2": Preset("simplex", 9, SIMPLEX, "one state, three actions, one constraint", widths=(1, 1)),
    "simplex-3": Preset("simplex", 10, SIMPLEX, "one state, three actions, two constraints", widths=(1, 1), constraints=2),
    "waking-switching": Preset(
        "waking", 11, WAKING, "costs switch after a third of the episodes, thresholds scaled down", costs="switching",
        families=("practical",),
    ),
    "waking-stochastic": Preset("waking", 11, WAKING, "the same without the switch: the control", families=("practical",)),
}  # fmt: skip


def instance(preset: Preset) -> tc.LayeredCMDP:
    """The CMDP that the preset's seed draws.

    With a single state, costs are stretched to the range of `ARM_COSTS` and an arm that pays more also costs more.
    """
    size = (preset.widths, preset.actions, preset.constraints)
    cmdp = tc.random_cmdp(*size, preset.seed, feasibility="binding", margin=preset.margin)
    if preset.setting != "simplex":
        return cmdp
    costs, (low, high) = cmdp.costs.sort(-1).values, ARM_COSTS
    costs = low + (high - low) * (costs - costs[..., :1]) / (costs[..., -1:] - costs[..., :1])
    return tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards.sort(-1).values, costs)


def processes(preset: Preset, cmdp: tc.LayeredCMDP, episodes: int) -> tuple[tc.Process, tc.Process]:
    """Where the rewards and the costs come from."""
    rewards: tc.Process = tc.Bernoulli(cmdp.rewards)
    if preset.rewards.startswith("ogd"):
        rewards = tc.OGDAdversary(cmdp.rewards, sign=-1, step=STEP, **_schedule(preset.rewards, episodes))
    costs: tc.Process = tc.Bernoulli(cmdp.costs, low=-1)
    if preset.costs.startswith("ogd"):
        caps = tc.safe_caps(cmdp, SAFE_BY)
        costs = tc.OGDAdversary(cmdp.costs, sign=1, step=STEP, low=-1.0, high=caps, **_schedule(preset.costs, episodes))
    elif preset.costs == "switching":
        # costs of another draw over the same transitions: what was safe need not stay so, and a safe policy exists in both
        other = tc.random_cmdp(preset.widths, preset.actions, preset.constraints, preset.seed + 1000, feasibility="any")
        later = _made_safe(cmdp, other.costs)
        costs = tc.Switching([cmdp.costs, later], at=[max(1, episodes // 3)], noise="bernoulli", low=-1)
    return rewards, costs


def _schedule(process: str, episodes: int) -> dict[str, Any]:
    schedule = process.split()[1]
    return {"schedule": schedule, "horizon": episodes if schedule == "sqrt_T" else None}


def _made_safe(cmdp: tc.LayeredCMDP, costs: Tensor) -> Tensor:
    """The costs, lowered alike everywhere until some policy is safe in the CMDP's transitions, which lowering them cannot undo."""
    missing = (-tc.slater_gap(cmdp, costs)).clamp_min(0) / cmdp.layout.layers
    return ((costs - missing) * cmdp.layout.pair_mask()).clamp_min(-1)


def learner(player: Player, preset: Preset, cmdp: tc.LayeredCMDP, family: str, episodes: int, runs: int) -> Learner:
    """The learner with the family's constants, where it has them; radii are matched to WC-OPS's."""
    scales = FAMILIES[family]
    own: dict[str, Any] = {
        "wc-ops": dict(scales),
        "opt-cmdp": {**scales, "radii": "matched"},
        "opt-primal-dual": {**scales, "radii": "matched", "slater_gap": float(tc.slater_gap(cmdp))},
        "pdb-ps": {"radius_scale": scales["radius_scale"], "confidence": "entrywise"},
        "greedy": {},
    }[player.key]
    kind = tc.WCOPS.scaled if player.key == "wc-ops" else LEARNERS[player.key]
    return kind(cmdp.layout, cmdp.constraints, episodes, DELTA, runs, **{**own, **player.options})
