"""The soak counts every failure, and finds none."""

from __future__ import annotations

import pytest
import torch

import torchcmdp as tc
from torchcmdp.learners import Guarded
from train import soak
from train.__main__ import main

SMALL = ["--runs", "8", "--episodes", "12", "--widths", "1", "2", "3", "1", "--actions", "2"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_no_learner_fails_and_the_table_says_so(tmp_path, capsys):
    assert main(["soak", *SMALL, "--logdir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "soak" / "soak.md").read_text().strip() in printed
    rows = [cells(line) for line in printed.splitlines()[2:] if line.startswith("|")]
    assert [row[0] for row in rows] == [*(cls.name for cls in tc.LEARNERS.values()), "all"]
    guarded = {cls.name for cls in tc.LEARNERS.values() if issubclass(cls, Guarded)}  # which sit out where nothing has a margin
    assert all(row[2] == "0" for row in rows) and all((row[1] == "96") != (row[0] in guarded) for row in rows[:-1])
    assert all(0 < int(row[1]) < 96 for row in rows if row[0] in guarded) and float(rows[-1][3]) < 1e-8
    counts = {row[0]: (row[4], row[5]) for row in rows}
    assert counts["PDB-PS"] == ("-", "-")
    assert int(counts["Greedy"][1].replace(",", "")) > 0  # a quarter of the CMDPs has no safe policy


def test_every_kind_of_instance_is_what_it_says():
    options = soak.Options(widths=(1, 3, 3, 1), seed=5)
    plain, tight, unsafe, certain = (soak.instance(options, j) for j in range(4))
    assert abs(float(tc.slater_gap(tight))) < 1e-6 and float(tc.slater_gap(unsafe)) < -1e-3
    assert set(certain.transitions.flatten().tolist()) == {0.0, 1.0}
    assert not torch.equal(plain.rewards, soak.instance(options, 4).rewards)


class Broken(tc.UOBREPS):
    """Plays well for four episodes, and badly in one run then."""

    name = "Broken"
    how = "nan"

    def update(self, trajectory):
        if int(self.episode) == 4 and self.how == "raise":
            raise RuntimeError("lost its mind\nand more")
        super().update(trajectory)

    @property
    def policy(self):
        policy = super().policy.clone()
        if int(self.episode) >= 5 and self.how in ("nan", "short"):
            policy[1, 0, 0] = {"nan": torch.nan, "short": 0.3}[self.how]
        return policy

    def diagnostics(self):
        if int(self.episode) >= 5 and self.how == "diagnostic":
            return {"Learner/x": torch.tensor([0.0, torch.inf, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])}
        return super().diagnostics()


@pytest.mark.parametrize("how", ["short", "diagnostic", "nan", "raise"])
def test_a_failure_is_counted_and_is_the_exit_code(tmp_path, capsys, monkeypatch, how):
    monkeypatch.setitem(tc.LEARNERS, "broken", Broken)
    monkeypatch.setattr(Broken, "how", how)
    assert main(["soak", *SMALL, "--learners", "broken", "--logdir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    row = cells(out.splitlines()[2])
    if how == "raise":
        assert row[1:3] == ["32", "8"] and "Broken: RuntimeError in episode 4: lost its mind\n" in out
    elif how in ("nan", "short"):  # once as a policy, and then the simulator will not play it
        said = {"nan": "policy is nan in run 1 at layer 0, state 0, action 0", "short": "policy sums to"}[how]
        assert row[1:3] == ["40", "9"] and said in out
    else:
        assert row[1:3] == ["96", "8"]  # run 1 after episodes 5 to 12


def test_an_unknown_learner_gets_the_nearest(capsys):
    assert main(["soak", "--learners", "wc-opps"]) == 2
    assert "'wc-opps' is not one of --learners; did you mean wc-ops?" in capsys.readouterr().err
