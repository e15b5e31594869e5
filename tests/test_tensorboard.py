"""Event files: read back with TensorBoard's own reader."""

from __future__ import annotations

import pytest
import torch
from hedge import Hedge, Killed, interrupt, kill, make_env, play, read, steps
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider as DataProvider
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer as Multiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import backend_context
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from torchcmdp.events import HEADLINES, RunWriter, band_tags, flatten, shown
from torchcmdp.run import run

TAGS = {
    "Regret/cumulative",
    "Regret/over_sqrt_t",
    "Violation/cumulative",
    "Violation/positive",
    "Violation/realised",
    "Violation/unsafe_share",
    "Violation/over_sqrt_t",
    "Metrics/EpRet",
    "Metrics/EpCost/0",
    "Metrics/EpCost/1",
    "Metrics/no_safe_policy",
    "Theory/trivial",
    "Solver/iterations",
    "Solver/elastic",
    "Time/episodes_per_second",
}


def test_the_tags_and_their_values(tmp_path):
    result = play(tmp_path)
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) >= set(map(shown, TAGS))
    assert "Theory/regret" not in events.Tags()["scalars"]  # of a learner that has no theorem
    assert steps(events, "Regret/cumulative") == result.episodes.tolist()
    curves = {"cumulative": result.violation, "positive": result.positive_violation, "realised": result.realised_violation}
    for name, curve in curves.items():  # of mean costs, and of those that were met
        values = [event.value for event in events.Scalars(shown(f"Violation/{name}"))]
        assert values == pytest.approx(curve.mean(0).tolist(), rel=1e-6)
    assert not torch.allclose(result.realised_violation, result.violation)
    trivial = [event.value for event in events.Scalars("Theory/trivial")]
    assert trivial == pytest.approx([3.0 * t for t in result.episodes.tolist()])


def test_the_band_holds_the_mean(tmp_path):
    play(tmp_path)
    events = read(tmp_path)
    mean, low, high = ([event.value for event in events.Scalars(tag)] for tag in band_tags("Regret/cumulative"))
    for a, b, c in zip(low, mean, high, strict=True):
        assert a < b < c and b - a == pytest.approx(c - b, rel=1e-3)


def test_every_band_is_one_margin_chart(tmp_path):
    play(tmp_path)
    events = read(tmp_path)
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    series = [chart.margin.series[0] for category in layout.category for chart in category.chart]
    first = ("Regret/cumulative", "Violation/cumulative", "Violation/positive", "Metrics/EpRet")
    # TensorBoard shows the last of a category first
    assert [s.value for s in series] == list(map(shown, (*reversed(first), "Violation/unsafe_share", "Regret/alpha")))
    assert {tag for s in series for tag in (s.value, s.lower, s.upper)} <= set(events.Tags()["scalars"])


def test_regret_and_violation_come_first(tmp_path):
    play(tmp_path)
    tags = sorted(read(tmp_path).Tags()["scalars"])
    assert tags[: len(HEADLINES)] == list(HEADLINES.values()) and tags[-1].startswith("~bands/")
    assert [tag.rpartition(" ")[2] for tag in tags[:2]] == ["regret", "violation"]


def test_the_settings_can_be_read(tmp_path):
    play(tmp_path)
    (text,) = read(tmp_path).Tensors("Configuration/text_summary")
    assert "| learner.rate | `0.1` |" in text.tensor_proto.string_val[0].decode()


def test_hyperparameters_are_in_the_run_itself(tmp_path):
    play(tmp_path / "hedge")
    assert [path for path in (tmp_path / "hedge").iterdir() if path.is_dir()] == []
    content = read(tmp_path / "hedge").SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["rate"].number_value == 0.1 and hparams["name"].string_value == "Hedge"
    assert hparams["env.runs"].number_value == 3 and hparams["episodes"].number_value == 20
    assert "env.cmdp" not in hparams  # a fingerprint is no hyperparameter


def test_the_table_of_hyperparameters_begins_with_what_differs_and_with_the_regret(tmp_path):
    """As TensorBoard answers its own page."""
    for rate in (0.1, 0.3):
        play(tmp_path / str(rate), rate=rate)
    provider = DataProvider(Multiplexer().AddRunsFromDirectory(str(tmp_path)).Reload(), str(tmp_path))
    context = backend_context.Context(TBContext(data_provider=provider))
    request = (RequestContext(), "", True, context.hparams_metadata(RequestContext(), ""), [])
    experiment = context.experiment_from_metadata(*request)
    assert [info.name for info in experiment.hparam_infos if info.differs] == [experiment.hparam_infos[0].name] == ["rate"]
    assert [info.name.tag for info in experiment.metric_infos][:4] == list(HEADLINES.values())


def test_two_learners_share_their_tags(tmp_path):
    play(tmp_path / "one")
    play(tmp_path / "two", rate=0.3)
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert set(runs.Runs()) == {"one", "two"}
    assert runs.Runs()["one"]["scalars"] == runs.Runs()["two"]["scalars"]


@pytest.mark.parametrize("at", [6, 8, 9])
def test_the_curve_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path, at):
    whole = play(tmp_path / "whole")
    play(tmp_path / "part", at=at, action=interrupt)
    play(tmp_path / "part")
    assert steps(read(tmp_path / "part"), "Regret/cumulative") == whole.episodes.tolist()
    for tag in ("Regret/cumulative", "Solver/iterations"):
        both = [[event.value for event in read(tmp_path / name).Scalars(shown(tag))] for name in ("part", "whole")]
        assert both[0] == both[1]


def test_points_after_the_last_checkpoint_are_not_seen_twice(tmp_path):
    with pytest.raises(Killed):
        play(tmp_path, at=6, action=kill, checkpoint_every=0)
    with pytest.raises(Killed):
        play(tmp_path, at=15, action=kill)
    play(tmp_path)
    assert steps(read(tmp_path), "Violation/cumulative") == [4, 8, 12, 16, 20]


def test_the_figures_are_images(tmp_path):
    env = make_env()
    run(Hedge(env.cmdp.layout), env, 20, tmp_path, 4, progress=False)
    events = read(tmp_path)
    assert set(events.Tags()["images"]) == {"Figures/curves", "Figures/growth", "Figures/balance"}
    assert events.Images("Figures/curves")[0].width == 2115


def test_a_single_run_has_a_band_of_no_width(tmp_path):
    writer = RunWriter(tmp_path)
    writer.point(3, {"Regret/cumulative": 2.0, "Regret/cumulative/ci95": float("nan")})
    assert [read(tmp_path).Scalars(tag)[0].value for tag in band_tags("Regret/cumulative")] == [2.0, 2.0, 2.0]


def test_flatten_names_nested_settings():
    assert flatten({"a": 1, "b": {"c": [2], "d": {"e": None}}}) == {"a": 1, "b.c": [2], "b.d.e": None}
