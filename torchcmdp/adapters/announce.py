"""Has Gymnasium know the ids of our environments as soon as it is imported.

Gymnasium 1 reads no entry points, by which packages used to announce their environments. So an installation has this file a
second time, beside the package, and `torchcmdp.pth`, which runs it when Python starts. It therefore imports nothing, us included:
what an id stands for is imported when somebody makes it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # without `typing`, which takes longer than all of this
if TYPE_CHECKING:
    from typing import Any

REGISTRATION = "gymnasium.envs.registration"
ENVIRONMENTS = {"torchcmdp/TwoPath-v0": "two_path", "torchcmdp/Random-v0": "random"}


class _Announcer:
    """Finds no module itself, but sees that this one is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Once `REGISTRATION` has run, our ids are registered there."""
        if name != REGISTRATION:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register(registration: Any) -> None:
    for env_id, function in ENVIRONMENTS.items():
        if env_id not in registration.registry:
            entry = f"torchcmdp.adapters.gymnasium:{function}"
            try:
                registration.register(env_id, entry_point=entry, vector_entry_point=entry)
            except TypeError:
                return  # a Gymnasium too old for us, which somebody imports for something else


def announce() -> None:
    """Register our ids with Gymnasium, now or when it is imported."""
    if REGISTRATION in sys.modules:
        _register(sys.modules[REGISTRATION])
    else:
        sys.meta_path.insert(0, _Announcer())
