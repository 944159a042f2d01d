"""A legacy service in Node, with the `nats` client from npm: it speaks plain NATS, and the raw bridge does the rest."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from bridge_support import WAIT_S, receiving, router
from free_ports import free_port
from nats_support import NatsServer, nats_server

import zbus

SOURCE = Path(__file__).parents[1] / "node"
ORDERS = 500


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service with its client installed, exactly as the lock file says."""
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "legacy.mjs"):
        shutil.copy(SOURCE / name, folder / name)
    for program in ("node", "npm"):
        assert shutil.which(program), f"{program} is missing: this test needs Node 18 or later with npm"
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"npm could not install the pinned client:\n{done.stderr}"
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as running:
        yield running


class Legacy:
    """The running service."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._said: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n".encode())

    async def lines(self, name: str, count: int) -> list[dict[str, Any]]:
        """All lines so far that have this field, once there are so many."""
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while len(found := [line for line in self._said if name in line]) < count:
                self._said.append(json.loads(await self._process.stdout.readline()))
        return found


@asynccontextmanager
async def legacy(folder: Path, server: NatsServer) -> AsyncIterator[Legacy]:
    program = ["node", "legacy.mjs", server.url, str(ORDERS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*program, cwd=folder, **pipes)
    running = Legacy(process)
    try:
        await running.lines("ready", 1)
        yield running
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            assert await asyncio.wait_for(process.wait(), 10) == 0
        except TimeoutError:
            process.kill()
            raise


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_a_node_service_publishes_and_consumes_plain_messages_through_the_raw_bridge(
    service: Path, server: NatsServer, tmp_path: Path, kept: bool
) -> None:
    port = free_port()
    zenoh = f"zenoh://127.0.0.1:{port}"
    log = tmp_path / "bridge.db" if kept else None
    async with router(port), zbus.open(transport=zenoh) as node, receiving(node, "**") as arrived:
        async with zbus.Bridge((server.url, zenoh), ["shop/**"], raw=True, log=log) as bridge:
            async with legacy(service, server) as running:
                # What it publishes are events: in order, with its headers, and a publisher of their own.
                running.say("publish")
                events = await arrived.wait(ORDERS)
                assert [event.decode(dict) for event in events] == [{"id": n, "from": "legacy"} for n in range(ORDERS)]
                assert [event.sequence for event in events] == list(range(ORDERS))
                assert {event.key for event in events} == {"shop/orders/created"}
                assert events[7].headers == {"trace-id": "t-7"}
                await running.lines("published", 1)

                # Events are plain messages to it: it reads JSON and headers, and what it answers are events again.
                publisher = await node.publisher("shop/orders/placed")
                for number in range(20):
                    await publisher.publish({"id": number, "from": "zbus"}, correlation_id=f"c-{number}")
                received = await running.lines("subject", ORDERS + 20)  # its own, and each of ours once
                assert [each["data"]["from"] for each in received] == ["legacy"] * ORDERS + ["zbus"] * 20
                assert [each["data"]["id"] for each in received[ORDERS:]] == list(range(20))
                assert received[-1]["subject"] == "shop.orders.placed"
                assert received[-1]["headers"]["content-type"] == "application/json"
                invoices = (await arrived.wait(ORDERS + 40))[ORDERS:]
                invoices = [event for event in invoices if event.key == "shop/invoices/made"]
                assert [event.decode(dict)["order"] for event in invoices] == list(range(20))
                assert [event.headers["correlation-id"] for event in invoices] == [f"c-{n}" for n in range(20)]

                # Its requests and replies among its own kind go on as if there were no bridge.
                running.say("request")
                assert await running.lines("quoted", 1) == [{"quoted": {"price": 12}}]
                (request,) = (await arrived.only(ORDERS + 41))[-1:]
                assert request.key == "shop/quote"
            stats = bridge.stats()
    assert (stats["forward"]["forwarded"], stats["reverse"]["forwarded"]) == (ORDERS + 21, 20)
    assert stats["duplicates"] == stats["loops_prevented"] == 0


def test_the_client_is_pinned_by_version_and_hash_and_names_no_registry() -> None:
    package = json.loads((SOURCE / "package.json").read_text())
    lock = json.loads((SOURCE / "package-lock.json").read_text())
    installed = {name: each for name, each in lock["packages"].items() if name}
    assert installed["node_modules/nats"]["version"] == package["dependencies"]["nats"]
    assert all(each["integrity"].startswith("sha512-") for each in installed.values())
    assert not any("resolved" in each for each in installed.values())
