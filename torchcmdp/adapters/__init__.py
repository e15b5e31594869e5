"""Our CMDPs inside other people's code, and their environments inside ours: `gymnasium`, `sb3`, `torchrl`, `omnisafe`, `tabular`.

Each adapter needs a package that the core does not, and is imported when it is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from torchcmdp.errors import MissingExtra, require

try:
    from torchcmdp.adapters.announce import announce
except ModuleNotFoundError:  # a wheel has that file beside the package, and only there
    from _torchcmdp_announce import announce  # type: ignore[no-redef]

__all__ = ["MissingExtra", "require"]

announce()

_ADAPTERS = ("gymnasium", "omnisafe", "sb3", "tabular", "torchrl")


def __getattr__(name: str) -> ModuleType:
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ADAPTERS])
