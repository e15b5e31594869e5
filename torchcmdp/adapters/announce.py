"""Has Gymnasium know the ids of our environments as soon as it is imported.

Gymnasium 1 reads no entry points, by which packages used to announce their environments. So an installation has this file
beside the package, as `_torchcmdp_announce.py`, and `torchcmdp.pth`, which runs it when Python starts. It therefore imports
nothing, us included: what an id stands for is imported when somebody makes it. Whatever goes wrong here is passed over: it
would be said at every start of Python, or stop an `import gymnasium`, in programs that may never have heard of us.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # without `typing`, which takes longer than all of this
if TYPE_CHECKING:
    from typing import Any

REGISTRATION = "gymnasium.envs.registration"
ENVIRONMENTS = {"torchcmdp/TwoPath-v0": "two_path", "torchcmdp/Random-v0": "random"}


class _Announcer:
    """Finds no module itself, but sees that this one is looked for; it stays, for whoever imports Gymnasium a second time."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Once `REGISTRATION` has run, our ids are registered there."""
        finders = list(sys.meta_path)
        if name != REGISTRATION or self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:  # those before have had their turn
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                _follow(spec.loader)
                return spec
        return None


def _follow(loader: Any) -> None:
    """Have a loader register our ids when it has run `REGISTRATION`."""
    run = getattr(loader, "exec_module", None)
    if run is None or getattr(run, "registers", False):
        return

    def run_and_register(module: Any) -> None:
        run(module)
        _register(module)

    run_and_register.registers = True  # type: ignore[attr-defined]
    try:
        loader.exec_module = run_and_register
    except (AttributeError, TypeError):  # a loader that cannot be changed; `import torchcmdp` registers them as well
        return


def _register(registration: Any) -> None:
    for env_id, function in ENVIRONMENTS.items():
        entry = f"torchcmdp.adapters.gymnasium:{function}"
        try:
            if env_id not in registration.registry:
                registration.register(env_id, entry_point=entry, vector_entry_point=entry)
        except Exception:  # a Gymnasium too old for us, or not Gymnasium's, which somebody imports for something else
            return


def announce() -> None:
    """Register our ids with Gymnasium, now or when it is imported."""
    if REGISTRATION in sys.modules:
        _register(sys.modules[REGISTRATION])
    # an installation has its own copy of this file, so the class is not always this one
    if not any(type(finder).__name__ == _Announcer.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Announcer())
