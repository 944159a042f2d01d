"""Comparison of a log with its head record: whether the file still has every event that was acknowledged.

The record names the incarnation that stored the last acknowledged event. A file that does not have that event of that
incarnation is not the one that the record describes, even if it is longer.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from sqlalchemy import Connection

from zbus.errors import LogDamaged
from zbus_log.file.database import snapshot
from zbus_log.file.head_record import Head, may_lack_newest, read_record
from zbus_log.file.incarnations import read_lineage
from zbus_log.file.tables import get_epoch, get_head

NO_RECORD = (
    "it has no head record, so the loss of its newest events could not be detected. If it is a copy of a log, copy the "
    "file beside that log whose name ends with -head too, or copy the log with: zbus log backup"
)
COMPARED_TIMES, COMPARED_PAUSE_S = 5, 0.02


class Loss(NamedTuple):
    """Acknowledged events that a log does not have."""

    reason: str
    missing: tuple[int, int] | None  # None: from an unknown offset on
    is_end: bool = False  # the log ends too early, but is otherwise the one that the record describes


def find_loss(connection: Connection, record: Head) -> Loss | None:
    """Return what a log lacks according to its head record. Beside an owner, call it in a snapshot."""
    head, acknowledged = get_head(connection), record.head
    if not acknowledged:
        return None
    if record.epoch != get_epoch(connection):
        return Loss("this is a different log from the one that the head record describes", (1, acknowledged))
    if head < acknowledged:
        reason = f"the log ends at offset {head}, but {acknowledged} was acknowledged"
        return Loss(reason, (head + 1, acknowledged), is_end=True)
    if not record.incarnation:  # version 0.1 stored it
        return None
    shared = read_lineage(connection).shared({record.incarnation: acknowledged})
    if shared == acknowledged:
        return None
    reason = "the file was replaced by a copy of this log, which continued with other events"
    return Loss(reason, None if shared is None else (shared + 1, acknowledged))


def compare_with_record(connection: Connection, path: str) -> None:
    """Raise `LogDamaged` if the log lacks events that were acknowledged, according to its head record.

    An owner that runs commits events before it updates the record, and starts a new epoch in the log before it does so
    in the record. So the record is read first, and a difference counts only if it stays.
    """
    for attempt in range(COMPARED_TIMES):
        if attempt:
            time.sleep(COMPARED_PAUSE_S)
        record = read_record(path)
        with snapshot(connection):
            if record is None:
                loss = Loss(NO_RECORD, None) if get_head(connection) else None
            else:
                loss = find_loss(connection, record)
        if loss is None or (loss.is_end and may_lack_newest(path)):
            return
        problem = LogDamaged(path, loss.reason, loss.missing)
    raise problem
