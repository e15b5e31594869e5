"""The exceptions of torchcmdp: each message is one sentence that says what was wrong, where, and what was expected."""

from __future__ import annotations


class TorchCMDPError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidInput(TorchCMDPError, ValueError):
    """An argument has the wrong shape, range, name or contents."""


class RunFolderError(TorchCMDPError, RuntimeError):
    """A run folder cannot be used: foreign, damaged, or made with other settings."""
