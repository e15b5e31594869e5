"""What every learner promises: valid policies, runs of their own, the same bits again, devices, types, and odd CMDPs."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any

import pytest
import torch
from helpers import HORIZON, NEEDED, ON_META, SETTINGS, play, simulator

import torchcmdp as tc
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput
from torchcmdp.learners import LEARNERS, UOBREPS, WCOPS, Guarded, Learner
from torchcmdp.testing import check_learner, check_policy
from torchcmdp.trajectory import Trajectory

every_learner = pytest.mark.parametrize("key", LEARNERS)


def make(key: str, cmdp: LayeredCMDP, runs: int = 1, **settings: Any) -> Learner:
    return LEARNERS[key](cmdp.layout, cmdp.constraints, HORIZON, 0.01, runs, **{**SETTINGS[key], **settings})


def test_the_registry_has_every_learner_by_a_name_of_its_own() -> None:
    assert list(LEARNERS) == ["wc-ops", "uob-reps", "opt-cmdp", "greedy", "opt-primal-dual", "pdb-ps", "s-ops", "ma-ops", "dope"]
    assert len({cls.name for cls in LEARNERS.values()}) == len(LEARNERS)


@every_learner
def test_the_contract_of_a_learner(key: str) -> None:
    def any_device(layout: tc.Layout, constraints: int, **options: Any) -> Learner:
        return LEARNERS[key](layout, constraints, HORIZON, **{**SETTINGS[key], **options})

    def meta(layout: tc.Layout, constraints: int, **options: Any) -> Learner:
        return any_device(layout, constraints, **ON_META.get(key, {}), **options)

    check_learner(any_device, episodes=12, meta=meta)


@every_learner
def test_policies_move(key: str, cmdp: LayeredCMDP) -> None:
    learner, env = make(key, cmdp, 4), simulator(cmdp, 4)
    assert torch.allclose(learner.policy, tc.uniform_policy(cmdp.layout).expand_as(learner.policy))
    play(learner, env, 15)
    own = learner.own_policy if isinstance(learner, Guarded) else learner.policy
    assert (own - tc.uniform_policy(cmdp.layout)).abs().amax((-1, -2, -3)).min() > 0.1
    assert int(learner.episode) == 15


@every_learner
def test_every_hyperparameter_may_differ_between_runs(key: str, cmdp: LayeredCMDP) -> None:
    left_out = {"opt-primal-dual": {"multiplier_cap": 0.5}, "wc-ops": {"share": 0.01}, "uob-reps": {"share": 0.01}}
    left_out |= {"s-ops": {"share": 0.01}, "ma-ops": {"share": 0.01}}
    probe = make(key, cmdp, **left_out.get(key, {}))
    factors = torch.tensor([0.5, 1.5], dtype=torch.float64)
    values = {name: getattr(probe, name) * factors for name in probe.hyperparameters}
    assert bool(values) == (key != "greedy")
    together = make(key, cmdp, 2, **values)
    seen = play(together, simulator(cmdp, 2), 12)
    for j in range(2):
        luck = {"first_run": j} if key in NEEDED else {}
        alone = make(key, cmdp, **luck, **{name: float(value[j]) for name, value in values.items()})
        own = play(alone, simulator(cmdp, first_run=j), 12)
        assert all(torch.equal(a.actions[0], b.actions[j]) for a, b in zip(own, seen, strict=True))
        assert (alone.policy[0] - together.policy[j]).abs().max() < 1e-9


@every_learner
def test_nothing_computed_outlives_a_loaded_state_or_a_cast(key: str, cmdp: LayeredCMDP) -> None:
    learner, fresh = make(key, cmdp, 2), make(key, cmdp, 2)
    play(learner, simulator(cmdp, 2), 3)
    assert learner.diagnostics()
    state = {name: value.clone() for name, value in learner.state_dict().items()}
    _ = learner.policy, learner.kernels
    learner.load_state_dict(fresh.state_dict())
    assert not learner.diagnostics()
    assert torch.equal(learner.policy, fresh.policy) and torch.equal(learner.kernels.upper, fresh.kernels.upper)
    learner.load_state_dict(state)
    play(learner, simulator(cmdp, 2), 1)
    _ = learner.policy, learner.kernels
    learner.to(torch.float32)
    assert not learner.diagnostics() and learner.policy.dtype == learner.kernels.upper.dtype == torch.float32
    play(learner, simulator(cmdp.to(dtype=torch.float32), 2), 1)
    assert {value.dtype for value in learner.diagnostics().values()} == {torch.float32}


@every_learner
def test_kernels_follow_visits_that_somebody_sets(key: str, cmdp: LayeredCMDP) -> None:
    learner = make(key, cmdp, 2)
    before = learner.kernels
    assert learner.kernels is before  # looking again costs nothing
    learner.visits = 1000.0 * cmdp.layout.pair_mask().expand(2, -1, -1, -1)
    learner.transition_visits = 1000.0 * cmdp.transitions.expand(2, -1, -1, -1, -1)
    assert (learner.kernels.upper < before.upper).any()


@every_learner
def test_the_signature_and_help_name_every_setting(key: str, cmdp: LayeredCMDP) -> None:
    kind, config = LEARNERS[key], make(key, cmdp).config()
    parameters = inspect.signature(kind).parameters
    assert list(parameters)[:5] == ["layout", "constraints", "horizon", "delta", "runs"] and "dtype" in parameters
    assert not {p.kind for p in parameters.values()} & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    assert str(inspect.signature(kind)) in pydoc.render_doc(kind).replace("\n |  ", " ")
    for name in (*kind.hyperparameters, *kind.choices):
        assert name in parameters and name in config
        assert any(f"        {name}: " in (cls.__doc__ or "") for cls in kind.__mro__), f"nobody says what {name} is"
    with pytest.raises(InvalidInput, match=f"an argument of {kind.__name__} is 'run'; did you mean 'runs'"):
        make(key, cmdp, run=3)


@every_learner
def test_an_environment_says_what_its_learner_needs(key: str, cmdp: LayeredCMDP) -> None:
    env = simulator(cmdp.to(dtype=torch.float32), 3)
    learner = LEARNERS[key].for_env(env, horizon=HORIZON, delta=0.05, **SETTINGS[key])
    written = make(key, cmdp, 3, dtype=torch.float32).config()
    assert learner.config() == {**written, "delta": 0.05} and learner.device == env.device
    play(learner, env, 2)


@every_learner
def test_float32_follows_float64(key: str, cmdp: LayeredCMDP) -> None:
    exact, single = make(key, cmdp, 2), make(key, cmdp, 2, dtype=torch.float32)
    for trajectory in play(exact, simulator(cmdp, 2), 8):
        single.update(trajectory)  # feedback in the other type is converted
    assert all(value.dtype == torch.float32 for value in single.state_dict().values() if value.is_floating_point())
    # a rounding error may take a linear program to another of several optimal vertices, so its policies are not comparable
    if key not in ("opt-cmdp", "greedy", "ma-ops", "dope"):
        assert (single.policy - exact.policy).abs().max() < 1e-3


def odd_cmdps() -> dict[str, LayeredCMDP]:
    plain = tc.random_cmdp((1, 3, 2, 1), actions=2, constraints=2, seed=0, feasibility="any")
    layout = plain.layout
    costly = LayeredCMDP(layout, plain.transitions, plain.rewards, torch.ones_like(plain.costs) * layout.pair_mask())
    certain = torch.zeros_like(plain.transitions)
    for k, after in enumerate(layout.widths[1:]):
        for x in range(layout.widths[k]):
            for a in range(2):
                certain[k, x, a, (x + a) % after] = 1
    return {
        "width one": tc.random_cmdp((1, 1, 1), actions=2, constraints=1, seed=0, feasibility="any"),
        "one action": tc.random_cmdp((1, 2, 1), actions=1, constraints=1, seed=0, feasibility="any"),
        "one step": tc.random_cmdp((1, 1), actions=3, constraints=2, seed=0, feasibility="any"),
        "no constraints": LayeredCMDP(layout, plain.transitions, plain.rewards, plain.costs[:0]),
        "always unsafe": costly,
        "deterministic": LayeredCMDP(layout, certain, plain.rewards, plain.costs),
        "no rewards": LayeredCMDP(layout, plain.transitions, torch.zeros_like(plain.rewards), plain.costs),
    }


@every_learner
@pytest.mark.parametrize("kind", odd_cmdps())
def test_odd_cmdps_are_survived(key: str, kind: str) -> None:
    cmdp = odd_cmdps()[kind]
    learner, env = make(key, cmdp, 2), simulator(cmdp, 2)
    for _ in range(50):
        play(learner, env, 1)
        check_policy(learner.policy, cmdp.layout, 2, tolerance=1e-9)
    assert all(value.isfinite().all() for value in learner.state_dict().values())
    assert all(value.isfinite().all() for value in learner.diagnostics().values())


@every_learner
def test_config_names_the_cmdp(key: str, cmdp: LayeredCMDP) -> None:
    config = make(key, cmdp, 2).config()
    assert config["name"] == LEARNERS[key].name and config["constraints"] == cmdp.constraints
    assert config["widths"] == list(cmdp.layout.widths) and config["horizon"] == HORIZON and config["runs"] == 2


@every_learner
def test_solvers_and_beliefs_are_in_the_configuration(key: str, cmdp: LayeredCMDP) -> None:
    others = {
        "solver": tc.ColumnGeneration(max_iterations=7) if issubclass(LEARNERS[key], tc.OptCMDP) else tc.Newton(tolerance=1e-7),
        "margin_solver": tc.ColumnGeneration(max_iterations=7),
        "costs": tc.PaperCosts(margin=0.5),
    }
    mine = [name for name in others if name in inspect.signature(LEARNERS[key]).parameters]
    configs = [make(key, cmdp, **{name: others[name]}).config() for name in mine] + [make(key, cmdp).config()]
    assert all(configs.count(config) == 1 for config in configs)


@every_learner
def test_foreign_trajectories_get_a_sentence(key: str, cmdp: LayeredCMDP) -> None:
    learner = make(key, cmdp, 2)
    good = simulator(cmdp, 2).rollout(learner.policy)
    with pytest.raises(InvalidInput, match=r"trajectory.states has shape \(1, 4\); .* \(runs x L\) = \(2, 4\)"):
        learner.update(Trajectory(good.states[:1], good.actions, good.next_states, good.rewards, good.costs))
    assert int(learner.episode) == 0


def test_uob_reps_is_wc_ops_without_constraints(cmdp: LayeredCMDP) -> None:
    """The same bits, in an environment whose costs only one of them is shown."""
    settings = SETTINGS["uob-reps"]
    blind, free = UOBREPS(cmdp.layout, 2, HORIZON, runs=3, **settings), WCOPS(cmdp.layout, 0, HORIZON, runs=3, **settings)
    without = LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, cmdp.costs[:0])
    costly, costless = simulator(cmdp, 3), simulator(without, 3)
    for _ in range(HORIZON):  # long enough for costs to bind
        assert torch.equal(blind.policy, free.policy)
        first, second = costly.rollout(blind.policy), costless.rollout(free.policy)
        assert torch.equal(first.actions, second.actions) and torch.equal(first.rewards, second.rewards)
        blind.update(first)
        free.update(second)
    seeing = WCOPS(cmdp.layout, 2, HORIZON, runs=3, **settings)
    play(seeing, simulator(cmdp, 3), HORIZON)
    assert (seeing.policy - blind.policy).abs().max() > 1e-3, "costs must matter to WC-OPS here"
