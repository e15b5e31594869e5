"""`python -m train tensorboard`: its page has the learners' colours, and is TensorBoard's own where that cannot be."""

from __future__ import annotations

import gzip
import io
import json
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tensorboard.assets import get_default_assets_zip_provider

from torchcmdp.learners import LEARNERS
from torchcmdp.plotting.style import COLOURS, looks
from train import tensorboard
from train.run import COMPARED, label_of
from train.tensorboard import CHANGES, PAGE, SCRIPT, coloured, colours

ROOT = Path(__file__).parents[1]


def files(provider: tensorboard.Provider) -> dict[str, bytes]:
    with provider() as file, zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(contents: dict[str, str]) -> tensorboard.Provider:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return lambda: io.BytesIO(file.getvalue())


def served_colours(script: str) -> dict[str, str]:
    """What the page looks a run's folder up in."""
    found = re.search(r"const colours = (\{.*?\})", script)
    assert found is not None
    return json.loads(found[1])


def colour_of(folder: str, names: dict[str, str]) -> str | None:
    """As the page does it: the first name that the folder begins with, up to a word's end."""
    return next((colour for name, colour in names.items() if f"{folder}-".startswith(f"{name}-")), None)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a server that the command has started on a free port; Ctrl-C ends it without a complaint."""
    command = [sys.executable, "-m", "train", "tensorboard", "--port", "0", "--logdir", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://\S+:[1-9]\d*/", line):
                break
        else:
            pytest.fail("".join(said))
        yield found[0]
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate()
        assert process.returncode == 0 and "Traceback" not in rest, rest
        assert "colours" not in "".join(said)
    finally:
        process.kill()


def test_the_server_serves_the_colours_of_the_figures(address):
    page = urlopen(address).read().decode()
    (source,) = re.findall(r'<script src="(index\.js[^"]*)"', page)
    body = urlopen(Request(address + source, headers={"Accept-Encoding": "gzip"})).read()
    script = (gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body).decode()
    names = served_colours(script)
    drawn = looks(map(label_of, COMPARED))
    assert {name: colour_of(name, names) for name in COMPARED} == {name: drawn[label_of(name)][0] for name in COMPARED}
    assert "runColorOverrideForGroupBy:new TorchcmdpChosen" in script and re.search(
        r",torchcmdpColour\((\w+)\)\|\|this\.palette\[", script
    )
    assert json.loads(urlopen(f"{address}data/runs").read()) == []  # the rest is TensorBoard


def test_every_learner_has_its_own_colour_whatever_follows_its_name():
    names = colours()
    for key, kind in LEARNERS.items():
        for folder in (key, f"{key}-matched-radii", kind.name.lower()):
            assert colour_of(folder, names) == COLOURS[kind.name], folder
    assert colour_of("wc-ops-practical-2", names) == COLOURS["WC-OPS practical"] != COLOURS["WC-OPS"]
    assert colour_of("greedyish", names) is None and colour_of("mine", names) is None


def test_all_else_of_the_page_is_tensorboards_and_browsers_do_not_mix_the_two_up():
    own = files(get_default_assets_zip_provider())
    ours = files(coloured(get_default_assets_zip_provider(), colours()))
    assert ours.keys() == own.keys()
    assert {name for name in own if own[name] != ours[name]} == {SCRIPT, PAGE}
    changed = re.sub(rb"(?<=_file_hash=)\w+", b"", ours[PAGE])
    assert changed == re.sub(rb"(?<=_file_hash=)\w+", b"", own[PAGE])
    assert len(ours[SCRIPT]) - len(own[SCRIPT]) < 5_000


@pytest.mark.parametrize("lacking", range(len(CHANGES)))
def test_a_page_that_we_do_not_know_is_served_as_it_is_and_said_to_be(lacking, monkeypatch, capsys):
    parts = [
        "{runColorOverrideForGroupBy:new Map,defaultRunColorIdForGroupBy:new Map}",
        "new Map(t.runColorOverrideForGroupBy)",
        "this.identifiers.set(r,this.palette[n%this.palette.length])",
    ]
    page = {PAGE: '<script src="index.js?_file_hash=0">', SCRIPT: ";".join(parts)}
    assert b"_file_hash=0" not in files(coloured(packed(page), {}))[PAGE]
    del parts[lacking]
    monkeypatch.setattr("tensorboard.assets.get_default_assets_zip_provider", lambda: packed(page | {SCRIPT: ";".join(parts)}))
    assert tensorboard.page() is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a page that torchcmdp does not know" in said and "0 times" in said


@pytest.mark.parametrize("provider", [None, packed({}), lambda: io.BytesIO(b"no archive")])
def test_a_tensorboard_without_such_a_page_still_comes_up(provider, monkeypatch, capsys):
    monkeypatch.setattr("tensorboard.assets.get_default_assets_zip_provider", lambda: provider)
    assert tensorboard.page() is None and capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_is_not_there_yet_is_no_obstacle(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "tensorboard.program.TensorBoard.main", lambda board: 0 if board.flags.logdir == str(tmp_path / "no") else 1
    )
    assert tensorboard.main(["--logdir", str(tmp_path / "no")]) == 0
    assert f"There is no folder {tmp_path / 'no'} yet" in capsys.readouterr().err
