"""What mkdocs asks of us while it builds: the navigation from the pages that exist, generated pages, notebooks and formulas."""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

SITE = Path(__file__).parent
DOCS, ROOT = SITE.parent, SITE.parents[1]
sys.path[:0] = [str(SITE), str(ROOT)]

import notebooks  # noqa: E402
import pages  # noqa: E402

# The order of the pages in each section; what a folder holds besides comes after them, by name.
SECTIONS = {
    "Start": ("start", ["install", "first-run", "pictures", "tensorboard"]),
    "Tutorials": (
        "tutorials",
        ["first-cmdp", "own-learner", "own-adversary", "safe-layer", "tuning", "many-machines", "paper-figure"],
    ),
    "Guides": (
        "guides",
        [
            "choose-a-learner",
            "problems",
            "layouts",
            "environments",
            "other-libraries",
            "long-runs",
            "gpu",
            "certificate",
            "performance",
        ],
    ),
    "Explanation": ("explanation", ["../algorithm", "projection", "sleeping-constants", "study"]),
    "Reference": ("reference", ["commands", "tags", "run-folder", "changelog"]),
    "Results": ("results", ["claims", "study", "leaderboard", "benchmarks"]),
}


def navigation() -> list[Any]:
    """The pages that exist, section by section, so that a page that is added appears by itself."""
    nav: list[Any] = [{"Home": "index.md"}]
    made = pages.generated()
    for title, (folder, order) in SECTIONS.items():
        known = [os.path.normpath(f"{folder}/{name}.md") for name in order]
        found = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / folder).glob("*.md"))
        others = [page for page in (*found, *(page for page in made if page.startswith(f"{folder}/"))) if page not in known]
        nav.append({title: [page for page in known if page in made or (DOCS / page).exists()] + others})
    return nav


def on_config(config: Any) -> Any:
    """Say which pages there are, in which order."""
    config["nav"] = navigation()
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, text in pages.generated().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Show what the cells of a tutorial print and draw, unless TORCHCMDP_DOCS_OUTPUTS is 0."""
    if not page.file.src_uri.startswith("tutorials/") or os.environ.get("TORCHCMDP_DOCS_OUTPUTS") == "0":
        return markdown
    return notebooks.with_outputs(markdown, cache=ROOT / "build" / "notebooks")


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Formulas as MathML, which browsers read without a script."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]), display=display)

    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', mathml, content, flags=re.DOTALL)
