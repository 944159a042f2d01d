"""Rows of a result: every one of them as JSON lines for programs, the first of them as a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame, Row
from rich.table import Table

from zbus.cli.render.output import encode_json, note, show, write


def print_rows(found: DataFrame, json: bool, rows: int, title: str) -> None:
    """Print a result. It is fetched part by part, so that it may be larger than memory."""
    if json:
        for row in found.toLocalIterator():
            write(as_line(row))
        return
    first = found.take(rows + 1)
    show(as_table(found.columns, first[:rows], title))
    if len(first) > rows:
        note(f"these are the first {rows:,} rows; --rows prints more, and --json all of them")


def as_line(row: Row) -> bytes:
    """One row as a line of JSON; times are ISO, in UTC."""
    return encode_json({name: _utc(value) for name, value in row.asDict(recursive=True).items()})


def as_table(columns: Iterable[str], rows: Iterable[Row], title: str) -> Table:
    """Rows as a table. What is not known is left empty."""
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
    """Spark hands out times in the zone of this process, without saying so."""
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value
