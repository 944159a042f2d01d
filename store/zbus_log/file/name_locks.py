"""Locks by name, one file each, that the kernel releases when the process that holds one ends, however it ends.

A lock does not depend on process ids, which containers with a volume in common do not share. SQLite needs all processes
of a log on one machine, so a lock of the kernel reaches all of them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from time import sleep
from weakref import WeakSet

from zbus.errors import LogError

NOTE_BYTES = 2048
RETRIES, RETRY_S = 5, 0.002  # `is_held` of another process locks the file briefly


class NameLock:
    """A lock that is held. Closing it releases the name."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path = fd, path
        _held.add(self)

    @property
    def is_in_place(self) -> bool:
        """Whether the locked file is still the one in the folder. Otherwise another process can lock the name."""
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except OSError:
            return False

    def note(self, data: bytes) -> None:
        """Store a note in the file of the lock, if this user may write it."""
        with suppress(OSError):
            os.pwrite(self._fd, data.ljust(NOTE_BYTES), 0)

    def noted(self) -> bytes:
        """Return the note."""
        return os.pread(self._fd, NOTE_BYTES, 0)

    def close(self) -> None:
        """Release the name. Calling it again has no effect."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing would not, while a forked process has the file open too
            self.abandon()

    def abandon(self) -> None:
        """Close the file without releasing the name, in a process that only inherited it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class NameLocks:
    """The locks in a folder, which is created when the first lock is taken.

    A user who may use the file `beside` may use the locks, whatever the umask of the user who created them.
    """

    def __init__(self, folder: str, beside: str) -> None:
        self._folder, self._beside = Path(folder), Path(beside)

    def take(self, name: str) -> NameLock | None:
        """Lock a name. Returns None if it is held, in this process or in another one."""
        path = self._path(name)
        with self._errors(name):
            self._make_folder()
            for _ in range(RETRIES):
                lock = self._open(path)
                try:
                    if _lock(lock._fd, fcntl.LOCK_EX):
                        if lock.is_in_place:
                            return lock
                        lock.close()  # it was removed, and the path may name another file now
                    else:
                        lock.abandon()
                        sleep(RETRY_S)
                except BaseException:
                    lock.abandon()
                    raise
        return None

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir()
        except FileExistsError:
            return
        with suppress(FileNotFoundError):  # the file is created next, with the same umask
            mode = self._beside.stat().st_mode & 0o666
            self._folder.chmod(mode | (mode & 0o444) >> 2)

    def _open(self, path: Path) -> NameLock:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # a file of another user, which can be locked nevertheless
            fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
        with suppress(PermissionError):  # a file of another user
            os.fchmod(fd, self._folder.stat().st_mode & 0o666)
        return NameLock(fd, path)

    def is_held(self, name: str) -> bool:
        """Return whether a process holds this lock."""
        with self._errors(name):
            path = self._path(name)
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return False
            with closing(NameLock(fd, path)):
                return not _lock(fd, fcntl.LOCK_SH)

    def held(self) -> list[bytes]:
        """Return the notes of the names that are locked, in this process or in another one."""
        found = []
        with suppress(OSError):
            for path in self._folder.iterdir():
                with closing(NameLock(os.open(path, os.O_RDONLY), path)) as lock:
                    if not _lock(lock._fd, fcntl.LOCK_SH):
                        found.append(lock.noted())
        return found

    def notes(self) -> list[bytes]:
        """Return the notes of all names."""
        with suppress(OSError):
            return [each.read_bytes() for each in self._folder.iterdir()]
        return []

    def clear_notes(self) -> None:
        """Remove the notes of all names."""
        with suppress(OSError):
            for each in self._folder.iterdir():
                os.truncate(each, 0)

    def any(self) -> bool:
        """Return whether a name was ever locked, and its file not removed."""
        try:
            return any(True for _ in self._folder.iterdir())
        except OSError:
            return False

    def remove(self, name: str) -> None:
        """Remove the file of a lock that the caller holds. A file that stays is used again."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / blake2b(name.encode(), digest_size=16).hexdigest()  # a name may be no file name

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LogError(
                f"{self._folder}: the lease of {name!r} is unknown: {error}. This call changed nothing"
            ) from error


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# A forked process shares the locks of its parent, and would keep them after the parent has ended.
_held: WeakSet[NameLock] = WeakSet()


def _abandon_all() -> None:
    for lock in list(_held):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_all)
