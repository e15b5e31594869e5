"""Our CMDPs as a TorchRL environment: it passes the checker, follows the simulator, and a step depends on its input alone."""

from __future__ import annotations

import pytest
import torch
from helpers import matching_game
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import ActionMask, GymWrapper, RewardSum, TransformedEnv
from torchrl.envs.utils import check_env_specs
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchcmdp import (
    Bernoulli,
    InvalidInput,
    LayeredCMDP,
    OGDAdversary,
    Simulator,
    evaluate,
    random_cmdp,
    stack_cmdps,
    uniform_policy,
)
from torchcmdp.adapters.gymnasium import CMDPEnv, CMDPVectorEnv
from torchcmdp.adapters.torchrl import TabularPolicy, TorchRLEnv


def feedback(cmdp: LayeredCMDP) -> dict:
    return {"rewards": Bernoulli(cmdp.rewards), "costs": Bernoulli(cmdp.costs, low=-1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("observation", ["index", "one-hot"])
def test_the_checker_is_content(cmdp, observation, dtype):
    cmdp = cmdp.to(dtype=dtype)
    check_env_specs(TorchRLEnv(cmdp, **feedback(cmdp), runs=3, observation=observation))


@pytest.mark.parametrize("batched", [False, True])
def test_a_rollout_is_the_simulator_s(cmdp, random_policy, batched):
    runs, episodes, layers = 4, 3, cmdp.layout.layers
    if batched:
        cmdp = stack_cmdps([random_cmdp(cmdp.layout.widths, 3, 2, seed=s) for s in range(runs)])
    policy = random_policy(cmdp.layout, runs)
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=runs, seed=11, constraint=0)
    simulator = Simulator(cmdp, **feedback(cmdp), runs=runs, seed=11)
    played = env.rollout(episodes * layers, TabularPolicy(policy, env), break_when_any_done=False)
    assert played.shape == (runs, episodes * layers)
    for e in range(episodes):
        trajectory, part = simulator.rollout(policy), played[:, e * layers : (e + 1) * layers]
        assert torch.equal(part["state"], trajectory.states) and torch.equal(part["next", "state"], trajectory.next_states)
        assert torch.equal(part["action"], trajectory.actions)
        assert torch.equal(part["next", "reward"].squeeze(-1), trajectory.rewards)
        assert torch.equal(part["next", "costs"], trajectory.costs)
        assert torch.equal(part["next", "cost"].squeeze(-1), trajectory.costs[..., 0])
        assert part["next", "done"].squeeze(-1).tolist() == [[k == layers - 1 for k in range(layers)]] * runs
        assert (part["episode"] == e).all() and part["layer"].tolist() == [list(range(layers))] * runs


def test_observations_number_the_states_through(cmdp):
    env, one_hot = (TorchRLEnv(cmdp, runs=6, seed=1, observation=kind) for kind in ("index", "one-hot"))
    first = torch.tensor([0, *cmdp.layout.widths[:-1]]).cumsum(0)
    policy = uniform_policy(cmdp.layout)
    played = env.rollout(100, TabularPolicy(policy, env))
    assert torch.equal(played["observation"], first[played["layer"]] + played["state"])
    assert (played["next", "observation"][:, -1] == cmdp.layout.total_states - 1).all()
    assert torch.equal(one_hot.rollout(100, TabularPolicy(policy, one_hot))["observation"].argmax(-1), played["observation"])
    assert torch.equal(played["next", "cost"].squeeze(-1), played["next", "costs"].amax(-1))


def test_a_step_depends_on_its_input_alone(cmdp):
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=3, seed=2)
    begun = env.reset()
    begun["action"] = torch.tensor([0, 1, 2])
    first = env.step(begun.clone())
    env.reset()
    env.rollout(3)
    again = env.step(begun.clone())
    for name in ("state", "reward", "costs"):
        assert torch.equal(first["next", name], again["next", name])


def test_a_partial_reset_begins_an_episode_in_those_runs_alone(cmdp):
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=3, seed=2)
    begun = env.reset()
    begun["action"] = torch.zeros(3, dtype=torch.int64)
    moved = env.step(begun)["next"]
    moved["_reset"] = torch.tensor([[True], [False], [True]])
    partial = env.reset(moved.clone())
    assert partial["layer"].tolist() == [0, 1, 0] and partial["episode"].tolist() == [1, 0, 1]
    assert partial["state"][1] == moved["state"][1]
    assert env.reset()["episode"].tolist() == [2, 1, 2]


def test_seeds_repeat(cmdp):
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=3, seed=5)
    policy = TabularPolicy(uniform_policy(cmdp.layout), env)
    first = env.rollout(10, policy)
    assert not torch.equal(env.rollout(10, policy)["next", "costs"], first["next", "costs"])
    env.set_seed(5)
    assert torch.equal(env.rollout(10, policy)["next", "costs"], first["next", "costs"])
    env.set_seed(6)
    assert not torch.equal(env.rollout(10, policy)["next", "costs"], first["next", "costs"])


def test_two_environments_without_a_seed_differ(cmdp):
    assert TorchRLEnv(cmdp).seed != TorchRLEnv(cmdp).seed


def test_torchrl_sums_the_cost_as_it_sums_the_reward(cmdp):
    env = TransformedEnv(TorchRLEnv(cmdp, **feedback(cmdp), runs=3), RewardSum(in_keys=["reward", "cost"]))
    check_env_specs(env)
    played = env.rollout(cmdp.layout.layers)
    for name in ("reward", "cost"):
        assert torch.allclose(played["next", f"episode_{name}"], played["next", name].cumsum(1))


@pytest.mark.parametrize("many", [False, True])
def test_torchrl_s_own_wrapper_reads_our_gymnasium_environments(cmdp, many):
    inside = CMDPVectorEnv(cmdp, 3, **feedback(cmdp), autoreset_mode="disabled") if many else CMDPEnv(cmdp, **feedback(cmdp))
    env = GymWrapper(inside, categorical_action_encoding=True)
    env.auto_register_info_dict()
    check_env_specs(env)
    played = env.rollout(2 * cmdp.layout.layers, break_when_any_done=False)
    assert torch.equal(played["next", "cost"], played["next", "costs"].amax(-1)) and played["next", "cost"].any()
    assert int(played["next", "done"].sum()) == (6 if many else 2)


def test_a_collector_trains_ppo_with_a_critic_of_the_cost():
    """Whoever weighs rewards against costs takes what pays, but in the first state, where it costs twice as much."""
    cmdp = matching_game(mask=None)
    env, states = TorchRLEnv(cmdp.to(dtype=torch.float32), runs=16, seed=0, observation="one-hot"), cmdp.layout.total_states
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(torch.nn.Linear(states, 3), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critics = {name: ValueOperator(torch.nn.Linear(states, 1), out_keys=[f"{name}_value"]) for name in ("reward", "cost")}
    for name, critic in critics.items():
        critic(env.reset())
        estimate = GAE(gamma=1.0, lmbda=0.95, value_network=critic)
        estimate.set_keys(reward=name, value=f"{name}_value", advantage=f"{name}_advantage", value_target=f"{name}_target")
        critics[name] = (critic, estimate)
    loss = ClipPPOLoss(actor, critics["reward"][0])
    loss.set_keys(value="reward_value", value_target="reward_target", action="action")
    optimiser = torch.optim.Adam([*loss.parameters(), *critics["cost"][0].parameters()], lr=0.1)

    def played() -> tuple[float, float]:
        found = evaluate(lambda seen: actor(TensorDict({"observation": seen.float()}))["logits"].softmax(-1).double(), cmdp)
        return float(cmdp.units.episode_return(found.value)), float(cmdp.units.episode_costs(found.violations))

    before = played()
    for data in Collector(env, actor, frames_per_batch=256, total_frames=5_120):
        with torch.no_grad():
            for _, estimate in critics.values():
                estimate(data)
        data["advantage"] = data["reward_advantage"] - data["cost_advantage"]
        for _ in range(4):
            of_costs = (critics["cost"][0](data)["cost_value"] - data["cost_target"]).square().mean()
            terms = loss(data)
            optimiser.zero_grad()
            (terms["loss_objective"] + terms["loss_critic"] + of_costs).backward()
            optimiser.step()
    after = played()
    assert before[0] == pytest.approx(4 / 3, abs=0.5) and before[1] > 0.5
    # the start is the first state, and in each of the three steps after it two of three states pay
    assert after[0] > 1.8 and after[1] < 0.2


def test_everything_is_on_the_cmdp_s_device(cmdp):
    cmdp = cmdp.to("meta")
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=3)
    assert {spec.device.type for spec in (env.observation_spec, env.action_spec, env.reward_spec, env.done_spec)} == {"meta"}
    begun = env._reset()
    begun["action"] = torch.zeros(3, dtype=torch.int64, device="meta")
    assert {entry.device.type for entry in env._step(begun).values()} == {"meta"}


def test_masks_are_shown_and_kept():
    """An action that a state lacks would be looked up as a pair of the padding, and one too large as a pair of another state."""
    masked = matching_game()
    env = TransformedEnv(TorchRLEnv(masked, runs=64, seed=0), ActionMask())
    check_env_specs(TransformedEnv(TorchRLEnv(masked, runs=3), ActionMask()))
    played, mask = env.rollout(masked.layout.layers), torch.tensor(masked.layout.action_mask())
    assert torch.equal(played["action_mask"], mask[played["layer"], played["state"]])
    assert played["action_mask"].gather(-1, played["action"].unsqueeze(-1)).all() and not played["action_mask"].all()
    assert played["next", "action_mask"][:, -1].all()
    begun = env.base_env.reset()
    lacking = (~begun["action_mask"]).int().argmax(-1)
    with pytest.raises(InvalidInput, match=f"action {lacking[0]} of run 0 does not exist in its state; .*action_mask"):
        env.base_env.step(begun.set("action", lacking))


def test_actions_that_there_are_not_and_steps_after_the_end_get_a_sentence(cmdp):
    env = TorchRLEnv(cmdp, runs=2)
    for action in (3, -1):
        with pytest.raises(InvalidInput, match=f"action {action} of run 1 does not exist in its state; it has 3 at most"):
            env.step(env.reset().set("action", torch.tensor([0, action])))
    last = env.rollout(9)[:, -1]["next"].set("action", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="an episode is over"):
        env.step(last)


def test_mistakes_get_a_sentence(cmdp):
    for words, options in {
        "costs come from OGDAdversary": {"costs": OGDAdversary(cmdp.costs, sign=1, step=0.1, low=-1)},
        "constraint is 5": {"constraint": 5},
        "observation is 'pixels'": {"observation": "pixels"},
        "seed is -1": {"seed": -1},
    }.items():
        with pytest.raises(InvalidInput, match=words):
            TorchRLEnv(cmdp, **options)
    with pytest.raises(InvalidInput, match="policy has shape"):
        TabularPolicy(torch.ones(2, 2), TorchRLEnv(cmdp))
    with pytest.raises(InvalidInput, match="policy is nan at layer 0"):
        TabularPolicy(uniform_policy(cmdp.layout) * torch.nan, TorchRLEnv(cmdp))
