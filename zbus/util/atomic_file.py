"""Files that other processes see whole or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes, temporary: Path, *, durable: bool = False) -> None:
    """Write or replace a file. If it fails, the file at `path` is unchanged and `temporary` is removed.

    `temporary` is in the same folder, under a name that readers ignore. `durable`: return only once the file and its
    name are on disk, so that they survive a power failure.
    """
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Return once the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
