"""The log records of a network: positions that the log does not store, and transports that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from mesh_fakes import recorded

import zbus
from zbus.errors import LogError, TransportError
from zbus.mesh.network import _try


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_positions_that_the_log_does_not_store_are_recorded(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(positions: object) -> None:
        raise LogError("the disk is full")

    async with zbus.open(config=zbus.BusConfig(log=str(log_path), keep=["**"])) as bus:
        network: Any = node_of(bus).network
        with recorded() as records, monkeypatch.context() as patched:
            patched.setattr(network._log.positions, "store", fail)
            network._store({7: 1})

    assert [(each["record"], each["code"], each["reason"]) for each in records] == [
        ("POSITIONS_NOT_STORED", "positions_not_stored", "the disk is full")
    ]


async def test_a_position_that_cannot_be_stored_keeps_no_other_from_being_stored(
    log_path: Path,
) -> None:
    async with zbus.open(config=zbus.BusConfig(log=str(log_path), keep=["**"])) as bus:
        network: Any = node_of(bus).network
        with recorded() as records:
            network._store({7: 1 << 63, 8: 5})

        stored = network._log.positions.load()

    assert (stored.get("heard/7"), stored["heard/8"]) == (None, 5)
    assert [(each["record"], each["code"], each["source"]) for each in records] == [
        ("POSITIONS_NOT_STORED", "position_out_of_range", "heard/7")
    ]


async def test_the_mark_of_a_publisher_that_was_forgotten_is_removed(log_path: Path) -> None:
    async with zbus.open(config=zbus.BusConfig(log=str(log_path), keep=["**"])) as bus:
        network: Any = node_of(bus).network
        network._store({7: 5, 8: 5})
        network._store({7: 0})

        assert [name for name in network._log.positions.load() if name.startswith("heard/")] == ["heard/8"]


def test_a_transport_that_fails_to_close_is_recorded() -> None:
    def fail() -> None:
        raise TransportError("the socket is stuck")

    with recorded() as records:
        _try(fail)

    assert [(each["record"], each["code"], each["doing"]) for each in records] == [
        ("TRANSPORT_ERROR", "close_failed", "close")
    ]
