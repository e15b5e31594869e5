"""The documentation: it builds without a warning, its code and its commands run, its links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import torchcmdp
from train.__main__ import COMMANDS, MAIN_JOB
from train.bench import PARTS as BENCHMARKS
from train.run import COMPARED
from train.study import PARTS as COMPARISONS
from train.tune import PARTS as STUDIES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
TUTORIALS = sorted(name for name in PAGES if name.startswith("docs/tutorials/"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
WITH_CODE = sorted(name for name in PAGES if BLOCK.search(PAGES[name]) and name not in (*TUTORIALS, "README.md"))
sys.path.append(str(DOCS / "site"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link that leads nowhere or a name that is not documented ends the build."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    place = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHCMDP_DOCS_OUTPUTS", "0")  # the tutorials run in a test of their own
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(DOCS / "site" / "mkdocs.yml"), site_dir=str(place), strict=True)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return place


@pytest.mark.slow
def test_the_site_has_every_public_name_and_every_command(site):
    anchors = {anchor for page in site.glob("reference/*.html") for anchor in re.findall(r'id="([\w.-]+)"', page.read_text())}
    assert not {f"torchcmdp.{name}" for name in torchcmdp.__all__ if name != "__version__"} - anchors
    assert not set(COMMANDS) - anchors
    commands = (site / "reference" / "commands.html").read_text()
    for option in importlib.import_module(f"train.{MAIN_JOB}").Options.__dataclass_fields__:
        assert f"--{option.replace('_', '-')}" in commands, option


@pytest.mark.slow
def test_pages_fetch_nothing_from_the_net_and_every_formula_was_set(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', text), page
        assert 'class="arithmatex"' not in text, page


@pytest.mark.parametrize("name", [name for name in torchcmdp.__all__ if name not in ("__version__", "LEARNERS")])
def test_public_names_are_described(name):
    assert (getattr(torchcmdp, name).__doc__ or "").strip()


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile("\n".join(BLOCK.findall(PAGES[page])), page, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_the_tutorials_run():
    import notebooks

    forget = "\n\n```python\n%reset -f\n```\n\n"  # one kernel for all: each would import torch anew
    cells = notebooks.execute(forget.join(PAGES[page] for page in TUTORIALS)).cells
    assert sum(bool(cell.get("outputs")) for cell in cells) > 3 * len(TUTORIALS)


@pytest.mark.slow
def test_outputs_stand_under_their_cells(tmp_path):
    import notebooks

    shown = notebooks.with_outputs("Text.\n\n```python\nprint('a\\n\\n<b>')\n6 * 7\n```\n\nMore.\n", cache=tmp_path)
    assert shown.index("print(") < shown.index("a&#10;&#10;&lt;b&gt;") < shown.index("42") < shown.index("More.")
    assert len(list(tmp_path.glob("*.ipynb"))) == 1
    with pytest.raises(Exception, match="ZeroDivisionError"), contextlib.redirect_stderr(None):
        notebooks.execute("```python\n1 / 0\n```\n")


def _targets(name: str) -> list[str]:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", PAGES[name], flags=re.DOTALL | re.MULTILINE)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|#|mailto:", target)]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_inside_the_repository_lead_somewhere(page):
    import pages

    made = {(DOCS / name).resolve() for name in pages.generated()} if page != "README.md" else set()
    for target in _targets(page):
        place = (ROOT / page).parent / target.partition("#")[0]
        assert place.exists() or place.resolve() in made, target


COMMAND_LINES = {
    (page, match)
    for page, text in PAGES.items()
    for match in re.findall(r"(?:python -m train|torchrun [^\n]*-m train)((?: [^\s`#,;)]+)*)", text)
}


@pytest.mark.parametrize(("page", "line"), sorted(COMMAND_LINES))
def test_command_lines_name_commands_and_options_that_exist(page, line):
    words = line.split()
    name = words[0] if words and re.fullmatch(r"[a-z]+", words[0]) else MAIN_JOB
    if name in ("help", "COMMAND"):
        return
    assert name in COMMANDS, line
    parts = {"bench": BENCHMARKS, "tune": STUDIES, "study": COMPARISONS}.get(name, {})
    path = ["train", name]
    if parts and len(words) > 1 and not words[1].startswith("-"):
        assert words[1] in parts, line
        path.append(words[1])
    elif alone := {"tune": "study", "study": "compare"}.get(name):  # what these do without a part's name
        path.append(alone)
    module = importlib.import_module(".".join(path))
    for option in re.findall(r"--([a-z-]+)", line):
        assert option in ("help", "version") or option.replace("-", "_") in module.Options.__dataclass_fields__, option


@pytest.mark.parametrize("page", sorted(PAGES))
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^    make ([\w-]+)", PAGES[page], flags=re.MULTILINE):
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), name


def test_pages_count_the_learners_of_the_main_job():
    count = {4: "four", 5: "five", 6: "six"}[len(COMPARED)]
    said = {**{page: PAGES[page] for page in ("README.md", "docs/start/first-run.md")}, "Makefile": (ROOT / "Makefile").read_text()}
    for page, text in said.items():
        assert f"{count} learners" in text.lower(), page
