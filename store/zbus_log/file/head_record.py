"""The head record: a small file beside the log with the offsets that the log must contain, and its owner.

SQLite cannot detect that its file was replaced by an older copy, or that a flipped bit made the
write-ahead log end early: both look like a shorter, healthy log. So the epoch, the incarnation and
the last acknowledged offset are kept in a separate file. Each commit writes it into the kernel's
page cache, which survives a killed process. Offsets are reserved in steps that are synced to disk
before use, so that even a log that lost its newest events never assigns one twice.

The record also says which file the log is, so that a copy of a log in use is noticed: its owner did not close it, and
it is another file.

The file is not mapped into memory: a store into a mapping kills the process if the disk is full.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from zbus.errors import LogDamaged, LogLocked
from zbus.util.atomic_file import fsync
from zbus.util.process import boot_id, is_running, on_fork

RESERVE = 1 << 20
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAGIC = b"zbushead1\n"
_OWNER = struct.Struct("<q")  # the owner's pid, at 16; 0 after a clean close
_BOOT_AT, _RELAXED_AT = 24, 60  # the boot id when the log was opened, and whether commits were not synced
_BRIEF_AT = 61  # whether the owner has the log only for the duration of a call
_COPY_AT = 62  # whether the log is a copy of one in use that was not checked yet
_FILE_AT = 192  # which file the log is; zeros in a record of version 0.1
_FILE = struct.Struct("<QQHI")  # device, inode, the length of the path that follows, and a checksum of all of it
_PATH_BYTES_MAX = 2048
_FIELDS = struct.Struct("<16sqq8xq")  # epoch, head, reserved, serial; the first versions kept a fifth number
_SLOT = struct.Struct("<16sqq8xqIqI")  # the same with a checksum, and the incarnation with a checksum of all before it
_CHECKSUM = struct.Struct("<I")
_INCARNATION = struct.Struct("<q")
_WITHOUT_INCARNATION = bytes(_INCARNATION.size + _CHECKSUM.size)  # in a slot that version 0.1 wrote
_SLOTS_AT = (64, 128)
_SIZE = 4096
BRIEF_WAIT_S = 10.0  # how long to wait for such an owner
STARTING_WAIT_S = 1.0  # how long to wait for an owner that has not written its pid


class Head(NamedTuple):
    """The state of the log according to the head record."""

    epoch: bytes
    head: int = 0
    reserved: int = 0
    incarnation: int = 0  # one that is in the log, and has the event at the head; 0 if it is unknown


class HeadRecord:
    """The head record of one log, locked by its owner. `update` is cheap; `sync` writes it to disk.

    The methods that write raise `OSError`, such as on a full disk, and then leave the last state in place.
    """

    def __init__(self, log_path: str, *, accept_loss: bool = False, relaxed: bool = False, brief: bool = False) -> None:
        self.path = Path(f"{log_path}-head")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(log_path, brief)
            data = os.pread(self._fd, _SIZE, 0)
            if 0 < len(data) < _SIZE and not accept_loss:
                raise LogDamaged(log_path, "its head record is malformed")
            if len(data) < _SIZE:
                data = self._allocate(data)
            self._serial = 0
            self.current: Head | None = None
            data = self._load(data, log_path, accept_loss)
            boot = boot_id().encode()[:36]
            # With durability "os", a power cut may remove the newest events, and the newest state of this record.
            self.power_was_cut = _power_was_cut(data)
            self.copied_from = _copied_from(data, log_path, boot)
            owner = _OWNER.pack(os.getpid())
            start = _MAGIC.ljust(16, b"\0") + owner + boot.ljust(_RELAXED_AT - _BOOT_AT, b"\0")
            self._write(start + bytes((relaxed, brief, self.copied_from is not None)), 0)
        except BaseException:
            os.close(self._fd)
            raise
        on_fork(self)

    def update(self, head: Head) -> None:
        """Store `head` in the older of the two slots, so that a torn write leaves the newer one intact."""
        serial = self._serial + 1
        fields = _FIELDS.pack(*head[:3], serial)
        slot = fields + _CHECKSUM.pack(zlib.crc32(fields)) + _INCARNATION.pack(head.incarnation)
        self._write(slot + _CHECKSUM.pack(zlib.crc32(slot)), _SLOTS_AT[serial & 1])
        self._serial, self.current = serial, head

    def record_file(self, log_path: str) -> None:
        """Store which file the log is, once it was checked that it is not an incomplete copy."""
        found, path = os.stat(log_path), os.path.abspath(log_path).encode(errors="surrogateescape")  # noqa: PTH100, PTH116
        fields = found.st_dev, found.st_ino, min(len(path), _PATH_BYTES_MAX)
        self._write(_FILE.pack(*fields, _checksum_of_file(*fields, path)) + path[:_PATH_BYTES_MAX], _FILE_AT)
        self._write(b"\0", _COPY_AT)
        self.copied_from = None

    def _allocate(self, data: bytes) -> bytes:
        """Write the whole file, so that it has its place on the disk. Leaves an empty file if the disk is full."""
        data = data.ljust(_SIZE, b"\0")
        try:
            self._write(data, 0)
        except OSError:
            os.ftruncate(self._fd, 0)
            raise
        return data

    def _write(self, data: bytes, at: int) -> None:
        if os.pwrite(self._fd, data, at) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still the one beside the log. Otherwise another process can lock the one that is."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return False

    def sync(self) -> None:
        """Write the record to disk."""
        fsync(self._fd)

    def close(self) -> None:
        """Sync, release the ownership, and close. Closes in any case: the lock ends with it."""
        try:
            self.sync()
            self._write(_OWNER.pack(0), 16)
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def forked(self, parent: int) -> None:
        """Close the file in a forked process, without unlocking it: the lock belongs to the parent, and ends with it.

        The lock belongs to the open file, which parent and child share, until the last of them has closed it.
        """
        if self._fd >= 0:
            os.close(self._fd)

    def _lock(self, log_path: str, brief: bool) -> None:
        """Lock the file. Waits for an owner that has the log only during a call, unless this one is the same."""
        began = time.monotonic()
        while True:  # `owner_pid` in another process may hold the lock briefly
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                found = os.pread(self._fd, _BRIEF_AT + 1, 0).ljust(_BRIEF_AT + 1, b"\0")
                pid = _OWNER.unpack_from(found, 16)[0]
                wait_s = STARTING_WAIT_S
                if pid and is_running(pid):
                    wait_s = BRIEF_WAIT_S if found[_BRIEF_AT] and not brief else 0.0
                if time.monotonic() - began >= wait_s:
                    raise LogLocked(log_path, pid, pid == os.getpid()) from None
                time.sleep(0.002)

    def _load(self, data: bytes, log_path: str, accept_loss: bool) -> bytes:
        """Take over the newest state. Returns the data, which is zeros if it is damaged and that is accepted."""
        try:
            found = _newest(data, log_path)
        except LogDamaged:
            if not accept_loss:
                raise
            data = bytes(_SIZE)
            self._write(data, 0)
            return data
        if found is not None:
            self.current, self._serial = found
        return data


def _copied_from(data: bytes, log_path: str, boot: bytes) -> str | None:
    """Return the path of the log that this one is a copy of, if its owner had it open; otherwise None.

    The numbers of devices can change when the machine boots.
    """
    device, inode, size, checksum = _FILE.unpack_from(data.ljust(_SIZE, b"\0"), _FILE_AT)
    path = data[_FILE_AT + _FILE.size : _FILE_AT + _FILE.size + size]
    if not inode or checksum != _checksum_of_file(device, inode, size, path):
        return None
    try:
        found = os.stat(log_path)  # noqa: PTH116
    except OSError:
        return None
    is_same_boot = data[_BOOT_AT : _BOOT_AT + len(boot)] == boot
    is_same = found.st_ino == inode and (found.st_dev == device or not is_same_boot)
    is_copy = data[_COPY_AT] == 1 or (any(data[16:24]) and not is_same)
    return path.decode(errors="replace") if is_copy else None


def _checksum_of_file(device: int, inode: int, size: int, path: bytes) -> int:
    return zlib.crc32(_FILE.pack(device, inode, size, 0) + path[:size])


def read_record(log_path: str) -> Head | None:
    """Return the head record of a log without owning it, or None if it does not exist."""
    data = _read(log_path)
    found = _newest(data, log_path)
    return None if found is None else found[0]


def copied_from(log_path: str) -> str | None:
    """Return the path of the log that this one is a copy of, if its owner had it open; otherwise None."""
    data = _read(log_path)
    return _copied_from(data, log_path, boot_id().encode()[:36]) if data else None


def may_lack_newest(log_path: str) -> bool:
    """Return whether a power cut may have removed the newest events of the log, as durability 'os' permits."""
    data = _read(log_path)
    return bool(data) and _power_was_cut(data)


def _read(log_path: str) -> bytes:
    try:
        return Path(f"{log_path}-head").read_bytes()
    except FileNotFoundError:
        return b""


def _power_was_cut(data: bytes) -> bool:
    boot = boot_id().encode()[:36]
    return any(data[16:24]) and data[_RELAXED_AT] == 1 and data[_BOOT_AT : _BOOT_AT + len(boot)] != boot


def _newest(data: bytes, log_path: str) -> tuple[Head, int] | None:
    """Return the newer valid slot and its serial number, or None if nothing was stored yet."""
    if not any(data):
        return None  # the process that created it was killed before it wrote
    if not data.startswith(_MAGIC) or len(data) < _SIZE:
        raise LogDamaged(log_path, "its head record is malformed")
    slots = [data[at : at + _SLOT.size] for at in _SLOTS_AT]
    whole = [_SLOT.unpack(slot) for slot in slots if _is_whole(slot)]
    if whole:
        epoch, head, reserved, serial, _, incarnation, _ = max(whole, key=lambda fields: fields[3])
        return Head(epoch, head, reserved, incarnation), serial
    if any(_SLOT.unpack(slot)[3] for slot in slots):
        raise LogDamaged(log_path, "its head record is damaged")
    return None


def _is_whole(slot: bytes) -> bool:
    _, _, _, serial, checksum, _, of_all = _SLOT.unpack(slot)
    old = slot.endswith(_WITHOUT_INCARNATION)
    return (
        serial != 0
        and checksum == zlib.crc32(slot[: _FIELDS.size])
        and (old or of_all == zlib.crc32(slot[: -_CHECKSUM.size]))
    )


def owner_pid(log_path: str) -> int | None:
    """Return the process that owns the log, or None if the lock is free."""
    try:
        with Path(f"{log_path}-head").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                return None
            data = file.read(16 + _OWNER.size)
    except FileNotFoundError:
        return None
    return int(_OWNER.unpack_from(data, 16)[0]) if len(data) >= 24 else None
