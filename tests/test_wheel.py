"""What pip users get: the wheel has the programs, under a name that cannot clash, and they run under it."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PROGRAMS = "torchcmdp_programs"


def sources(folder: str) -> set[str]:
    return {str(path.relative_to(ROOT / folder)) for path in (ROOT / folder).rglob("*.py")}


def test_the_wheel_has_the_library_and_the_programs_and_nothing_that_clashes(tmp_path):
    with zipfile.ZipFile(
        next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path)))
    ) as wheel:  # whose files are not all that it lists
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {f"torchcmdp/{name}" for name in sources("torchcmdp")} | {"torchcmdp/py.typed"} <= files
    assert {f"{PROGRAMS}/{name}" for name in sources("train")} <= files
    assert {name.partition("/")[0] for name in files} == {"torchcmdp", PROGRAMS, "_torchcmdp_announce.py", "torchcmdp.pth"}
    assert importlib.util.find_spec(PROGRAMS) is None  # a clone has them in train/, and no copy that grows old


@pytest.mark.parametrize("before", ["import gymnasium", "import torchcmdp, gymnasium", "import gymnasium, torchcmdp"])
def test_gymnasium_knows_our_ids_where_a_wheel_is_installed(tmp_path, before):
    """And has not imported us for it. Laid out as the wheel's files are."""
    forced = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, name in forced.items():
        (tmp_path / name).symlink_to(ROOT / source)
    alone = before == "import gymnasium"
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r})\n{before}\n"
    code += f"assert ('torchcmdp' in sys.modules) != {alone}\n"
    code += "ours = [env_id for env_id in gymnasium.registry if env_id.startswith('torchcmdp')]\n"
    code += "print(ours, gymnasium.make('torchcmdp/TwoPath-v0').unwrapped.constraints)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "['torchcmdp/TwoPath-v0', 'torchcmdp/Random-v0'] 1", done.stderr


def test_somebody_elses_old_gymnasium_is_left_alone(tmp_path):
    """What it cannot register it is not asked to, and its import goes on."""
    place = tmp_path / "gymnasium" / "envs"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    (place.parent / "__init__.py").write_text("from gymnasium.envs import registration")
    (place / "registration.py").write_text("registry = {}\ndef register(id, entry_point): registry[id] = entry_point")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom torchcmdp.adapters import announce\n"
    code += "import gymnasium; print(gymnasium.__file__, gymnasium.registration.registry)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == f"{place.parent / '__init__.py'} {{}}", done.stderr


def test_programs_import_each_other_by_no_name_of_their_own():
    for path in (ROOT / "train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.partition(".")[0] == "train"], f"{path.name}:{node.lineno}"  # type: ignore[attr-defined]


def test_the_command_runs_from_what_a_wheel_would_hold(tmp_path):
    """As laid out there, in an empty directory, far from the clone."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "torchcmdp").symlink_to(ROOT / "torchcmdp")
    (place / PROGRAMS).symlink_to(ROOT / "train")
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["torchcmdp"]
    module, _, function = script.partition(":")
    # without what the environment itself may have installed of us
    code = f"import sys; sys.path.insert(0, {str(place)!r}); sys.path = [p for p in sys.path if p != {str(ROOT)!r}]\n"
    code += f"import importlib; sys.argv[0] = 'torchcmdp'; sys.exit(importlib.import_module({module!r}).{function}())"
    done = subprocess.run([sys.executable, "-c", code, "swep"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "'swep' is not a command of torchcmdp; did you mean sweep?\n")
    done = subprocess.run([sys.executable, "-c", code, "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "| newton " in done.stdout and "works" in done.stdout, done.stderr
