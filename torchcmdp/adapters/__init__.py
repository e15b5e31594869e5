"""Our CMDPs inside other people's code, and their environments inside ours: `gymnasium`, `torchrl` and `tabular`.

Each adapter needs a package that the core does not, and is imported when it is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from torchcmdp.errors import TorchCMDPError

_ADAPTERS = ("gymnasium", "tabular", "torchrl")


class MissingExtra(TorchCMDPError, ImportError):
    """An adapter's package is not installed."""


def require(package: str, extra: str) -> ModuleType:
    """The package, or one sentence that says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:  # the package is there, and broken in its own way
            raise
        raise MissingExtra(f"this adapter needs the package {package}: pip install 'torchcmdp[{extra}]' installs it.") from error


def __getattr__(name: str) -> ModuleType:
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ADAPTERS])
