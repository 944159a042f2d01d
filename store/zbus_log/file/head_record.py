"""The head record: a small file beside the log with the offsets that the log must contain, and its owner.

SQLite cannot detect that its file was replaced by an older copy, or that a flipped bit made the
write-ahead log end early: both look like a shorter, healthy log. So the epoch and the last
acknowledged offset are kept in a separate file, in memory shared with the kernel. This survives a
killed process and costs a few memory stores per commit. Offsets are reserved in steps that are
synced to disk before use, so that even a log that lost its newest events never assigns one twice.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from zbus.errors import LogDamaged, LogLocked
from zbus.util.process import boot_id, is_running, on_fork

RESERVE = 1 << 20
_MAGIC = b"zbushead1\n"
_OWNER = struct.Struct("<q")  # the owner's pid, at 16; 0 after a clean close
_BOOT_AT, _RELAXED_AT = 24, 60  # the boot id when the log was opened, and whether commits were not synced
_BRIEF_AT = 61  # whether the owner has the log only for the duration of a call
_FIELDS = struct.Struct("<16sqq8xq")  # epoch, head, reserved, serial; earlier versions kept a fifth number
_SLOT = struct.Struct("<16sqq8xqI")  # the same with a checksum
_CHECKSUM = struct.Struct("<I")
_SLOTS_AT = (64, 128)
_SIZE = 4096
BRIEF_WAIT_S = 10.0  # how long to wait for such an owner
STARTING_WAIT_S = 1.0  # how long to wait for an owner that has not written its pid


class Head(NamedTuple):
    """The state of the log according to the head record."""

    epoch: bytes
    head: int = 0
    reserved: int = 0


class HeadRecord:
    """The head record of one log, locked by its owner. `update` is cheap; `sync` writes it to disk."""

    def __init__(self, log_path: str, *, accept_loss: bool = False, relaxed: bool = False, brief: bool = False) -> None:
        self.path = Path(f"{log_path}-head")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(log_path, brief)
            size = os.fstat(self._fd).st_size
            new = size == 0
            if 0 < size < _SIZE and not accept_loss:
                raise LogDamaged(log_path, "its head record is malformed")
            if size < _SIZE:
                os.truncate(self._fd, _SIZE)
            self._map = mmap.mmap(self._fd, _SIZE)
        except BaseException:
            os.close(self._fd)
            raise
        self._serial = 0
        self.current: Head | None = None
        if not new:
            self._load(log_path, accept_loss)
        boot = boot_id().encode()[:36]
        # With durability "os", a power cut may remove the newest events, and the newest state of this record.
        self.power_was_cut = (
            any(self._map[16:24]) and self._map[_RELAXED_AT] == 1 and self._map[_BOOT_AT : _BOOT_AT + len(boot)] != boot
        )
        self._map[: len(_MAGIC)] = _MAGIC
        self._map[_BOOT_AT : _BOOT_AT + len(boot)] = boot
        self._map[_RELAXED_AT] = relaxed
        self._map[_BRIEF_AT] = brief
        _OWNER.pack_into(self._map, 16, os.getpid())
        on_fork(self)

    def update(self, head: Head) -> None:
        """Store `head` in the older of the two slots, so that a torn write leaves the newer one intact."""
        self._serial += 1
        fields = _FIELDS.pack(*head, self._serial)
        at = _SLOTS_AT[self._serial & 1]
        self._map[at : at + _SLOT.size] = fields + _CHECKSUM.pack(zlib.crc32(fields))
        self.current = head

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still the one beside the log. Otherwise another process can lock the one that is."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return False

    def sync(self) -> None:
        """Write the record to disk."""
        self._map.flush()

    def close(self) -> None:
        """Sync, release the ownership, and close."""
        self.sync()
        _OWNER.pack_into(self._map, 16, 0)
        self._map.close()
        fd, self._fd = self._fd, -1
        os.close(fd)

    def forked(self, parent: int) -> None:
        """Close the file in a forked process, without unlocking it: the lock belongs to the parent, and ends with it.

        The lock belongs to the open file, which parent and child share, until the last of them has closed it.
        """
        if self._fd >= 0:
            self._map.close()  # it has a file descriptor too
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

    def _load(self, log_path: str, accept_loss: bool) -> None:
        try:
            found = _newest(bytes(self._map), log_path)
        except LogDamaged:
            if accept_loss:
                self._map[:] = bytes(_SIZE)
                return
            self._map.close()
            os.close(self._fd)
            raise
        if found is not None:
            self.current, self._serial = found


def read_record(log_path: str) -> Head | None:
    """Return the head record of a log without owning it, or None if it does not exist."""
    try:
        data = Path(f"{log_path}-head").read_bytes()
    except FileNotFoundError:
        return None
    found = _newest(data, log_path)
    return None if found is None else found[0]


def _newest(data: bytes, log_path: str) -> tuple[Head, int] | None:
    """Return the newer valid slot and its serial number, or None if nothing was stored yet."""
    if not any(data):
        return None  # the process that created it was killed before it wrote
    if not data.startswith(_MAGIC) or len(data) < _SIZE:
        raise LogDamaged(log_path, "its head record is malformed")
    slots = [(_SLOT.unpack_from(data, at), zlib.crc32(data[at : at + _FIELDS.size])) for at in _SLOTS_AT]
    whole = [slot for slot, checksum in slots if slot[3] and checksum == slot[4]]
    if whole:
        newest = max(whole, key=lambda slot: slot[3])
        return Head(*newest[:3]), newest[3]
    if any(slot[3] for slot, _ in slots):
        raise LogDamaged(log_path, "its head record is damaged")
    return None


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
