"""The order of the rooms, as CONTRIBUTING.md lists them, and what an import may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchcmdp"
# Each takes long to import, and no part of the core needs it before it is used.
HEAVY = ("matplotlib", "numba", "tensorboard", "scipy.stats", "cvxpy", "torch._dynamo", "gymnasium", "torchrl")


def ranks() -> dict[str, int]:
    """Each room and the number of its line in the list of CONTRIBUTING.md."""
    lines = re.findall(r"^ *(\d+)\. ((?:`\w+`(?:, )?)+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {room: int(number) for number, rooms in lines for room in re.findall(r"\w+", rooms)}


def rooms_imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and room of every import from our own code, wherever it stands: in a function, and under TYPE_CHECKING, too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "torchcmdp" else [base]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            names = [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        for name in names:
            package, _, rest = name.partition(".")
            if package in ("", "train", "tests"):
                yield node.lineno, name  # a relative import, or one of what stands on top of the package
            elif package == "torchcmdp":
                yield node.lineno, rest.partition(".")[0]


def modules() -> Iterator[tuple[str, Path]]:
    """Every file of the package with the room it is in."""
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room not in ("__init__", "__main__"):  # which gather all of them, and hand over to the programs
            yield room, path


def test_every_room_is_on_the_list_once_and_the_list_has_no_other() -> None:
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^ *\d+\. .*$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)))
    assert sorted(listed) == sorted({room for room, _ in modules()})


def test_a_room_imports_only_from_the_rooms_above_it() -> None:
    rank = ranks()
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {room} imports {other}"
        for room, path in modules()
        for line, other in rooms_imported(path.read_text())
        if other != room and rank.get(other, len(rank) + 1) >= rank.get(room, 0)
    ]
    assert not wrong, "\n".join(["CONTRIBUTING.md lists these the other way round, side by side, or not at all:", *wrong])


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("from torchcmdp.run import run", "run"),
        ("from torchcmdp import nn", "nn"),
        ("import torchcmdp.projection.newton as n", "projection"),
        ("if TYPE_CHECKING:\n    from torchcmdp.metrics import Tracker", "metrics"),
        ("def f():\n    from torchcmdp.plotting import draw", "plotting"),
        ("importlib.import_module('torchcmdp.tuning')", "tuning"),
        ("from train.bench import table", "train.bench"),
        ("from . import layout", "."),
    ],
)
def test_no_way_to_import_escapes(source: str, room: str) -> None:
    assert [found for _, found in rooms_imported(source)] == [room]
    assert list(rooms_imported("import torch\nfrom numpy import array")) == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, torchcmdp; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_loaded_later_is_there_and_listed() -> None:
    code = (
        "import torchcmdp as tc; assert {*tc.__all__} <= {*dir(tc)}; assert tc.nn.SafeOccupancy and tc.tuning.Study\n"
        "assert tc.testing and tc.adapters.gymnasium.CMDPEnv; from torchcmdp import *; print(nn.__name__, hasattr(tc, 'nonsense'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "torchcmdp.nn False", done.stderr


def test_no_file_is_over_400_lines() -> None:
    files = [path for folder in (PACKAGE, ROOT / "train") for path in folder.rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {path: count for path, count in lines.items() if count > 400}


def test_a_test_module_imports_from_no_other() -> None:
    wrong = []
    for path in sorted((ROOT / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{path.name} imports {name}" for name in names if name.startswith("test_")]
    assert not wrong, "what several tests need lives in helpers.py or hedge.py"
