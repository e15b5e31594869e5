"""The study that decides between learners: its instances, its arithmetic, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torchcmdp as tc
from torchcmdp.plotting.style import COLOURS
from train.__main__ import main
from train.study import design
from train.study.compare import _mark, dominates, undominated, wilson


def test_half_of_the_instances_are_tight_in_every_setting_and_none_is_trained_on() -> None:
    seeds = design.HELD_OUT[:6]
    for setting in design.SETTINGS:
        made = design.make_instances(seeds, setting)
        together = torch.cat(made.costs, dim=1)  # of all blocks: one policy must meet them all
        gaps = tc.slater_gap(tc.LayeredCMDP(made.cmdp.layout, made.cmdp.transitions, made.cmdp.rewards, together))
        assert ((gaps < 0.05) == (torch.tensor(seeds) % 2 == 0)).all() and (gaps >= 0).all()
        assert len(made.costs) == (3 if setting in design.CHANGING else 1)
    assert not {*design.TRAINING} & {*design.HELD_OUT} and len(design.TRAINING) == 16 and len(design.HELD_OUT) == 32


def test_every_learner_has_the_same_number_of_configurations_its_own_first() -> None:
    for entry in design.ENTRIES.values():
        found = entry.configurations(5)
        assert len(found) == (5 if entry.box else 1) and found[0] == entry.start
        for point in found[1:]:
            assert all(low <= point[name] <= high for name, (low, high) in entry.box.items())


def test_wilson_and_domination_by_hand() -> None:
    low, high = wilson(29, 32)
    assert abs(low - 0.7578) < 1e-3 and abs(high - 0.9676) < 1e-3
    numbers = {"regret": torch.tensor([1.0, 1.0, 3.0]), "positive violation": torch.tensor([1.0, 3.0, 3.0])}
    rival = {"regret": torch.tensor([2.0, 2.0, 2.0]), "positive violation": torch.tensor([2.0, 2.0, 2.0])}
    assert dominates(numbers, rival).tolist() == [True, False, False]
    rivals = dict.fromkeys(("OptCMDP", "OptPrimalDual", "PDB-PS", "Greedy"), rival)
    assert undominated({**rivals, "mine": numbers}, "mine").tolist() == [True, True, False]


def test_marks_have_the_colours_of_other_figures() -> None:
    for title, name in (("practical WC-OPS", "WC-OPS practical"), ("WC-OPS", "WC-OPS"), ("practical OptCMDP", "OptCMDP")):
        called, colour, shape = _mark(title)
        assert colour == COLOURS[name] and called.startswith(name) and (shape == "s") == ("practical" in called)


@pytest.mark.slow
def test_a_short_study_is_reported_and_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", "--configurations", "2", "--search-horizon", "5", "--horizons", "6"]
    command += ["--seeds", "1", "--instances", "2", "--final-horizons", "8"]
    assert main([*command, "--logdir", str(tmp_path)]) == 0
    text = (tmp_path / "study" / "report.md").read_text()
    assert all(setting in text for setting in design.SETTINGS) and "without the drift test" in text and "Goals" in text
    assert (tmp_path / "study" / "report.png").exists()
    stages = {file: file.stat().st_mtime_ns for file in (tmp_path / "study" / "stages").iterdir()}
    assert main([*command, "--logdir", str(tmp_path)]) == 0  # all of it kept
    assert stages == {file: file.stat().st_mtime_ns for file in stages}
    assert (tmp_path / "study" / "report.md").read_text() == text and capsys.readouterr().out.count("Goals") == 4
    assert main([*command, "--logdir", str(tmp_path), "--json"]) == 0  # each table once, however often the report was written
    assert [table["title"] for table in json.loads(capsys.readouterr().out)["tables"]] == [
        "6 episodes",
        "8 episodes",
        "ablations",
        "search",
    ]
    finals = {file.name for file in stages if file.name.startswith("8-0")}
    assert len(finals) == 16 and sum("practical" in name for name in finals) == 8, "practical learners and the two best rivals"
    assert main([*command, "--logdir", str(tmp_path), "--final-seeds", "2"]) == 0  # one more for each, and nothing again
    now = {file: file.stat().st_mtime_ns for file in (tmp_path / "study" / "stages").iterdir()}
    assert {file.name for file in now.keys() - stages.keys()} == {name.replace("8-0", "8-1") for name in finals}
    assert all(now[file] == when for file, when in stages.items())
    first, second = (
        json.loads((tmp_path / "study" / "stages" / name).read_text())["result"]
        for name in sorted(
            file.name
            for file in now
            if file.name.startswith("8-") and "OptCMDP_stochastic" in file.name and "practical" in file.name
        )
    )
    assert first["regret"] != second["regret"], "other random numbers"
    assert main(["study", "--instances", "1"]) == 2
