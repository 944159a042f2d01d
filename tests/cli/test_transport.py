"""`zbus pub` and `zbus sub` on a transport, without a log."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats_support import NatsServer, nats_server

import zbus


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as running:
        yield running


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "zbus", *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )


async def test_sub_prints_what_other_nodes_publish(server: NatsServer) -> None:
    process = await start("sub", "shop/**", "--count", "1", "--transport", server.url)
    async with zbus.open(transport=server.url) as bus:
        publisher = await bus.publisher("shop/orders")
        ended = asyncio.create_task(process.communicate())
        async with asyncio.timeout(30):
            while not ended.done():  # it takes a moment until it listens
                await publisher.publish(b"hello")
                await asyncio.sleep(0.05)
        stdout, stderr = await ended

    assert process.returncode == 0, stderr.decode()
    assert json.loads(stdout)["key"] == "shop/orders"


async def test_pub_reaches_other_nodes(server: NatsServer) -> None:
    async with zbus.open(transport=server.url) as bus, bus.subscribe("shop/**") as subscription:
        process = await start("pub", "shop/orders", "hello", "--transport", server.url)
        _, stderr = await asyncio.wait_for(process.communicate(), 30)

        assert process.returncode == 0, stderr.decode()
        assert (await asyncio.wait_for(anext(subscription), 10)).payload == b"hello"


async def test_sub_reads_a_log_or_hears_a_transport_not_both() -> None:
    process = await start("sub", "**", "--log", "x.db", "--transport", "nats://127.0.0.1:4222")
    _, stderr = await asyncio.wait_for(process.communicate(), 30)

    assert process.returncode == 2
    assert "not both" in stderr.decode()
