"""The SQLite driver: what SQLAlchemy and the log expect of a DB-API module, on top of apsw."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError

from zbus.errors import LogDamaged, LogError
from zbus_log.file import sqlite_driver
from zbus_log.file.database import SQLITE_VERSION_MIN, changed_rows, log_errors, make_engine, roll_back, transaction


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.db")


@pytest.fixture
def connection(path: str) -> Iterator[Connection]:
    with make_engine(path).connect() as connection:
        connection.exec_driver_sql("CREATE TABLE things (id INTEGER PRIMARY KEY, name TEXT NOT NULL)")
        yield connection


def test_the_driver_contains_a_sqlite_that_does_not_lose_commits() -> None:
    assert sqlite_driver.sqlite_version_info >= SQLITE_VERSION_MIN


def test_a_statement_without_rows_has_columns(connection: Connection) -> None:
    found = connection.exec_driver_sql("SELECT id, name FROM things")

    assert list(found.keys()) == ["id", "name"]
    assert found.all() == []


def test_values_are_given_by_position_by_number_and_by_name(connection: Connection) -> None:
    assert connection.exec_driver_sql("SELECT ?, ?", (1, "a")).one() == (1, "a")
    assert connection.exec_driver_sql("SELECT ?2, ?1, ?2", (1, "a")).one() == ("a", 1, "a")
    assert connection.exec_driver_sql("SELECT :b, :a", {"a": 1, "b": b"x", "unused": 2}).one() == (b"x", 1)


def test_rows_come_one_by_one_in_parts_and_all_together(connection: Connection) -> None:
    numbers = "SELECT value FROM json_each('[1, 2, 3, 4, 5]')"
    connection.exec_driver_sql("INSERT INTO things VALUES (?, ?)", [(1, "a"), (2, "b")])

    assert connection.exec_driver_sql(numbers).scalars().all() == [1, 2, 3, 4, 5]
    assert [len(part) for part in connection.exec_driver_sql(numbers).partitions(2)] == [2, 2, 1]
    assert connection.exec_driver_sql("SELECT name FROM things ORDER BY id").scalars().all() == ["a", "b"]


def test_the_number_of_changed_rows_is_known(connection: Connection) -> None:
    connection.exec_driver_sql("INSERT INTO things VALUES (1, 'a'), (2, 'b')")

    connection.exec_driver_sql("UPDATE things SET name = 'c'")
    assert changed_rows(connection) == 2
    connection.exec_driver_sql("DELETE FROM things WHERE id = 9")
    assert changed_rows(connection) == 0


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("INSERT INTO things VALUES (1, 'again')", IntegrityError),
        ("INSERT INTO things VALUES (2, NULL)", IntegrityError),
        ("SELECT * FROM nothing", OperationalError),
        ("no statement", OperationalError),
        ("SELECT ?", ProgrammingError),
    ],
)
def test_errors_have_the_types_of_sqlalchemy(
    connection: Connection, statement: str, expected: type[DBAPIError]
) -> None:
    connection.exec_driver_sql("INSERT INTO things VALUES (1, 'a')")

    with pytest.raises(expected) as caught:
        connection.exec_driver_sql(statement)

    assert isinstance(caught.value.orig, sqlite_driver.Error)


def test_an_error_names_the_code_of_sqlite(path: str, connection: Connection) -> None:
    connection.exec_driver_sql("PRAGMA busy_timeout=0")
    with closing(sqlite_driver.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")

        with pytest.raises(LogError, match="SQLITE_BUSY"), log_errors(path), transaction(connection):
            pass


def test_text_that_is_not_utf_8_is_damage(path: str, connection: Connection) -> None:
    with pytest.raises(LogDamaged, match="not UTF-8"), log_errors(path):
        connection.exec_driver_sql("SELECT CAST(x'ff61' AS TEXT)").scalar_one()


def test_a_transaction_that_sqlite_ended_itself_is_not_rolled_back_twice(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
    connection.exec_driver_sql("ROLLBACK")

    roll_back(connection)

    with pytest.raises(ZeroDivisionError), transaction(connection):
        connection.exec_driver_sql("INSERT INTO things VALUES (1, 'a')")
        raise ZeroDivisionError
    assert connection.exec_driver_sql("SELECT count(*) FROM things").scalar_one() == 0


def test_a_connection_can_be_used_and_closed_by_another_thread(path: str) -> None:
    connection = sqlite_driver.connect(path)
    found: list[object] = []

    def use() -> None:
        found.extend(connection.execute("SELECT 1").fetchall())
        connection.close()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()

    assert found == [(1,)]


def test_a_database_is_copied_in_steps(path: str, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    with closing(sqlite_driver.connect(path)) as source, closing(sqlite_driver.connect(tmp_path / "copy")) as target:
        source.execute("CREATE TABLE things AS SELECT value, zeroblob(8000) FROM json_each('[1, 2, 3, 4, 5, 6]')")
        source.copy_to(target, 4, lambda remaining, pages: steps.append((remaining, pages)))

        assert target.execute("SELECT sum(value) FROM things").fetchall() == [(21,)]
    assert len(steps) > 1
    assert steps[-1][0] == 0


def test_a_file_is_attached_by_a_uri(path: str, tmp_path: Path) -> None:
    with closing(sqlite_driver.connect(tmp_path / "a b")) as other:
        other.execute("CREATE TABLE things (id)")

    with closing(sqlite_driver.connect(path)) as connection:
        connection.execute("ATTACH ? AS other", (f"file:{tmp_path}/a%20b?mode=ro",))
        with pytest.raises(sqlite_driver.Error, match="readonly"):
            connection.execute("INSERT INTO other.things VALUES (1)")
