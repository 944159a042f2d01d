"""Output of rows: all of them as JSON lines for programs, or the first ones as a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame, Row
from rich.table import Table

from zbus.cli.render.output import encode_json, note, show, write


def print_rows(found: DataFrame, json: bool, rows: int, title: str) -> None:
    """Print a result. JSON rows are fetched part by part, so the result may be larger than memory."""
    if json:
        for row in found.toLocalIterator():
            write(as_line(row))
        return
    first = found.take(rows + 1)
    show(as_table(found.columns, first[:rows], title))
    if len(first) > rows:
        note(f"only the first {rows:,} rows are shown; use --rows for more, or --json for all")


def as_line(row: Row) -> bytes:
    """Return a row as a line of JSON, with times in ISO format and UTC."""
    return encode_json({name: _utc(value) for name, value in row.asDict(recursive=True).items()})


def as_table(columns: Iterable[str], rows: Iterable[Row], title: str) -> Table:
    """Return rows as a table. Null values are shown as empty cells."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name.replace("_", " "))
    numbers: set[int] = set()
    for row in rows:
        numbers |= {place for place, value in enumerate(row) if isinstance(value, int | float)}
        table.add_row(*(_shown(name, value) for name, value in zip(columns, row, strict=True)))
    for place in numbers:
        table.columns[place].justify = "right"
    return table


def _shown(name: str, value: Any) -> str:
    value = _utc(value)
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int):
        return str(value) if name == "publisher_id" else f"{value:,}"
    text = " ".join(value) if isinstance(value, list) else str(value)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _utc(value: Any) -> Any:
    """Return times in UTC. Spark returns them without a time zone, in the local one."""
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value
