"""The folder beside a log in which other processes leave write requests for its owner, and the format of its files.

    app.db-writes/
        wake                                 a FIFO that the owner reads: a byte means that a request was added
        MOMENT-CALL-PID-STARTED.rows         a request to store rows; with `.prune`, a request to apply retention rules;
                                             with `.purge`, a request to remove the events of some keys
        MOMENT-CALL-PID-STARTED.result       the result of that request

A file is written under a temporary name and renamed when it is complete. Names sort by creation time and identify the
call that wrote the file. The owner executes the requests of one call one after the other, and none after one that
failed, so they are stored in order. The calls of other threads and processes do not wait for it. The name also
identifies the process, so the owner can remove the files of processes that have ended. A request stays in the folder
until its result is written. If the owner is killed, the next owner executes it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import astuple

from zbus import errors
from zbus.errors import EventInvalid, KeyInvalid, LogError, ZbusError
from zbus.keys import KeySet
from zbus.ports.log import Row
from zbus.util.atomic_file import write_atomically
from zbus.util.malformed import MALFORMED
from zbus.util.process import is_alive, started_at
from zbus_log.retention import Rules

WAKE = "wake"
ROWS, PRUNE, PURGE, RESULT, TEMPORARY = ".rows", ".prune", ".purge", ".result", ".tmp"

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_calls = itertools.count()
_encode = msgspec.msgpack.Encoder().encode
_Rows = Annotated[list[tuple[_Number, _Number, _Number, str, bytes, bytes | None]], msgspec.Meta(min_length=1)]
_decode_rows = msgspec.msgpack.Decoder(_Rows).decode
_decode_keys = msgspec.msgpack.Decoder(Annotated[list[str], msgspec.Meta(min_length=1)]).decode
_decode_rules = msgspec.msgpack.Decoder(Rules).decode
_decode_result = msgspec.msgpack.Decoder(tuple[bool, list[Any]]).decode


class Call(NamedTuple):
    """A call that writes requests, and its process."""

    number: int  # unique within its process
    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs, and so may wait for the result."""
        return is_alive(self.pid, self.started)


def writes_folder(log_path: str) -> Path:
    """Return the folder for write requests. It exists while the log's owner accepts them."""
    return Path(f"{log_path}-writes")


def new_call() -> Call:
    """Return the identity of a call that this process begins."""
    return Call(next(_calls), os.getpid(), started_at(os.getpid()))


def new_stem(call: Call) -> str:
    """Return a file name without suffix that sorts after all earlier ones, even if the wall clock is set back."""
    return "-".join([f"{time.monotonic_ns():020d}", *map(str, call)])


def call_of(name: str) -> Call | None:
    """Return the call that wrote a file, or None if the name does not have the form above."""
    try:
        _, number, pid, started = name.partition(".")[0].split("-")
        return Call(int(number), int(pid), int(started))
    except ValueError:
        return None


def write_file(path: Path, data: bytes) -> None:
    """Write a request or a result, which becomes visible only when it is complete."""
    write_atomically(path, data, path.with_name(path.name + TEMPORARY))


def wake(folder: Path, data: bytes = b"\0") -> bool:
    """Wake the owner. Returns whether an owner accepts proxied writes; empty `data` only checks that."""
    try:
        fifo = os.open(folder / WAKE, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the FIFO does not exist, or no process reads it
        return False
    try:
        os.write(fifo, data)
    except BlockingIOError:
        pass  # The FIFO is full, so the owner will wake up anyway.
    except BrokenPipeError:
        return False
    finally:
        os.close(fifo)
    return True


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Encode rows for a request. Raises `EventInvalid` if a row cannot be encoded."""
    try:
        return _encode([astuple(row)[:6] for row in rows])  # another process may not set the provenance of a row
    except (TypeError, ValueError, OverflowError) as error:
        raise EventInvalid(f"rows cannot be encoded ({error}); they were not stored") from error


def decode_rows(data: bytes) -> list[Row]:
    """Decode the rows of a request. Raises `EventInvalid` if they are malformed or a number is out of range."""
    try:
        return [Row(*each) for each in _decode_rows(data)]
    except MALFORMED as error:
        raise EventInvalid(f"malformed rows ({error}); none of them was stored") from error


def encode_rules(rules: Rules) -> bytes:
    """Encode retention rules for a request."""
    return _encode(rules)


def decode_rules(data: bytes) -> Rules:
    """Decode the retention rules of a request. Raises `EventInvalid` if they are malformed."""
    try:
        return _decode_rules(data)
    except MALFORMED as error:
        raise EventInvalid(f"malformed retention rules ({error}); nothing was removed") from error


def encode_keys(keys: KeySet) -> bytes:
    """Encode the key expressions of a purge for a request."""
    return _encode(keys.expressions)


def decode_keys(data: bytes) -> KeySet:
    """Decode the key expressions of a purge. Raises `EventInvalid` if they are malformed."""
    try:
        return KeySet(_decode_keys(data))
    except (*MALFORMED, KeyInvalid) as error:
        raise EventInvalid(f"malformed key expressions ({error}); nothing was removed") from error


def encode_result(result: Sequence[Any] | ZbusError) -> bytes:
    """Encode the result of a request: its fields, or the error that was raised."""
    if not isinstance(result, ZbusError):
        return _encode((True, result))
    name = type(result).__name__
    if getattr(errors, name, None) is type(result):
        with suppress(TypeError, ValueError, OverflowError):
            # The outcome of a plain `LogError` is a part of its text only.
            return _encode((False, (name, (str(result),) if type(result) is LogError else result.args)))
    return _encode((False, (LogError.__name__, (str(result).encode(errors="replace").decode(),))))


def decode_result(data: bytes) -> list[Any]:
    """Decode the fields of a result. Raises the error that the owner raised if the request failed."""
    good, fields = _decode_result(data)
    if good:
        return fields
    name, args = fields
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ZbusError):
        raise kind(*args)
    raise LogError(f"{name}: {', '.join(map(str, args))}")
