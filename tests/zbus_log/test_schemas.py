"""Schemas in the log's file: durable, kept in a copy, and no hindrance to logs that were written before them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from log_support import append

from zbus import BusConfig
from zbus.errors import LogDamaged, LogReadOnly
from zbus.keys import KeySet
from zbus.ports.log import Row, Schema, Span
from zbus_log import open_log, verify
from zbus_log.file import sqlite_driver

DATA = Path(__file__).parents[1] / "data"
ONE = Schema("shop/*/created", 1, "strict", "ab12", {"type": "object", "title": "Ü"}, 1_700_000_000_000_000_000)
TWO = ONE._replace(version=2, mode="removed", registered_at_ns=1_700_000_000_000_000_001)
OTHER = ONE._replace(expression="audit/**", mode="permissive")


def v1(path: Path) -> None:
    for suffix in ("", "-head"):
        shutil.copyfile(f"{DATA / 'log-v1.db'}{suffix}", f"{path}{suffix}")


def test_every_version_is_there_after_a_kill_and_in_a_copy(log_path: Path) -> None:
    log = open_log(BusConfig(log=str(log_path)))
    try:
        for schema in (ONE, TWO, OTHER):
            log.schemas.store(schema)
        copied = log_path.with_name("copy.db")
        for suffix in ("", "-wal", "-head"):  # as the owner's disk is now
            shutil.copyfile(f"{log_path}{suffix}", f"{copied}{suffix}")
        assert log.schemas.load() == [OTHER, ONE, TWO]
    finally:
        log.close(5)
    again = open_log(BusConfig(log=str(copied)))
    try:
        assert again.schemas.load() == [OTHER, ONE, TWO]
    finally:
        again.close(5)
    assert verify(str(copied)).problems == []


def test_a_version_is_never_replaced(log_path: Path) -> None:
    log = open_log(BusConfig(log=str(log_path)))
    try:
        log.schemas.store(ONE)
        with pytest.raises(Exception, match="UNIQUE"):
            log.schemas.store(ONE._replace(hash="cd34"))
        assert log.schemas.load() == [ONE]
        assert append(log, [Row(1, 0, 1, "a", b"", None)])[0] == 1  # the writer keeps running
    finally:
        log.close(5)


def test_a_log_of_version_1_is_read_as_it_is_and_has_no_schemas(log_path: Path) -> None:
    v1(log_path)
    before = log_path.read_bytes()
    log = open_log(BusConfig(log=str(log_path), read_only=True))
    try:
        assert log.schemas.load() == []
        events, error, _ = log.read(KeySet.all(), Span(), 100).events()
        assert (len(events), error) == (5, None)
        with pytest.raises(LogReadOnly):
            log.schemas.store(ONE)
    finally:
        log.close(5)
    assert log_path.read_bytes() == before


def test_a_log_of_version_1_is_brought_to_this_one_by_its_owner_and_takes_schemas(log_path: Path) -> None:
    v1(log_path)
    log = open_log(BusConfig(log=str(log_path)))
    try:
        assert log.schemas.load() == []
        log.schemas.store(ONE)
        assert log.schemas.load() == [ONE]
        assert log.head() == 5
    finally:
        log.close(5)
    assert verify(str(log_path)).problems == []


def test_a_schema_that_was_damaged_on_disk_is_named(log_path: Path) -> None:
    log = open_log(BusConfig(log=str(log_path)))
    log.schemas.store(ONE)
    log.close(5)
    raw = sqlite_driver.connect(str(log_path))
    raw.execute("UPDATE schemas SET schema = '{'")
    raw.commit()
    raw.close()

    log = open_log(BusConfig(log=str(log_path)))
    try:
        with pytest.raises(LogDamaged, match="version 1 of the schema of 'shop/\\*/created'"):
            log.schemas.load()
    finally:
        log.close(5)
