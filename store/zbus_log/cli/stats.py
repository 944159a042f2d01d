"""`zbus log stats`: statistics of a log, without reading its events, because sealed blocks store their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from sqlalchemy import ColumnElement, Connection, func, select, union

from zbus.cli.options import JsonOption
from zbus.cli.render.eventline import iso_time
from zbus.cli.render.output import encode_json, show, write
from zbus_log.file.database import log_errors, make_engine
from zbus_log.file.fork_mark import read_mark
from zbus_log.file.head_record import owner_pid
from zbus_log.file.incarnations import read_lineage
from zbus_log.file.tables import BLOCK, blocks, events, get_epoch, get_head, get_low_water, keys, origin_of, publishers
from zbus_log.purging import read_purges

from .cursors import as_json
from .options import LogArgument, opened


def stats(log: LogArgument, json: JsonOption = False) -> None:
    """Print statistics of a log: whether it is a fork, origin (its id for other nodes), incarnation (its current
    opening by an owner), head, events, bytes, keys, publishers, times, owner, cursors and purges.
    """
    with opened(log, read_only=True) as found:
        engine = make_engine(str(log), read_only=True)
        try:
            with log_errors(str(log)), engine.connect() as connection:
                connection.exec_driver_sql("BEGIN")  # one snapshot for all values
                values: dict[str, Any] = {"log": str(log)} | collect(connection)
        finally:
            engine.dispose()
        values |= {
            "file_bytes": sum(path.stat().st_size for path in (log, Path(f"{log}-wal")) if path.is_file()),
            "owner_pid": owner_pid(str(log)),
            "cursors": [
                as_json(cursor, values["head"], found.cursors.problem(cursor)) for cursor in found.cursors.list()
            ],
        }
    write(encode_json(values)) if json else show(_table(values))


def collect(connection: Connection) -> dict[str, Any]:
    """Return the statistics in the file. Keys and publishers without remaining events may still be counted."""
    head, low_water = get_head(connection), get_low_water(connection)
    sealed = connection.execute(select(func.ifnull(func.max(blocks.c.block), -1))).scalar_one() * BLOCK + BLOCK - 1
    # Events of blocks that retention has partly removed, and of the part that is not sealed yet, are counted singly.
    first_whole = -(-(low_water + 1) // BLOCK)
    loose = (events.c.offset < first_whole * BLOCK) | (events.c.offset > sealed)
    in_blocks = connection.execute(
        select(func.total(blocks.c.events), func.total(blocks.c.bytes)).where(blocks.c.block >= first_whole)
    ).one()
    outside = _count(connection, loose)
    known = union(select(publishers.c.publisher), select(events.c.publisher).where(events.c.offset > sealed))
    lineage, mark = read_lineage(connection), read_mark(connection)
    return {
        "fork": None
        if mark is None
        else {"of": f"{mark.log_id:x}", "until": mark.offset, "made_at": iso_time(mark.made_at)},
        "origin": f"{origin_of(get_epoch(connection)):x}",
        "incarnation": f"{lineage.current.id:x}",
        "incarnation_first": lineage.current.first,
        "incarnations": len(lineage.incarnations),
        "head": head,
        "low_water": low_water,
        "events": int(in_blocks[0]) + outside[0],
        "payload_bytes": int(in_blocks[1]) + outside[1],
        "keys": connection.execute(select(func.count()).select_from(keys)).scalar_one(),
        "publishers": connection.execute(select(func.count()).select_from(known.subquery())).scalar_one(),
        "first_published_at": _time_at(connection, func.min(events.c.offset)),
        "last_published_at": _time_at(connection, func.max(events.c.offset)),
        "sealed_blocks": connection.execute(select(func.count()).select_from(blocks)).scalar_one(),
        "purges": [
            {
                "started_at": iso_time(each.started_at_ns),
                "finished_at": None if each.finished_at_ns is None else iso_time(each.finished_at_ns),
                "keys": each.expressions,
                "until": each.until,
                "events": each.events,
            }
            for each in read_purges(connection)
        ],
    }


def _count(connection: Connection, which: ColumnElement[bool]) -> tuple[int, int]:
    found = select(func.count(), func.total(func.length(events.c.payload))).where(which)
    count, size = connection.execute(found).one()
    return int(count), int(size)


def _time_at(connection: Connection, end: ColumnElement[int]) -> str | None:
    at = select(events.c.published_at).where(events.c.offset == select(end).scalar_subquery())
    published_ns = connection.execute(at).scalar()
    return None if published_ns is None else iso_time(published_ns)


def _table(values: dict[str, Any]) -> Table:
    table = Table(show_header=False, title=values["log"], title_justify="left")
    if (mark := values["fork"]) is not None:
        table.add_row(
            "fork", f"of {mark['of']} up to offset {mark['until']:,}; it sends nothing until zbus log promote"
        )
    for name, value in values.items():
        if name not in ("log", "fork", "cursors", "purges"):
            shown = f"{value:,}" if isinstance(value, int) and name != "owner_pid" else str(value)
            table.add_row(name.replace("_", " "), "none" if value is None else shown)
    for cursor in values["cursors"]:
        state = "cannot be used" if cursor["problem"] else f"{cursor['behind']:,} behind"
        table.add_row(f"durable {cursor['name']}", f"at {cursor['offset']:,}, {state}")
    for purge in values["purges"]:
        unfinished = "" if purge["finished_at"] else ", not finished"
        what = f"{purge['events']:,} events up to {purge['until']:,} of {' '.join(purge['keys'])}{unfinished}"
        table.add_row(f"purge {purge['started_at']}", what)
    return table
