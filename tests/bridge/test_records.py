"""The log records of a bridge whose second side cannot be connected at first."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from mesh_fakes import FakeLog, FakeRuntime, recorded

from zbus.bridge import bridge as module
from zbus.bridge.bridge import _Sides
from zbus.errors import TransportError

URL = "nats://away:4222"


async def test_a_side_that_is_away_is_recorded_with_each_attempt_and_again_once_it_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", (0.001, 0.002))
    attempts = 0

    async def link(url: str) -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise TransportError("nobody listens there")

    node: Any = SimpleNamespace(runtime=FakeRuntime(), log=FakeLog(), link=link)
    sides = _Sides(node, {URL: "right"})
    sides._left_noted = True
    with recorded(logging.INFO) as records:
        await sides.open(URL)
        async with asyncio.timeout(10):
            await asyncio.gather(*sides._trying)

    away = ("BRIDGE_DISCONNECTED", "right", "link_failed")
    assert [(each["record"], each["transport"], each.get("code")) for each in records] == [
        away,
        away,
        ("BRIDGE_CONNECTED", "right", None),
    ]
    assert "again_in_s" in records[1]
