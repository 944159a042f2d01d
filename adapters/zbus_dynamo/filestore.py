"""The file backend of Dynamo's discovery: one file for each record, kept alive by its modification time.

A file appears complete or not at all: it is written under a temporary name, then linked. Changes are made under a
lock of the directory. Each process touches its own files, and every process removes files that have not been
touched for ten seconds, so that a record does not outlive its process by much.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from zbus.errors import TransportError

from .records import BUCKET, RECORD_BYTES_MAX, file_name

TTL_S = 10.0
TOUCH_S = TTL_S / 3
TEMPORARY = ".tmp_"
ENTRIES_MAX = 20_000
LOCK_WAIT_S = 1.0


def default_root() -> Path:
    """Return the directory of Dynamo's files: `DYN_FILE_KV`, or one in the temporary directory."""
    given = os.environ.get("DYN_FILE_KV")
    return Path(given) if given else Path(tempfile.gettempdir()) / "dynamo_store_kv"


class FileStore:
    """The event channels of one store. A call may block briefly, and no call keeps a file open. For one thread."""

    def __init__(self, root: Path) -> None:
        self.directory = root / BUCKET
        self.unreadable = 0  # entries that are not regular files, unreadable or too large
        self._owned: dict[str, bytes] = {}
        with _file_errors("make the directory", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def owned(self) -> frozenset[str]:
        """The names of the files that this store keeps alive."""
        return frozenset(self._owned)

    def put(self, key: str, value: bytes) -> None:
        """Publish a record, and keep it alive from now on by `touch`."""
        name = file_name(key)
        with _file_errors("write a record", self.directory), self._locked():
            self._write(name, value)
        self._owned[name] = value

    def delete(self, key: str) -> None:
        """Remove a record. A record that no longer exists is not an error."""
        name = file_name(key)
        self._owned.pop(name, None)
        with _file_errors("delete a record", self.directory), self._locked(), suppress(FileNotFoundError):
            (self.directory / name).unlink()

    def touch(self) -> list[str]:
        """Keep our records alive. Write those that another process removed again, and return them."""
        lost = []
        for name in self._owned:
            try:
                os.utime(self.directory / name)
            except FileNotFoundError:
                lost.append(name)
            except OSError as error:
                raise TransportError(f"cannot keep {self.directory / name} alive: {error}") from error
        if lost:
            with _file_errors("write a record", self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
                with self._locked():
                    for name in lost:
                        self._write(name, self._owned[name])
        return lost

    def reap(self) -> int:
        """Remove the files that have not been touched for `TTL_S` seconds; return how many."""
        removed = 0
        with _file_errors("remove dead records", self.directory), self._locked(), os.scandir(self.directory) as found:
            oldest = time.time() - TTL_S
            for entry in found:
                with suppress(OSError):
                    if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                        (self.directory / entry.name).unlink()
                        removed += 1
        return removed

    def files(self) -> dict[str, int]:
        """Return the names of all records with their inodes. The inode changes when a record is replaced."""
        with _file_errors("list records", self.directory):
            try:
                with os.scandir(self.directory) as found:
                    named = ((entry.name, entry.inode()) for entry in found if not entry.name.startswith(TEMPORARY))
                    return dict(islice(named, ENTRIES_MAX))
            except FileNotFoundError:
                return {}

    def read(self, name: str) -> bytes | None:
        """Return the content of one record, or None if it is gone, not a regular file, or far too large."""
        try:
            opened = os.open(self.directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:
            self.unreadable += 1
            return None
        try:
            about = os.fstat(opened)
            if stat.S_ISREG(about.st_mode) and about.st_size <= RECORD_BYTES_MAX:
                return os.read(opened, RECORD_BYTES_MAX)
        except OSError:
            pass
        finally:
            os.close(opened)
        self.unreadable += 1
        return None

    def close(self) -> None:
        """Delete our records. Safe to call twice."""
        if not self._owned:
            return
        names, self._owned = list(self._owned), {}
        with _file_errors("delete records", self.directory), self._locked():
            for name in names:
                (self.directory / name).unlink(missing_ok=True)

    def _write(self, name: str, value: bytes) -> None:
        temporary = self.directory / f"{TEMPORARY}{secrets.token_hex(8)}"
        temporary.write_bytes(value)
        try:
            os.link(temporary, self.directory / name)
        except FileExistsError:  # publisher ids are unique, so this is an earlier record of ours
            temporary.replace(self.directory / name)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        opened = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TransportError(f"{self.directory} stayed locked for {LOCK_WAIT_S:g} s") from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(opened)


@contextmanager
def _file_errors(doing: str, where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransportError(f"cannot {doing} in {where}: {error}") from error
