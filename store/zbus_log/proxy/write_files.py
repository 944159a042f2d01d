"""Errands as files: the folder beside a log in which other processes leave what its owner is to write.

    app.db-writes/
        wake                                 a FIFO that the owner reads: a byte says that there is something to do
        MOMENT-SERIAL-PID-STARTED.rows       an errand: rows to store, or `.retain`: rules of retention
        MOMENT-SERIAL-PID-STARTED.answer     what became of it

Files appear under a temporary name and are renamed when they are whole. Names sort by the moment at which they were
made, so that errands are done in that order, and carry the process that made them: what a process left that is gone
is nobody's. An errand lies there until it is answered, so that an owner that is killed leaves it to the next one.
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
from zbus.errors import EventInvalid, LogError, ZbusError
from zbus.ports.log import Row
from zbus_log.file.process import is_alive, started_at
from zbus_log.retention import Rules

WAKE = "wake"
ROWS, RETAIN, ANSWER, TEMPORARY = ".rows", ".retain", ".answer", ".tmp"

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_serials = itertools.count()
_encode = msgspec.msgpack.Encoder().encode
_Rows = Annotated[list[tuple[_Number, _Number, _Number, str, bytes, bytes | None]], msgspec.Meta(min_length=1)]
_decode_rows = msgspec.msgpack.Decoder(_Rows).decode
_decode_rules = msgspec.msgpack.Decoder(Rules).decode
_decode_answer = msgspec.msgpack.Decoder(tuple[bool, list[Any]]).decode


class Submitter(NamedTuple):
    """The process that left a file."""

    pid: int
    started: int

    @property
    def lives(self) -> bool:
        """Whether it still waits for an answer, as far as one can tell."""
        return is_alive(*self)


def writes_folder(log_path: str) -> Path:
    """Where the errands for a log lie, if its owner takes any."""
    return Path(f"{log_path}-writes")


def new_stem() -> str:
    """A name that sorts after all earlier ones of this process: clocks that are set back do not matter."""
    return f"{time.monotonic_ns():020d}-{next(_serials)}-{os.getpid()}-{started_at(os.getpid())}"


def submitter_of(name: str) -> Submitter | None:
    """Who left a file; None for a file that is none of ours."""
    try:
        _, _, pid, started = name.partition(".")[0].split("-")
        return Submitter(int(pid), int(started))
    except ValueError:
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that nobody sees before it is whole."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def wake(folder: Path, data: bytes = b"\0") -> bool:
    """Tell the owner that there is something to do; False where nobody takes errands. Without data, only ask that."""
    try:
        fifo = os.open(folder / WAKE, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no such FIFO, or nobody reads it
        return False
    try:
        os.write(fifo, data)
    except BlockingIOError:
        pass  # it is full: the owner has been told often enough
    except BrokenPipeError:
        return False
    finally:
        os.close(fifo)
    return True


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Rows as an errand."""
    try:
        return _encode([astuple(row)[:6] for row in rows])  # a process cannot say that another node published a row
    except (TypeError, ValueError, OverflowError) as error:
        raise EventInvalid(f"rows that cannot be encoded ({error}); not stored") from error


def decode_rows(data: bytes) -> list[Row]:
    """The rows of an errand, with numbers in range; raise `EventInvalid` for anything else."""
    try:
        return [Row(*each) for each in _decode_rows(data)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventInvalid(f"rows that are none ({error}); nothing of them was stored") from error


def encode_rules(rules: Rules) -> bytes:
    """Rules of retention as an errand."""
    return _encode(rules)


def decode_rules(data: bytes) -> Rules:
    """The rules of an errand."""
    try:
        return _decode_rules(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventInvalid(f"rules of retention that are none ({error}); nothing was removed") from error


def encode_answer(result: Sequence[Any] | ZbusError) -> bytes:
    """What became of an errand."""
    if not isinstance(result, ZbusError):
        return _encode((True, result))
    name = type(result).__name__
    if getattr(errors, name, None) is type(result):
        with suppress(TypeError, ValueError, OverflowError):
            return _encode((False, (name, result.args)))
    return _encode((False, (LogError.__name__, (str(result).encode(errors="replace").decode(),))))


def decode_answer(data: bytes) -> list[Any]:
    """What became of an errand: the fields of the result. Raises the error that befell it at the owner."""
    good, fields = _decode_answer(data)
    if good:
        return fields
    name, args = fields
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ZbusError):
        raise kind(*args)
    raise LogError(f"{name}: {', '.join(map(str, args))}")
