"""The page about formats names every field of what crosses a transport, and every table and column of a log's file."""

from __future__ import annotations

import re
from pathlib import Path

import apsw
import msgspec
import pytest

import zbus.blocking
from zbus.wire.announcement import Announcement
from zbus.wire.beacon import Beacon
from zbus.wire.envelope import Envelope
from zbus_log.backup.backup_file import BackupInfo
from zbus_log.backup.log_copy import INFO
from zbus_log.file.event_view import VIEW
from zbus_log.file.fork_mark import MARK

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "formats.md").read_text()


def section(title: str) -> str:
    """The page from a heading to the next one of the same level."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("struct", [Envelope, Beacon, Announcement])
def test_every_field_on_the_wire_is_listed_at_its_place(struct: type[msgspec.Struct]) -> None:
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \|", section(struct.__name__), re.MULTILINE)

    assert listed == [(str(place), name) for place, name in enumerate(struct.__struct_fields__)]


def test_every_table_and_column_of_a_log_is_listed(tmp_path: Path) -> None:
    with zbus.blocking.open(tmp_path / "app.db") as bus:
        bus.publisher("a/b").publish(b"x")
    listed: dict[str, set[str]] = {}
    table = ""
    for first, second in re.findall(r"^\|([^|]*)\|([^|]*)\|", section("Log file"), re.MULTILINE):
        table = (re.findall(r"`(\w+)`", first) or [table])[0]
        listed.setdefault(table, set()).update(re.findall(r"`(\w+)`", second))

    with apsw.Connection(str(tmp_path / "app.db"), flags=apsw.SQLITE_OPEN_READONLY) as log:
        sql = "SELECT m.name, c.name FROM sqlite_schema AS m, pragma_table_info(m.name) AS c WHERE m.type = 'table'"
        stored = set(log.execute(sql))
        shown = [name for (name,) in log.execute(f"SELECT name FROM pragma_table_info('{VIEW}')")]

    stored |= {(INFO, column) for column in BackupInfo._fields} | {(MARK, "log_id")}
    assert [(name, column) for name, column in sorted(stored) if column not in listed.get(name, ())] == []
    for column in shown:
        assert f"`{column}`" in section("Log file").partition("### Read the log with SQL")[2]
