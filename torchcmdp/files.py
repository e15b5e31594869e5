"""Files that a crash or a full disk does not tear: replaced in one step, appended to, and one sentence where that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchcmdp.errors import RunFolderError


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Say in one sentence what a disk that is full or read-only says in a traceback."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written ({error.strerror or error}); what was saved before is untouched: make room or give "
            "access, and the same command continues from the last checkpoint."
        ) from error


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Replace a file, in a folder made if need be, in one step: after a crash it holds the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name.replace('tfevents', 'events')}.tmp")  # TensorBoard reads whatever is called tfevents
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)


def append_to_file(path: Path, content: bytes) -> None:
    """Add to the end of a file."""
    with disk(path), open(path, "ab") as file:
        file.write(content)


def _sync_folder(path: Path) -> None:
    """Let the new name of a file survive a power failure, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
