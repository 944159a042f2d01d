"""Full verification of a log: the file, every checksum and offset, its lineage, and the head record beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from sqlalchemy import Connection

from zbus.errors import LogDamaged, LogError
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus_log.file.chain import LEAF_BYTES, check_block
from zbus_log.file.database import log_errors, make_engine, snapshot
from zbus_log.file.head_record import Head, read_record
from zbus_log.file.incarnations import read_lineage
from zbus_log.file.old_folder import OldFolder
from zbus_log.file.tables import BLOCK, LINEAGE_SINCE, SEALED_UNTIL, file_version, get_epoch

from .reader import SqliteReader

PAGE = 2048


class Report(NamedTuple):
    """Findings of `verify`. If `problems` is empty, the log holds every event that was acknowledged."""

    events: int
    first: int
    head: int
    problems: list[str]
    losses: list[tuple[int, int]]
    warnings: tuple[str, ...] = ()  # findings beside the log that do not damage it


def verify(path: str, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read the whole log at `path`, beside its owner if it has one, and report every problem."""
    problems: list[str] = []
    record = _read_record(path, problems)  # first, because an active owner writes the log before its head record
    engine = make_engine(path, read_only=True)
    reader = SqliteReader(path, engine)
    try:
        with log_errors(path), engine.connect() as connection:
            for (finding,) in connection.exec_driver_sql("PRAGMA integrity_check"):
                if finding != b"ok":
                    problems.append(f"SQLite: {finding.decode()}")
            epoch = get_epoch(connection)
            low_water = reader.low_water()
            head = reader.head()
            losses = [
                (int(first), int(last))
                for first, last in connection.exec_driver_sql("SELECT first, last FROM losses ORDER BY first")
            ]
            gaps = connection.exec_driver_sql(
                "SELECT before, offset FROM (SELECT offset, lag(offset, 1, ?) OVER (ORDER BY offset) AS before"
                " FROM events) WHERE offset != before + 1",
                (low_water,),
            ).all()
            problems += [
                f"offsets {before + 1} to {offset - 1} are missing"
                for before, offset in gaps
                if not any(first <= before + 1 and offset - 1 <= last for first, last in losses)
            ]
            unindexed = connection.exec_driver_sql(
                f"SELECT count(*) FROM events WHERE offset <= {SEALED_UNTIL}"
                " AND (key, offset) NOT IN (SELECT by_key.key, entry.value FROM by_key, json_each(offsets) AS entry)"
            ).scalar_one()
            if unindexed:
                problems.append(f"{unindexed} sealed events are missing from the key index")
            if file_version(connection) >= LINEAGE_SINCE:
                problems += _check_lineage(connection)
        events = _check_events(reader, low_water, head, problems, progress)
    except LogError as error:
        problems.append(str(error))
        return Report(0, 0, 0, problems, [])
    finally:
        engine.dispose()
    if record is not None and record.head and record.epoch != epoch:
        problems.append("this is a different log from the one that the head record describes")
    elif record is not None and record.head > head:
        problems.append(f"offsets {head + 1} to {record.head} were acknowledged and are missing")
    left = OldFolder(path).describe()
    return Report(events, low_water + 1 if events else 0, head, problems, losses, () if left is None else (left,))


def _check_lineage(connection: Connection) -> Iterator[str]:
    """Yield the problems of the incarnations, and of the digests of sealed blocks."""
    for before, after in pairwise(read_lineage(connection).incarnations):
        if after.first < before.first:
            yield f"incarnation {after.id:x} begins at offset {after.first}, before its predecessor, at {before.first}"
    malformed = connection.exec_driver_sql(
        f"SELECT first, last FROM removed WHERE length(leaves) != (last - first + 1) * {LEAF_BYTES}"
        f" OR first / {BLOCK} != last / {BLOCK} OR last > (SELECT low_water FROM state) ORDER BY first"
    )
    for first, last in malformed.all():
        yield f"the checksums of the removed events {first} to {last} are malformed"
    for block in connection.exec_driver_sql("SELECT block FROM blocks ORDER BY block").scalars().all():
        with snapshot(connection):  # retention may run at the same time
            problem = check_block(connection, int(block))
        if problem is not None:
            yield problem


def _check_events(
    reader: SqliteReader,
    low_water: int,
    head: int,
    problems: list[str],
    progress: Callable[[int, int], None] | None,
) -> int:
    everything, after, seen = KeySet.all(), low_water, 0
    while after < head:
        page = reader.read(everything, Span(after, head), PAGE)
        events, error, _ = page.events()
        seen += len(events)
        if error is None:
            after = page.covered
        else:
            problems.append(str(error).partition(";")[0])
            after = getattr(error, "offset", page.covered)
            seen += 1
        if progress is not None:
            progress(after - low_water, head - low_water)
    return seen


def _read_record(path: str, problems: list[str]) -> Head | None:
    try:
        record = read_record(path)
    except LogDamaged as error:
        problems.append(error.reason)
        return None
    if record is None:
        problems.append("the log has no head record, so the loss of its newest events could not be detected")
    return record
