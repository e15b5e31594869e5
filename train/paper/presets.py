"""The experiments: what each plays on, and who meets there. The instances follow from seeds chosen before anything was run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import torchcmdp as tc

# The families of constants: a multiple of the bonuses and of the transition radii, the same for every learner that has them.
SCALES: Mapping[str, float] = {"theory": 1.0, "practical": 0.1, "small": 0.02}
FAMILIES = (*SCALES, "tuned")  # in the last one every learner has its own, below
RIVALS_COMMAND = "python -m train tune rivals"
# By learner, multiples of the constants of "theory", as RIVALS_COMMAND found them: for all of them the same grid, instances,
# horizon, objective and rule. `radii` is the best of the three modes.
TUNED: Mapping[str, Mapping[str, Any]] = {
    "wc-ops": {"scale": 0.03, "steps": 3.0},
    "opt-cmdp": {"scale": 0.01, "radii": "literal"},
    "opt-primal-dual": {"scale": 0.003, "steps": 10.0},
    "pdb-ps": {"scale": 1.0, "steps": 10.0},
    "greedy": {},
}

DELTA = 0.01
# The adversary's c in c / sqrt(t) and c / sqrt(T). Its values only ever move one way: with c = 1 they would all have reached the
# end of their range, and the problem be stationary, within a handful of episodes.
STEP = 0.1
SAFE_BY = 0.2  # rho_0: the adversary leaves one policy whose every pair is safe by this much

ARM_COSTS = (-0.3, 0.7)  # of the safest and the least safe arm where there is a single state


@dataclass(frozen=True)
class Player:
    """A learner in an experiment."""

    key: str  # its name in `LEARNERS`
    label: str = ""  # what its curve is called; the learner's own name by default
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of its class, or of `WCOPS.scaled`
    families: tuple[str, ...] = FAMILIES  # with which constants it plays

    @property
    def name(self) -> str:
        """What the player is called in figures and tables."""
        return self.label or tc.LEARNERS[self.key].name

    @property
    def folder(self) -> str:
        """What its folder is called."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Preset:
    """One experiment: instances drawn from `random_cmdp` by its seed, where their rewards and costs come from, and who plays."""

    setting: str  # "stochastic", "adversarial-reward", "adversarial", "simplex" or "waking"
    seed: int  # of the instances and of the runs
    players: tuple[Player, ...]  # in the order of the legend
    purpose: str  # one line for the report
    widths: tuple[int, ...] = (1, 4, 4, 4, 1)
    actions: int = 3
    constraints: int = 1
    # By how much the safest policy is safe: the costs are shifted to this Slater gap, so that the constraints bind. Drawn without,
    # most instances would have a best policy that is safe anyway, and say nothing about safety.
    margin: float = 0.5
    # "bernoulli"; "ogd sqrt_t" or "ogd sqrt_T", the paper's adversary with its step schedule; or, of costs, "switching", Bernoulli
    # ones whose means change after a third of the episodes.
    rewards: str = "bernoulli"
    costs: str = "bernoulli"
    families: tuple[str, ...] = FAMILIES  # which constants are played

    def players_of(self, family: str) -> list[Player]:
        """Who plays with this family of constants."""
        return [player for player in self.players if family in player.families]

    @property
    def adaptive(self) -> bool:
        """Whether the adversary answers the learner, so that every learner meets a sequence of its own."""
        return "ogd" in self.rewards + self.costs


WC_OPS, GREEDY, PDB_PS = Player("wc-ops"), Player("greedy"), Player("pdb-ps", "PDB-PS (reconstruction)")
PRIMAL_DUAL = Player("opt-primal-dual")
# OptCMDP with each of its three modes of radii; tuned with the best of them
OPT_CMDP = (
    *(Player("opt-cmdp", f"OptCMDP, {mode} radii", {"radii": mode}, tuple(SCALES)) for mode in ("matched", "published", "literal")),
    Player("opt-cmdp", "OptCMDP, tuned", families=("tuned",)),
)

STOCHASTIC = (WC_OPS, *OPT_CMDP, PRIMAL_DUAL, PDB_PS)
ADVERSARIAL_REWARD = (WC_OPS, *OPT_CMDP, GREEDY, PDB_PS)
ADVERSARIAL = (WC_OPS, GREEDY, PDB_PS)
SIMPLEX = (WC_OPS, PDB_PS)
WAKING = (
    WC_OPS,
    Player("wc-ops", "WC-OPS, threshold x 0.001", {"threshold_scale": 1e-3}),
    Player("wc-ops", "WC-OPS, threshold x 0.0001", {"threshold_scale": 1e-4}),
    Player("wc-ops", "WC-OPS, empirical threshold", {"violation_threshold": "empirical"}),
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


# Where `python -m train paper regimes` plays: two sizes, and by how much the safest policy is safe.
REGIMES: Mapping[str, Preset] = {
    f"{size}-{slack}": Preset(
        "stochastic", seed, (WC_OPS, *OPT_CMDP[:2], PRIMAL_DUAL), f"{'-'.join(map(str, widths))} states\nSlater gap {margin:g}",
        widths=widths, margin=margin,
    )
    for seed, ((size, widths), (slack, margin)) in enumerate(
        itertools.product({"narrow": (1, 2, 2, 1), "paper": (1, 4, 4, 4, 1)}.items(), {"slack": 0.5, "tight": 0.05}.items()), 21
    )
}  # fmt: skip


def preset_of(name: str) -> Preset:
    """The experiment or the kind of regime of that name."""
    return PRESETS[name] if name in PRESETS else REGIMES[name]


# Between the seeds of two instances of an experiment, so that no two experiments and no two draws of one share any.
STRIDE = 10_000
BINDING = 1e-3  # by how much the best safe policy falls short of the best one, at least, where the constraints bind


def instances(preset: Preset, count: int) -> tuple[tc.LayeredCMDP, list[int]]:
    """The first so many instances of an experiment as one batch, and their seeds: `preset.seed`, then one every `STRIDE`.

    A draw in which safety costs nothing says nothing about safety and is passed over, before anything is played on it.
    """
    found: dict[int, tc.LayeredCMDP] = {}
    for seed in itertools.count(preset.seed, STRIDE):
        if len(found) == count:
            break
        cmdp = instance(preset, seed)
        if float(tc.unconstrained_optimum(cmdp).value - tc.safe_optimum(cmdp).value) >= BINDING:
            found[seed] = cmdp
    return tc.stack_cmdps(list(found.values())), list(found)


def instance(preset: Preset, seed: int | None = None) -> tc.LayeredCMDP:
    """The CMDP that a seed draws, by default the preset's own.

    With a single state, costs are stretched to the range of `ARM_COSTS` and an arm that pays more also costs more.
    """
    size = (preset.widths, preset.actions, preset.constraints)
    cmdp = tc.random_cmdp(*size, preset.seed if seed is None else seed, feasibility="binding", margin=preset.margin)
    if preset.setting != "simplex":
        return cmdp
    costs, (low, high) = cmdp.costs.sort(-1).values, ARM_COSTS
    costs = low + (high - low) * (costs - costs[..., :1]) / (costs[..., -1:] - costs[..., :1])
    return tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards.sort(-1).values, costs)


def spread(cmdp: tc.LayeredCMDP, runs: int) -> tc.LayeredCMDP:
    """Every instance of a batch so many times in a row: one for each of its runs."""
    tensors = (cmdp.transitions, cmdp.rewards, cmdp.costs)
    return tc.LayeredCMDP(cmdp.layout, *(tensor.repeat_interleave(runs, 0) for tensor in tensors))


def processes(
    preset: Preset, cmdp: tc.LayeredCMDP, seeds: Sequence[int], episodes: int, runs: int
) -> tuple[tc.Process, tc.Process]:
    """Where the rewards and the costs come from in so many episodes and runs of each of the instances, which are `cmdp`."""
    own = spread(cmdp, runs)
    rewards: tc.Process = tc.Bernoulli(own.rewards)
    if preset.rewards.startswith("ogd"):
        rewards = tc.OGDAdversary(own.rewards, sign=-1, step=STEP, **_schedule(preset.rewards, episodes))
    costs: tc.Process = tc.Bernoulli(own.costs, low=-1)
    if preset.costs.startswith("ogd"):
        caps = tc.safe_caps(own, SAFE_BY)
        costs = tc.OGDAdversary(own.costs, sign=1, step=STEP, low=-1.0, high=caps, **_schedule(preset.costs, episodes))
    elif preset.costs == "switching":
        # costs of another draw over the same transitions: what was safe need not stay so, and a safe policy exists in both
        size = (preset.widths, preset.actions, preset.constraints)
        other = torch.stack([tc.random_cmdp(*size, seed + 1000, feasibility="any").costs for seed in seeds])
        later = _made_safe(cmdp, other).repeat_interleave(runs, 0)
        costs = tc.Switching([own.costs, later], at=[max(1, episodes // 3)], noise="bernoulli", low=-1)
    return rewards, costs


def _schedule(process: str, episodes: int) -> dict[str, Any]:
    schedule = process.split()[1]
    return {"schedule": schedule, "horizon": episodes if schedule == "sqrt_T" else None}


def _made_safe(cmdp: tc.LayeredCMDP, costs: Tensor) -> Tensor:
    """The costs, lowered alike everywhere until some policy is safe in the CMDPs' transitions, which lowering them cannot undo."""
    missing = (-tc.slater_gap(cmdp, costs)).clamp_min(0) / cmdp.layout.layers
    return ((costs - missing[:, None, None, None, None]) * cmdp.layout.pair_mask()).clamp_min(-1)


def learner(player: Player, cmdp: tc.LayeredCMDP, family: str, episodes: int) -> tc.Learner:
    """The learner with the family's constants, where it has them, for a batch of CMDPs, one a run."""
    constants = {"scale": SCALES[family]} if family in SCALES else TUNED[player.key]
    own = {**settings(player.key, constants, cmdp), **player.options}
    return tc.LEARNERS[player.key].scaled(cmdp.layout, cmdp.constraints, episodes, DELTA, cmdp.batch_shape[0], **own)


def settings(key: str, constants: Mapping[str, Any], cmdp: tc.LayeredCMDP) -> dict[str, Any]:
    """The options of a learner's `scaled`.

    Args:
        key: Its name in `LEARNERS`.
        constants: "scale", of the bonuses and of the radii alike, a float or one a run; "steps", of the step sizes of the policy
            and of the multipliers; and anything else as the class takes it.
        cmdp: What it will play on, one a run.
    """
    rest = dict(constants)
    scale, steps = rest.pop("scale", None), rest.pop("steps", 1.0)
    scales = {} if scale is None else {"bonus_scale": scale, "radius_scale": scale}
    if key == "opt-cmdp":
        return {"radii": "matched", **scales, **rest}
    if key == "opt-primal-dual":
        # its bonus is L times the sum of the radii over the successors: with WC-OPS's scale it is cut off at the largest value
        # there is, in every pair alike, and the policy does not move; divided by L n, it is the mean radius of a successor
        scales["radius_scale"] = scale / (cmdp.layout.layers * cmdp.layout.width)
        moves = {"primal_step_scale": steps, "dual_step_scale": steps}
        return {"radii": "matched", "slater_gap": tc.slater_gap(cmdp), **scales, **moves, **rest}
    if key == "pdb-ps":
        return {"radius_scale": scale, "confidence": "entrywise", "eta_scale": steps, "dual_step_scale": steps, **rest}
    return {"eta_scale": steps, **scales, **rest} if key == "wc-ops" else rest
