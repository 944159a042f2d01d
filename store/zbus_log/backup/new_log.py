"""A new log that is made of another one: built in a folder beside its place, then put there at once.

The head record is put in place first and the log last. So a process that is killed in between leaves a log that
cannot be opened, because its file is missing, and never one that is mixed with older files.

An existing log is moved aside under one name, even if a process is killed while it does so: its head record is copied
to that name first, and the next process continues with that name. Each folder is locked by the process that builds in
it. Folders that no process has locked are left over, and are removed.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zbus.errors import ConfigInvalid, CursorError, LogDamaged, LogLocked, ZbusError
from zbus.util.atomic_file import sync
from zbus_log.file.head_record import Head, HeadRecord, owner_pid, read_record
from zbus_log.file.name_locks import NameLocks
from zbus_log.file.old_folder import OldFolder
from zbus_log.write.cursor_notes import decode_note
from zbus_log.write.cursors import SqliteCursors

from .log_copy import Contents

# Everything that belongs to a log, the head record last.
PARTS = (
    "",
    "-wal",
    "-shm",
    "-journal",
    "-cursors",
    "-cursors-wal",
    "-cursors-shm",
    "-cursors-journal",
    "-leases",
    "-writes",
    OldFolder("").path.name,
    "-cold",
)
HEAD = "-head"


def log_path(path: str) -> Path:
    """Return the path of a log. Raises `ConfigInvalid` if it is empty, or names a folder that does not exist."""
    if not path:
        raise ConfigInvalid("log", "the path is empty, which would be the current folder. Nothing was changed")
    if path.endswith("/") and not Path(path).is_dir():
        raise ConfigInvalid("log", f"{path!r} names a folder, and a log is a file: name it, such as {path}app.db")
    return Path(path)


class NewLog:
    """A log that is being made for `path`. Use it as a context manager, which removes what was not put in place."""

    def __init__(self, path: str) -> None:
        self._path = log_path(path)
        if self._path.is_dir():
            name = self._path / "app.db"
            raise ConfigInvalid(
                "log",
                f"{path!r} is a folder, and a log is a file: name it, such as {str(name)!r}. Nothing was changed",
            )
        if not self._path.parent.is_dir():
            raise ConfigInvalid("log", f"the folder {str(self._path.parent)!r} does not exist")
        self._folder = self._path.with_name(f".{self._path.name}.new-{secrets.token_hex(4)}")
        self.path = str(self._folder / self._path.name)
        self._descriptor: int | None = None

    def __enter__(self) -> NewLog:
        for folder in self._path.parent.glob(f".{glob.escape(self._path.name)}.new-*"):
            if (descriptor := _lock_folder(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
        self._folder.mkdir()
        self._descriptor = _lock_folder(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._descriptor is not None:
            os.close(self._descriptor)

    @property
    def exists(self) -> bool:
        """Whether there is a log already, or a part of one."""
        return bool(self._existing())

    def check_free(self) -> None:
        """Raise `ConfigInvalid` if there is a log already, or a part of one."""
        if found := self._existing():
            raise ConfigInvalid("log", f"{str(found[0])!r} exists already. Nothing was changed")

    def record_head(self, contents: Contents) -> None:
        """Write the head record. The log does not lose what it says."""
        sync(Path(self.path))
        record = HeadRecord(self.path)
        record.update(Head(contents.epoch, contents.cut, contents.cut, contents.incarnation))
        record.close()

    def put_in_place(self, *, replace: bool = False) -> str | None:
        """Move the log to its place. `replace`: move an existing one aside first, and return its new path."""
        if not replace:
            self.check_free()
        for each in self._folder.iterdir():
            if each.is_file():
                sync(each)
        sync(self._folder)
        with self._locked():
            aside = self._move_aside() if self._existing() else None
            new_head = Path(f"{self.path}{HEAD}")
            new_head.replace(f"{self._path}{HEAD}")
            for part in reversed(PARTS):  # the log last
                if (made := Path(f"{self.path}{part}")).exists():
                    made.rename(f"{self._path}{part}")
            sync(self._path.parent)
        return aside

    def _existing(self) -> list[Path]:
        return [path for part in (*PARTS, HEAD) if os.path.lexists(path := Path(f"{self._path}{part}"))]

    def _move_aside(self) -> str:
        """Move the existing log aside, with all its parts. Its head record stays until the new one replaces it."""
        name = self._begun_aside()
        if name is None:
            name = f"{self._path}.replaced-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
            while os.path.lexists(name) or os.path.lexists(f"{name}{HEAD}"):
                name += "x"
        if (head := Path(f"{self._path}{HEAD}")).exists():
            shutil.copyfile(head, f"{name}{HEAD}")
            sync(Path(f"{name}{HEAD}"))
        for part in PARTS:
            if os.path.lexists(path := Path(f"{self._path}{part}")):
                path.rename(f"{name}{part}")
        return name

    def _begun_aside(self) -> str | None:
        """Return the name under which a process that was killed began to move this log aside."""
        pattern = re.compile(re.escape(self._path.name) + r"\.replaced-\d{8}T\d{6}x*")
        found = (pattern.match(each) for each in os.listdir(self._path.parent))  # noqa: PTH208
        newest = max((each[0] for each in found if each is not None), default=None)
        if newest is None:
            return None
        name = str(self._path.with_name(newest))
        moved = {part for part in PARTS if os.path.lexists(f"{name}{part}")}
        here = {part for part in PARTS if os.path.lexists(f"{self._path}{part}")}
        if not moved:  # only the head record was copied
            return name
        is_same = "" not in here and not moved & here and _head_of(name) == _head_of(str(self._path))
        return name if is_same else None

    def _subscriber(self, name: str) -> str:
        cursors = SqliteCursors(str(self._path))
        try:
            owners = [each.owner for each in cursors.list() if each.name == name]
        except ZbusError:  # the file of the cursors is damaged
            owners = []
        finally:
            cursors.close(1.0)
        return (owners[0] if owners else None) or "another process"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from owning the existing log. Raises `LogLocked` if one does.

        Raises `CursorError` if a process has a durable subscription: it would store its position in the new log.
        """
        for note in NameLocks(f"{self._path}-leases", beside=str(self._path)).held():
            found = decode_note(note)
            name = "" if found is None else found.name
            raise CursorError(name, f"{self._subscriber(name)} reads {self._path}; stop that process first")
        try:
            descriptor = os.open(f"{self._path}{HEAD}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = owner_pid(str(self._path)) or 0
                raise LogLocked(str(self._path), pid, pid == os.getpid()) from None
            yield
        finally:
            os.close(descriptor)


def _lock_folder(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed, or this process ends. Returns None if another process has it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _head_of(log: str) -> Head | bytes | None:
    try:
        return read_record(log)
    except LogDamaged:
        return Path(f"{log}{HEAD}").read_bytes()
