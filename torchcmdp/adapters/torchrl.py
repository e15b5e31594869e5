"""Our CMDPs as a batched TorchRL environment, and tabular policies as TorchRL policies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcmdp.adapters import require
from torchcmdp.adapters.steps import OBSERVATIONS, Steps
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, check_kind, choice
from torchcmdp.occupancy import checked_policy
from torchcmdp.processes import Process
from torchcmdp.sampling import draw, thresholds
from torchcmdp.streams import ACTION, RunStreams

require("torchrl", "torchrl")

from tensordict import TensorDict, TensorDictBase  # noqa: E402
from torchrl.data import Binary, Categorical, Composite, OneHot, Unbounded  # noqa: E402
from torchrl.envs import EnvBase  # noqa: E402


class TorchRLEnv(EnvBase):  # type: ignore[misc]
    """A `torchrl.envs.EnvBase` over a layered CMDP with one batch axis, that of the runs.

    A step is a function of its input alone: the tensordict carries `state` and `layer`, and the number of the `episode`, which with
    the seed decides all random numbers. The environment itself only counts the episodes that resets begin. After `set_seed(s)`
    run j plays the episodes of run j of `Simulator(..., seed=s)` if it takes the same actions.

    Entries, with the runs in front: `observation` (the state's number over all layers, or that one hot), `action` (a number),
    `reward` `(runs x 1)`, `cost` `(runs x 1)`, `costs` `(runs x m)`, and `done` and `terminated` after L steps. The costs stand
    beside the reward in its spec, so that `RewardSum(in_keys=["reward", "cost"])` and the like know them. Units,
    limits and `cost` are as in `CMDPEnv`. Where states lack actions, `action_mask`, `(runs x A)` bool, is what TorchRL's
    `ActionMask` and masked distributions ask for.

    Attributes:
        cost_limit: What the expected sum of `cost` over an episode may be.

    Args:
        cmdp: A single CMDP, or a batch of one a run; the environment is on its device.
        rewards, costs: Where feedback comes from; by default the CMDP's mean rewards and costs, without noise. They must be
            stationary, since nothing but the tensordict may change.
        runs: The batch size.
        seed: Of all random numbers; None for one drawn by torch, so that two such environments differ.
        observation: "index" or "one-hot".
        constraint, budget: As in `CMDPEnv`.
    """

    batch_locked = True
    _next_episode: Tensor

    def __init__(
        self,
        cmdp: LayeredCMDP,
        rewards: Process | None = None,
        costs: Process | None = None,
        *,
        runs: int = 1,
        seed: int | None = None,
        observation: str = "index",
        constraint: int | None = None,
        budget: object = None,
    ) -> None:
        one_hot = choice("observation", observation, OBSERVATIONS) == "one-hot"
        steps = Steps(cmdp, rewards, costs, runs, budget, constraint)
        for name, process in (("rewards", steps.rewards), ("costs", steps.costs)):
            if not process.stationary:
                raise InvalidInput(
                    f"{name} come from {type(process).__name__}, whose values change with the episodes; this environment keeps "
                    "nothing between them and needs a stationary process, such as Bernoulli or Fixed."
                )
        super().__init__(device=cmdp.device, batch_size=(runs,))
        self.cmdp, self.one_hot, self.cost_limit = cmdp, one_hot, steps.shown.limit
        self.steps, self._allowed = steps, cmdp.layout.pair_mask(cmdp.device)
        self._masked = cmdp.layout.action_mask() is not None
        self._make_specs()
        self._set_seed(seed)

    def _make_specs(self) -> None:
        runs, device, layout = self.steps.runs, self.cmdp.device, self.cmdp.layout

        def number(n: int) -> Categorical:
            return Categorical(n, shape=(runs,), dtype=torch.int64, device=device)

        def real(width: int) -> Unbounded:
            return Unbounded((runs, width), dtype=self.cmdp.dtype, device=device)

        n = layout.total_states
        episode = Unbounded((runs,), dtype=torch.int64, device=device)
        state = {"state": number(layout.width), "layer": number(layout.layers + 1), "episode": episode}
        if self._masked:
            state["action_mask"] = Binary(layout.actions, shape=(runs, layout.actions), dtype=torch.bool, device=device)
        self.observation_spec = Composite(
            observation=OneHot(n, shape=(runs, n), dtype=torch.float32, device=device) if self.one_hot else number(n),
            **{name: spec.clone() for name, spec in state.items()},
            shape=(runs,),
            device=device,
        )
        state.pop("action_mask", None)
        self.state_spec = Composite(**state, shape=(runs,), device=device)
        self.action_spec = number(layout.actions)
        self.reward_spec = Composite(reward=real(1), cost=real(1), costs=real(self.cmdp.constraints), shape=(runs,), device=device)

    def uniforms(self, tensordict: TensorDictBase) -> Tensor:
        """The random numbers of the step that `tensordict` stands before: `(runs x (3 + m))`, by purpose as in `RunStreams`."""
        layer = tensordict["layer"].clamp_max(self.cmdp.layout.layers - 1)
        return self.steps.uniforms(self.seed, tensordict["episode"], layer)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        episode, zero = self._next_episode, torch.zeros_like(self._next_episode)
        if tensordict is None or tensordict.get("_reset", None) is None:
            begun = torch.ones_like(episode)
        else:
            begun = tensordict["_reset"].reshape(episode.shape).to(episode.dtype)
        self._next_episode = episode + begun
        return self._tensordict(zero, zero, episode)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        layer, state, episode = tensordict["layer"], tensordict["state"], tensordict["episode"]
        action = tensordict["action"]
        self._check(layer, state, action)
        next_state, reward, costs = self.steps.step(layer, state, action, self.uniforms(tensordict))
        output = self._tensordict(layer + 1, next_state, episode)
        done = (layer + 1 >= self.cmdp.layout.layers).unsqueeze(-1)
        cost = self.steps.shown.cost(costs, layer)
        feedback = {"reward": reward.unsqueeze(-1), "cost": cost.unsqueeze(-1), "costs": costs}
        return output.update({**feedback, "done": done, "terminated": done.clone()})

    def _check(self, layer: Tensor, state: Tensor, action: Tensor) -> None:
        """Refuse actions that there are not, which would be looked up as another pair's; not where it would wait for the device."""
        if action.device.type != "cpu":
            return
        layout = self.cmdp.layout
        if (layer >= layout.layers).any():
            raise InvalidInput("an episode is over; call reset() before the next step.")
        there = (action >= 0) & (action < layout.actions)
        there &= self._allowed[layer, state, action.clamp(0, layout.actions - 1)]
        if not there.all():
            j = int(there.int().argmin())
            raise InvalidInput(
                f"action {int(action[j])} of run {j} does not exist in its state; it has {layout.actions} at most"
                + (', and "action_mask" says which.' if self._masked else ".")
            )

    def _tensordict(self, layer: Tensor, state: Tensor, episode: Tensor) -> TensorDict:
        seen = self.steps.observation(layer, state, one_hot=self.one_hot)
        entries = {"observation": seen, "state": state, "layer": layer, "episode": episode.clone()}
        if self._masked:  # once an episode is over, all of them
            last = self.cmdp.layout.layers - 1
            entries["action_mask"] = self._allowed[layer.clamp_max(last), state] | (layer > last).unsqueeze(-1)
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        drawn = int(torch.randint(2**32, ())) if seed is None else seed
        self.seed = RunStreams(drawn, self.steps.runs).seed  # refuses what is out of range
        self._next_episode = torch.zeros(self.steps.runs, dtype=torch.int64, device=self.cmdp.device)


class TabularPolicy(torch.nn.Module):
    """A policy `([runs x] L x S x A)`, in the form in which TorchRL takes policies: it writes `action` into a tensordict.

    Actions are drawn from the streams of the environment that it plays in, with the numbers that `Simulator` would use.
    """

    thresholds: Tensor

    def __init__(self, policy: Tensor, env: TorchRLEnv) -> None:
        super().__init__()
        check_kind("env", env, TorchRLEnv, "a TorchRLEnv")
        policy = checked_policy(policy, env.cmdp.layout, env.steps.runs)
        self.env = env
        self.register_buffer("thresholds", thresholds(policy).expand(env.steps.runs, *policy.shape[-3:]))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set `action`, drawn from the policy with the environment's own numbers."""
        layer = tensordict["layer"].clamp_max(self.env.cmdp.layout.layers - 1)
        rows = self.thresholds[self.env.steps.run, layer, tensordict["state"]]
        return tensordict.set("action", draw(rows, self.env.uniforms(tensordict)[:, ACTION, None]))
