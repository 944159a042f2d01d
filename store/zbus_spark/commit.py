"""The driver side of a write: staged rows are published exactly once, even if a process is killed at any point.

When a batch is run again, its rows may be different or in another order. So a commit first stores an intent: the
staged files that it will publish, and the publisher id and sequences of their rows. A later commit that finds an
intent finishes it from the files that it names and drops the rows that were staged since; events that are already in
the log are skipped by their identity. Then a mark beside the log's cursors records that the batch is done, and only
then the intent and its files are removed. A batch that is marked is never published again.

A sink is one publisher for all its batches, with consecutive sequences.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from zbus.errors import ConfigInvalid, LogError, ZbusError
from zbus.ports.log import Row
from zbus.util.atomic_file import write_atomically
from zbus.util.identities import first_identity
from zbus_log import put
from zbus_log.write.cursors import SqliteCursors

from .staging import StagedPart, base_folder, check_files, remove, remove_abandoned_folders, rows_of

INTENT = ".intent"


class SinkBatch(NamedTuple):
    """One batch of one sink. A write that is not a stream is batch 0 with an empty query."""

    sink: str
    query: str = ""
    batch: int = 0


class Intent(msgspec.Struct, frozen=True):
    """The rows that are about to be published, and their identities."""

    sink: str
    query: str
    batch: int
    publisher_id: int
    first_sequence: int
    parts: list[StagedPart]


class _Mark(NamedTuple):
    """The progress of a sink: its last published batch and query, its publisher id and its next sequence."""

    query: int
    batch: int
    publisher_id: int
    next_sequence: int


def publish(log: Path, batch: SinkBatch, parts: Sequence[StagedPart]) -> None:
    """Publish the staged rows of a batch unless it was published before, then remove them."""
    with _locked(log):
        cursors = SqliteCursors(str(log))
        try:
            _publish(log, batch, parts, cursors)
        finally:
            cursors.close(5.0)
        remove(_folders(parts))


def publish_unnamed(log: Path, parts: Sequence[StagedPart]) -> None:
    """Publish and remove the staged rows of a write without a name, which cannot be recognized if it is repeated."""
    begun = False

    def chunks() -> Iterator[list[Row]]:
        nonlocal begun
        for chunk in rows_of(parts, *first_identity()):
            begun = True
            yield chunk

    try:
        if parts:
            put(log, chunks())
    except ZbusError as error:
        if not begun:
            raise
        unsure = "earlier rows may be in the log, and a new write publishes them again. Set `sinkId` to prevent that"
        raise LogError(f"{error}; {unsure}") from error
    remove(_folders(parts))


def published(log: Path, sink: str) -> int | None:
    """Return the number of events published to a log under a name, or None if no write under it was completed."""
    if not Path(f"{log}-cursors").is_file():
        return None
    cursors = SqliteCursors(str(log))
    try:
        mark = _load_mark(cursors, SinkBatch(sink))
    finally:
        cursors.close(5.0)
    return None if mark is None else mark.next_sequence


def discard(log: Path, parts: Sequence[StagedPart]) -> None:
    """Remove staged rows that will not be published. Keeps the rows of a commit that has begun and must be finished."""
    remove(_folders(parts) - needed_folders(log))


def remove_abandoned(log: Path, base: Path) -> None:
    """Remove the staged rows of killed writes to this log."""
    if base.is_dir():
        with _locked(log, wait=False) as locked:
            if locked:
                remove_abandoned_folders(base, needed_folders(log))


def needed_folders(log: Path) -> set[Path]:
    """Return the folders with rows of commits that have begun."""
    found: set[Path] = set()
    for path in _intents_folder(log).glob(f"*{INTENT}"):
        if (intent := _load(path)) is not None:
            found |= _folders(intent.parts)
    return found


def _publish(log: Path, batch: SinkBatch, parts: Sequence[StagedPart], cursors: SqliteCursors) -> None:
    path, mark = _intents_folder(log) / f"{_name(batch.sink)}{INTENT}", _load_mark(cursors, batch)
    intent = _load(path)
    if mark is not None and (mark.query, mark.batch) == (_query_number(batch.query), batch.batch):
        if (
            intent is not None and intent.batch == batch.batch
        ):  # the previous process was killed after it stored the mark
            _forget(path, intent)
        return
    _check_order(batch, mark, intent)
    if intent is None:
        if not parts:
            return
        publisher_id, first = (mark.publisher_id, mark.next_sequence) if mark else first_identity()
        check_files(parts)  # they may have been removed if this process outlived its driver
        intent = Intent(*batch, publisher_id, first, list(parts))
        write_atomically(path, msgspec.json.encode(intent), path.with_suffix(".tmp"), durable=True)
    put(log, rows_of(intent.parts, intent.publisher_id, intent.first_sequence))
    following = intent.first_sequence + sum(part.rows for part in intent.parts)
    _store_mark(cursors, batch, _Mark(_query_number(batch.query), batch.batch, intent.publisher_id, following))
    _forget(path, intent)


def _check_order(batch: SinkBatch, mark: _Mark | None, intent: Intent | None) -> None:
    """Raise `ConfigInvalid` if a batch is out of order or of another query: a repetition could not be recognized."""
    name = f"the sink {batch.sink!r}"
    if mark is not None and mark.query != _query_number(batch.query):
        reason = f"{name} was used for another query or another kind of write: choose another name"
    elif mark is not None and batch.batch < mark.batch:
        reason = f"{name} has published batch {mark.batch}, but this is batch {batch.batch}: the checkpoint is outdated"
    elif intent is not None and (intent.query, intent.batch) != (batch.query, batch.batch):
        reason = f"{name} has not finished batch {intent.batch}: resume with the checkpoint that it belongs to"
    else:
        return
    raise ConfigInvalid("sinkId", f"{reason}, or use a new name with a new checkpoint. Nothing was published")


@contextmanager
def _locked(log: Path, wait: bool = True) -> Iterator[bool]:
    """Lock the commits of a log: the committing process of a killed driver may still be running for a while.

    Yields whether the lock is held; without `wait` that is False if another process holds it.
    """
    path = _intents_folder(log) / "lock"
    descriptor, busy = None, False
    while descriptor is None and not busy:
        path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # the previous holder removed the folder or the file
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    break
            except BlockingIOError:
                busy = True
            except FileNotFoundError:
                pass
            os.close(descriptor)
            descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()  # while the lock is still held
                path.parent.rmdir()
            os.close(descriptor)


def _intents_folder(log: Path) -> Path:
    """Return the folder of intents: always beside the log, even if rows are staged in another folder."""
    return base_folder(log, None)


def _folders(parts: Sequence[StagedPart]) -> set[Path]:
    return {Path(part.path).parent for part in parts}


def _load(path: Path) -> Intent | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Intent)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise LogError(
            f"{path} cannot be read ({error}), so an unfinished commit cannot be completed. Nothing was published"
        ) from error


def _forget(path: Path, intent: Intent) -> None:
    path.unlink(missing_ok=True)
    remove(_folders(intent.parts))


def _load_mark(cursors: SqliteCursors, batch: SinkBatch) -> _Mark | None:
    positions = cursors.positions.load()
    names = [f"sink/{_name(batch.sink)}/{field}" for field in _Mark._fields]
    return _Mark(*(positions[name] for name in names)) if names[0] in positions else None


def _store_mark(cursors: SqliteCursors, batch: SinkBatch, mark: _Mark) -> None:
    cursors.positions.store({f"sink/{_name(batch.sink)}/{field}": value for field, value in mark._asdict().items()})


def _name(sink: str) -> str:
    return blake2b(sink.encode(), digest_size=12).hexdigest()


def _query_number(query: str) -> int:
    return int.from_bytes(blake2b(query.encode(), digest_size=7).digest()) if query else 0
