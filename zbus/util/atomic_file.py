"""Files that survive a power failure, and files that other processes see whole or not at all."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY, errno.EOPNOTSUPP)


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
                fsync(file.fileno())
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
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync(descriptor: int) -> None:
    """Return once the content of an open file is on disk. Everything that must survive a power failure goes through it.

    On macOS, `os.fsync` leaves the content in the cache of the disk; `F_FULLFSYNC` writes that to the disk too. Some
    file systems, such as those of a network, do not support it.
    """
    if sys.platform == "darwin":
        import fcntl  # Windows has no such module

        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return
    os.fsync(descriptor)
