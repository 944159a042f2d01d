"""The driver's half of a write: staged rows are published once, whatever is killed when.

Rows of a batch that is run again may come in another order, or be others. So a commit first writes down what it is
about to publish, and as whom: its intent. Whoever finds an intent finishes that one, from the files it names, and
drops what was staged since; events that are in the log already stay as they are, by their identity. Then a mark
beside the cursors of the log says that the batch is done, and only after that the intent and its files go. Of a
batch that is marked nothing is published again.

A sink is one publisher for all its batches, with sequences that rise without holes.
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
from zbus.util.identities import first_identity
from zbus_log import put
from zbus_log.write.cursors import SqliteCursors

from .staging import StagedPart, base_folder, check_files, remove, remove_abandoned_folders, rows_of

INTENT = ".intent"


class SinkBatch(NamedTuple):
    """One batch of one sink. A write that is not a stream is batch 0 of no query."""

    sink: str
    query: str = ""
    batch: int = 0


class Intent(msgspec.Struct, frozen=True):
    """What is about to be published."""

    sink: str
    query: str
    batch: int
    publisher_id: int
    first_sequence: int
    parts: list[StagedPart]


class _Mark(NamedTuple):
    """What a sink has published: as whom, up to which batch of which query, and its next sequence."""

    query: int
    batch: int
    publisher_id: int
    next_sequence: int


def publish(log: Path, batch: SinkBatch, parts: Sequence[StagedPart]) -> None:
    """Publish the staged rows of a batch, unless that was done; then remove them."""
    with _locked(log):
        cursors = SqliteCursors(str(log))
        try:
            _publish(log, batch, parts, cursors)
        finally:
            cursors.close(5.0)
        remove(_folders(parts))


def publish_unnamed(log: Path, parts: Sequence[StagedPart]) -> None:
    """Publish staged rows of a write that nobody can run again as the same, and remove them."""
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
        unsure = "rows before that may be in the log, and a new write publishes them again, unless it has a `sinkId`"
        raise LogError(f"{error}; {unsure}") from error
    remove(_folders(parts))


def published(log: Path, sink: str) -> int | None:
    """How many events were published to a log under a name; None where no write under it is done."""
    if not Path(f"{log}-cursors").is_file():
        return None
    cursors = SqliteCursors(str(log))
    try:
        mark = _load_mark(cursors, SinkBatch(sink))
    finally:
        cursors.close(5.0)
    return None if mark is None else mark.next_sequence


def discard(log: Path, parts: Sequence[StagedPart]) -> None:
    """Remove staged rows that are not to be published, unless a commit of them was begun: it is to be finished."""
    remove(_folders(parts) - needed_folders(log))


def remove_abandoned(log: Path, base: Path) -> None:
    """Remove what writes of this log left that were killed."""
    if base.is_dir():
        with _locked(log, wait=False) as locked:
            if locked:
                remove_abandoned_folders(base, needed_folders(log))


def needed_folders(log: Path) -> set[Path]:
    """The folders that hold rows of commits that were begun."""
    found: set[Path] = set()
    for path in _intents_folder(log).glob(f"*{INTENT}"):
        if (intent := _load(path)) is not None:
            found |= _folders(intent.parts)
    return found


def _publish(log: Path, batch: SinkBatch, parts: Sequence[StagedPart], cursors: SqliteCursors) -> None:
    path, mark = _intents_folder(log) / f"{_name(batch.sink)}{INTENT}", _load_mark(cursors, batch)
    intent = _load(path)
    if mark is not None and (mark.query, mark.batch) == (_query_number(batch.query), batch.batch):
        if intent is not None and intent.batch == batch.batch:  # killed after the mark
            _forget(path, intent)
        return
    _check_order(batch, mark, intent)
    if intent is None:
        if not parts:
            return
        publisher_id, first = (mark.publisher_id, mark.next_sequence) if mark else first_identity()
        check_files(parts)  # a commit that outlived its driver may come after the files were removed
        intent = Intent(*batch, publisher_id, first, list(parts))
        _store(path, intent)
    put(log, rows_of(intent.parts, intent.publisher_id, intent.first_sequence))
    following = intent.first_sequence + sum(part.rows for part in intent.parts)
    _store_mark(cursors, batch, _Mark(_query_number(batch.query), batch.batch, intent.publisher_id, following))
    _forget(path, intent)


def _check_order(batch: SinkBatch, mark: _Mark | None, intent: Intent | None) -> None:
    """Batches of a query come in order, and a name belongs to one query: else what is a repetition is not known."""
    name = f"the sink {batch.sink!r}"
    if mark is not None and mark.query != _query_number(batch.query):
        reason = f"{name} has published for another query, or another kind of write: choose another name"
    elif mark is not None and batch.batch < mark.batch:
        reason = (
            f"{name} has published batch {mark.batch}, and this is batch {batch.batch}: the checkpoint is an old one"
        )
    elif intent is not None and (intent.query, intent.batch) != (batch.query, batch.batch):
        reason = f"{name} has not finished batch {intent.batch}: go on with the checkpoint that it belongs to"
    else:
        return
    raise ConfigInvalid("sinkId", f"{reason}, or begin anew with both. Nothing was published")


@contextmanager
def _locked(log: Path, wait: bool = True) -> Iterator[bool]:
    """One commit at a time: of a killed driver, the process that commits may live on for a while."""
    path = _intents_folder(log) / "lock"
    descriptor, busy = None, False
    while descriptor is None and not busy:
        path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # the one before us removed the folder, or the file
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
                path.unlink()  # while it is ours
                path.parent.rmdir()
            os.close(descriptor)


def _intents_folder(log: Path) -> Path:
    """Where intents lie: beside the log, whatever folder rows are staged in."""
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
            f"{path} cannot be read ({error}), so it is not known what was begun. Nothing was published"
        ) from error


def _store(path: Path, intent: Intent) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(intent))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
