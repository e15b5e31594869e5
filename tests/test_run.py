"""The loop: logging points, folders, resumption bit for bit, and what it refuses."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from hedge import RUNS, Hedge, Killed, assert_same, interrupt, kill, make_env, play, table
from torch import Tensor, nn

from torchcmdp.errors import InvalidInput, RunFolderError
from torchcmdp.instances import random_cmdp
from torchcmdp.metrics import Tracker
from torchcmdp.occupancy import uniform_policy
from torchcmdp.processes import OGDAdversary, Recorder, Replay, safe_caps
from torchcmdp.run import run
from torchcmdp.simulator import Simulator
from torchcmdp.trajectory import Trajectory


class Uniform:
    """A learner with nothing but what is required."""

    def __init__(self, layout):
        self.policy = uniform_policy(layout).expand(RUNS, *layout.pair_shape)

    def update(self, trajectory: Trajectory) -> None:
        pass


def adversarial_env(step: float = 0.3) -> Simulator:
    cmdp = random_cmdp((1, 2, 3, 1), 2, 2, seed=1)
    rewards = Recorder(OGDAdversary(cmdp.rewards, sign=-1, step=step), 15)
    costs = Recorder(OGDAdversary(cmdp.costs, sign=1, step=step, low=-1, high=safe_caps(cmdp, 0.2)), 100)
    return Simulator(cmdp, rewards, costs, runs=RUNS)


@pytest.mark.parametrize(("episodes", "log_every", "points"), [(10, 4, [4, 8, 10]), (8, 4, [4, 8]), (3, 100, [3]), (1, None, [1])])
def test_points_are_regular_and_end_with_the_last_episode(episodes, log_every, points):
    result = play(episodes=episodes, log_every=log_every)
    assert result.episodes.tolist() == points
    assert result.regret.shape == (RUNS, len(points))
    assert result.violation_by_constraint.shape == (RUNS, len(points), 2)
    assert result.completed


@pytest.mark.parametrize("engine", ["torch", "auto"])
@pytest.mark.parametrize("given", ["array", "logits of -inf in the padding"])
def test_a_learner_may_play_an_array_and_what_a_softmax_leaves_in_the_padding(given, engine, monkeypatch):
    monkeypatch.setenv("TORCHCMDP_ENGINE", engine)
    cmdp = random_cmdp((1, 2, 3, 1), 2, 1, seed=0)
    mask = cmdp.layout.pair_mask()
    learner = Uniform(cmdp.layout)
    expected = run(learner, Simulator(cmdp, cmdp.rewards, cmdp.costs, runs=RUNS), 3, progress=False)
    softmax = torch.zeros(RUNS, *mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf).softmax(-1)
    assert softmax.isnan().any()
    learner.policy = learner.policy.numpy() if given == "array" else softmax
    result = run(learner, Simulator(cmdp, cmdp.rewards, cmdp.costs, runs=RUNS), 3, progress=False)
    torch.testing.assert_close(result.regret, expected.regret)
    torch.testing.assert_close(result.violation, expected.violation)


def test_about_two_hundred_points_by_default():
    assert len(play(episodes=1000, log_every=None).episodes) == 200


def test_the_curves_are_those_of_a_hand_written_loop():
    env = make_env()
    learner, tracker = Hedge(env.cmdp.layout), Tracker(env)
    for _ in range(20):
        policy = learner.policy
        trajectory = env.rollout(policy)
        tracker.update(policy, trajectory)
        learner.update(trajectory)
    tracker.record(20)
    result = play()
    assert torch.equal(result.regret[:, -1], tracker.regret[:, -1])
    assert torch.equal(result.positive_violation[:, -1], tracker.positive_violation[:, -1])


@pytest.mark.filterwarnings("ignore:Uniform has no state_dict")
def test_a_learner_needs_only_policy_and_update(tmp_path):
    env = make_env()
    first = run(Uniform(env.cmdp.layout), env, 6, tmp_path, 2, progress=False, images=False)
    assert first.elastic_fraction != first.elastic_fraction and first.elastic_count is None
    again = run(Uniform(env.cmdp.layout), make_env(), 6, tmp_path, 2, progress=False, images=False)
    assert_same(first, again)


def test_diagnostics_are_averaged_between_points_and_over_the_run(tmp_path):
    result = play(tmp_path)
    rows = table(tmp_path)
    assert [float(row["Solver/iterations"]) for row in rows] == [2.5, 6.5, 10.5, 14.5, 18.5]
    assert result.mean_iterations == 10.5
    assert result.elastic_fraction == 0.5 and result.elastic_count == 10 * RUNS
    assert result.count("Solver/elastic") == 10 * RUNS and result.count("Solver/iterations") == 20 * RUNS
    assert result.count("Learner/gamma_active") is None


def test_the_table_holds_the_curves(tmp_path):
    result = play(tmp_path)
    rows = table(tmp_path)
    assert [int(row["episode"]) for row in rows] == result.episodes.tolist()
    for j, row in enumerate(rows):
        assert float(row["Regret/cumulative"]) == pytest.approx(float(result.regret[:, j].mean()))
        assert float(row["Regret/over_sqrt_t"]) == pytest.approx(float(result.regret[:, j].mean()) / (4 * j + 4) ** 0.5)
        assert float(row["Violation/positive/1"]) == pytest.approx(float(result.positive_violation_by_constraint[:, j, 1].mean()))
    half = 4.302653 * result.violation[:, -1].std() / RUNS**0.5  # Student's t with two degrees of freedom
    assert float(rows[-1]["Violation/cumulative/ci95"]) == pytest.approx(float(half), rel=1e-6)


def test_the_folder_does_not_change_the_numbers(tmp_path):
    assert_same(play(), play(tmp_path))
    assert {"config.json", "metrics.csv", "checkpoint.pt"} < {file.name for file in tmp_path.iterdir()}
    assert json.loads((tmp_path / "config.json").read_text())["learner"] == {"rate": 0.1, "name": "Hedge"}


def test_a_checkpoint_is_data(tmp_path):
    play(tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["played"] == 20


@pytest.mark.parametrize("at", [1, 2, 4, 5, 7, 8, 13, 20])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, at):
    whole = play(tmp_path / "whole")
    with pytest.raises(Killed):
        play(tmp_path / "killed", at=at, action=kill, checkpoint_every=0)
    assert_same(play(tmp_path / "killed"), whole)
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_a_run_killed_long_after_its_last_checkpoint_resumes_bit_for_bit(tmp_path, monkeypatch):
    whole = play(tmp_path / "whole")
    with pytest.raises(Killed):
        play(tmp_path / "killed", at=6, action=kill, checkpoint_every=0)
    with pytest.raises(Killed):
        play(tmp_path / "killed", at=15, action=kill)  # logs points at 8 and 12, but saves nothing
    assert [row["episode"] for row in table(tmp_path / "killed")] == ["4", "8", "12"]
    assert_same(play(tmp_path / "killed"), whole)
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


@pytest.mark.parametrize("at", [1, 6, 8])
def test_ctrl_c_finishes_the_episode_and_can_be_resumed(tmp_path, at):
    whole = play(tmp_path / "whole")
    before = signal.getsignal(signal.SIGINT)
    part = play(tmp_path / "part", at=at, action=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert not part.completed
    assert int(part.episodes[-1]) == at and [int(row["episode"]) for row in table(tmp_path / "part")] == part.episodes.tolist()
    resumed = play(tmp_path / "part")
    assert resumed.completed
    assert_same(resumed, whole)
    assert (tmp_path / "part" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_a_signal_with_the_last_episode_is_for_whoever_plays_the_next_run(tmp_path):
    """It has nothing left to stop here; lost, it would leave a program of many runs playing on."""
    whole = play(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "late", at=int(whole.episodes[-1]), action=interrupt)
    kept = play(tmp_path / "late")  # finished, and so only read
    assert kept.completed
    assert_same(kept, whole)


def test_a_point_that_was_only_for_the_interruption_is_forgotten(tmp_path):
    play(tmp_path, at=2, action=interrupt)
    assert [row["episode"] for row in table(tmp_path)] == ["2"]
    with pytest.raises(Killed):
        play(tmp_path, at=3, action=kill)
    assert not (tmp_path / "metrics.csv").exists()


def test_ctrl_c_without_a_folder_returns_what_there_is():
    part = play(at=7, action=interrupt)
    assert not part.completed and part.episodes.tolist() == [4, 7]


def test_an_interrupted_run_continues_with_the_objects_in_memory(tmp_path):
    env = make_env()
    learner = Hedge(env.cmdp.layout, at=6, action=interrupt)
    run(learner, env, 20, tmp_path / "part", 4, progress=False, images=False)
    learner.action = None
    assert_same(run(learner, env, 20, tmp_path / "part", 4, progress=False, images=False), play())


def test_a_finished_run_is_not_played_again(tmp_path):
    first = play(tmp_path)
    stamps = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    again = play(tmp_path, at=1, action=kill)
    assert_same(again, first)
    assert again.completed and again.seconds == first.seconds
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == stamps


def test_a_warm_learner_plays_its_own_number_of_episodes():
    env = make_env()
    learner = Hedge(env.cmdp.layout)
    for _ in range(5):
        learner.update(env.rollout(learner.policy))
    result = run(learner, env, 10, log_every=5, progress=False)
    assert result.episodes.tolist() == [5, 10] and env.episode == 15 and int(learner.count) == 15


def test_another_setting_is_refused_by_name_and_nothing_changes(tmp_path):
    play(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(RunFolderError, match=r"learner\.rate = 0\.1, and this one has 0\.2.*--fresh"):
        play(tmp_path, rate=0.2)
    with pytest.raises(RunFolderError, match=r"env\.seed = 0"):
        play(tmp_path, env=make_env(seed=5))
    with pytest.raises(RunFolderError, match=r"episodes = 20, and this one has 30"):
        play(tmp_path, episodes=30)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_run_that_never_saved_still_guards_its_folder(tmp_path):
    with pytest.raises(Killed):
        play(tmp_path, at=6, action=kill)
    assert not (tmp_path / "checkpoint.pt").exists()
    with pytest.raises(RunFolderError, match="learner.rate"):
        play(tmp_path, rate=0.2)
    assert_same(play(tmp_path), play())


def test_a_simulator_that_stands_elsewhere_is_refused(tmp_path):
    with pytest.raises(Killed):
        play(tmp_path, at=6, action=kill, checkpoint_every=0)
    env = make_env()
    env.rollout(Hedge(env.cmdp.layout).policy)
    with pytest.raises(RunFolderError, match="had played 0 episodes, but this one has played 1"):
        play(tmp_path, env=env)


def test_fresh_starts_over_and_spares_foreign_files(tmp_path):
    play(tmp_path, rate=0.2)
    (tmp_path / "notes.txt").write_text("keep me")
    assert_same(play(tmp_path, fresh=True), play())
    assert (tmp_path / "notes.txt").read_text() == "keep me"
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("damage", ["truncate", "garbage", "empty", "flip", "foreign"])
def test_a_damaged_checkpoint_gets_a_sentence_and_stays(tmp_path, damage):
    play(tmp_path)
    path = tmp_path / "checkpoint.pt"
    content = path.read_bytes()
    middle = content.index(torch.load(path, weights_only=True)["learner"]["scores"].numpy().tobytes()) + 8
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    damaged = {"truncate": content[: len(content) // 2], "garbage": b"not a checkpoint", "empty": b"", "flip": flipped}
    if damage == "foreign":
        torch.save({"weights": torch.zeros(2)}, path)
    else:
        path.write_bytes(damaged[damage])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(RunFolderError) as caught:
        play(tmp_path)
    assert "cannot be read" in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_checkpoint_is_replaced_in_one_step(tmp_path, monkeypatch):
    with pytest.raises(Killed):
        play(tmp_path, at=6, action=kill, checkpoint_every=0)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def half(content, file):
        file.write(b"half a checkpoint")
        raise Killed

    # a death while the new one is written, and one just before it takes the old one's place
    for module, name, death in ((torch, "save", half), (os, "replace", lambda source, target: kill())):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(module, name, death)
            play(tmp_path, checkpoint_every=0)
        assert (tmp_path / "checkpoint.pt").read_bytes() == before
        assert not list(tmp_path.glob(".*.tmp"))
    assert_same(play(tmp_path), play())


def test_a_file_in_the_way_gets_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunFolderError, match="cannot be used as a run folder"):
            play(path)


def test_wrong_arguments_get_a_sentence():
    env = make_env()
    with pytest.raises(InvalidInput, match="episodes is 0"):
        play(episodes=0)
    with pytest.raises(InvalidInput, match="log_every is -1"):
        play(log_every=-1)
    with pytest.raises(InvalidInput, match="the learner is a object; it needs a `policy`"):
        run(object(), env, 5)


def test_gradients_do_not_pile_up():
    class Trainable(Hedge):
        @property
        def policy(self) -> Tensor:
            return super().policy * self.weight

        def diagnostics(self) -> dict[str, Tensor]:
            return {"Solver/residual": self.weight.expand(RUNS)}

    env = make_env()
    learner = Trainable(env.cmdp.layout)
    learner.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    result = run(learner, env, 4, progress=False)
    assert not result.regret.requires_grad and not result.diagnostics["Solver/residual"].requires_grad


def test_wcops_resumes_bit_for_bit(tmp_path):
    from torchcmdp.learners import WCOPS

    def play_wcops(folder, at=None):
        env = make_env()
        learner = WCOPS(env.cmdp.layout, 2, horizon=60, runs=RUNS, bonus_scale=0.1, radius_scale=0.1)
        update, count = learner.update, iter(range(1, 1000))

        def dying_update(trajectory):
            if next(count) == at:
                raise Killed
            update(trajectory)

        learner.update = dying_update
        return run(learner, env, 60, folder, 7, progress=False, images=False, checkpoint_every=0)

    whole = play_wcops(tmp_path / "whole")
    with pytest.raises(Killed):
        play_wcops(tmp_path / "killed", at=33)
    assert_same(play_wcops(tmp_path / "killed"), whole)
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


@pytest.mark.parametrize("at", [3, 4, 13, 19])
def test_a_killed_adversarial_run_resumes_bit_for_bit_with_its_recording(tmp_path, at):
    env = adversarial_env()
    whole = play(tmp_path / "whole", env=env)
    with pytest.raises(Killed):
        play(tmp_path / "killed", env=adversarial_env(), at=at, action=kill, checkpoint_every=0)
    resumed_env = adversarial_env()
    assert_same(play(tmp_path / "killed", env=resumed_env), whole)
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()
    assert env.rewards.sequence.shape[:2] == (15, RUNS) and env.costs.sequence.shape[:3] == (20, RUNS, 2)
    assert torch.equal(resumed_env.rewards.sequence, env.rewards.sequence)
    assert torch.equal(resumed_env.costs.sequence, env.costs.sequence)


def test_adversarial_logs_hold_what_was_known_at_the_time(tmp_path):
    result = play(tmp_path, env=adversarial_env())
    rows = table(tmp_path)
    regret = [float(row["Regret/cumulative"]) for row in rows]
    assert regret == pytest.approx(result.anytime_regret.mean(0).tolist())
    assert regret[0] != pytest.approx(result.regret[:, 0].mean().item(), abs=1e-6)  # which knows the end
    assert result.regret[:, -1].tolist() == pytest.approx(result.anytime_regret[:, -1].tolist())
    assert float(rows[-1]["Regret/alpha"]) == pytest.approx(result.alpha_regret[:, -1].mean().item())
    assert float(rows[-1]["Metrics/rho"]) == pytest.approx(result.rho.mean().item()) and (result.rho >= 0.2).all()
    assert float(rows[-1]["Metrics/alpha"]) == pytest.approx(result.alpha.mean().item())
    assert (result.safe_value <= result.best_value + 1e-9).all()
    room = [float(row["Metrics/rho"]) for row in rows]
    assert room == sorted(room, reverse=True)  # more episodes, less room


def test_a_recorded_sequence_gives_another_learner_the_same_comparators():
    env = adversarial_env()
    env.rewards.episodes = 20
    own = play(env=env)
    other = Simulator(env.cmdp, Replay(env.rewards.sequence), Replay(env.costs.sequence), runs=RUNS)
    replayed = play(env=other, rate=0.5)
    for name in ("rho", "alpha", "safe_value", "best_value"):
        torch.testing.assert_close(getattr(replayed, name), getattr(own, name), rtol=0, atol=1e-12)
    assert not torch.equal(replayed.regret, own.regret)


def test_an_adversarial_run_is_deterministic_and_other_learners_get_other_sequences():
    assert_same(play(env=adversarial_env()), play(env=adversarial_env()))
    env, other = adversarial_env(), adversarial_env()
    play(env=env)
    play(env=other, rate=0.5)
    assert not torch.equal(env.costs.sequence, other.costs.sequence)


def test_an_environment_may_bring_its_own_tracker():
    """One that hides its model: the loop reads nothing of it but what `run` lists."""

    class Hidden:
        def __init__(self, env):
            self._env = env

        def tracker(self):
            return Tracker(self._env)

        def __getattr__(self, name):
            shown = ("layout", "constraints", "runs", "device", "episode", "rollout", "state_dict", "load_state_dict", "config")
            if name not in shown:
                raise AttributeError(name)
            return getattr(self._env, name)

    env = make_env()
    result = run(Hedge(env.layout), Hidden(env), 20, log_every=4, progress=False)
    assert_same(result, play())
