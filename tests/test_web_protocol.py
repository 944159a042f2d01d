"""Connections before there is a request: what is no HTTP, heads without end, and too many of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from web_support import DEADLINE_S, Web, refusal, until, web


async def connect(server: Web) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of what is answered before the connection is closed."""
    async with asyncio.timeout(DEADLINE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused_as_json(log_path: Path, sent: bytes) -> None:
    async with web(log_path) as server:
        reader, writer = await connect(server)
        writer.write(sent)
        status, body = await answer(reader)
        writer.close()
        assert (status, refusal(body)[0]) == (400, "request_malformed")
        assert (await server.client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("part", [b"x" * 1000, b"x: y\r\n" * 100], ids=["one header", "many headers"])
async def test_a_head_without_end_is_refused_before_it_is_large(log_path: Path, part: bytes) -> None:
    async with web(log_path) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nx: ")
        sent = 0
        try:
            while not reader.at_eof() and sent < 50_000_000:
                writer.write(part)
                sent += len(part)
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        writer.close()
        assert sent < 50_000_000
        assert (await server.client.get("/healthz")).status_code == 200
        assert 'status="200"' in (await server.client.get("/metrics")).text


async def test_a_large_body_behind_a_small_head_is_none_of_its_business(log_path: Path) -> None:
    async with web(log_path) as server:
        assert (await server.client.post("/events/a", content=b"x" * 1_000_000)).status_code == 201
        assert (await server.client.post("/events/a", content=b"x" * 1_000_000)).status_code == 201


async def test_a_head_that_takes_too_long_is_refused_and_a_silent_connection_too(log_path: Path) -> None:
    async with web(log_path, head_timeout_s=0.2) as server:
        silent, first = await connect(server)
        slow, second = await connect(server)
        second.write(b"GET /healthz HTTP/1.1\r\nHost")
        again, third = await connect(server)
        third.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert b"200 OK" in await again.readuntil(b"}")
        third.write(b"GET /heal")  # the second request of a connection
        for reader in (silent, slow, again):
            status, body = await answer(reader)
            assert (status, refusal(body)[0]) == (408, "head_too_slow")
        for writer in (first, second, third):
            writer.close()


async def test_a_feed_is_not_held_to_the_time_of_a_head(log_path: Path) -> None:
    async with web(log_path, head_timeout_s=0.05, keepalive_s=0.2) as server, server.feed() as feed:
        for _ in range(3):
            frame = await feed.frame()
            assert frame is not None
            assert frame.comment == "keep-alive"


async def test_connections_beyond_the_limit_are_closed_and_those_before_go_on(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_web.protocol.SPARE", 0)
    async with web(log_path, connections_max=5) as server:
        async with server.feed() as feed:
            kept = [await connect(server) for _ in range(4)]
            reader, writer = await connect(server)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    assert await reader.read() == b""
            except ConnectionError:
                pass
            writer.close()
            await server.publish("a", b"x")
            assert await feed.offsets(1) == [1]
            for _, each in kept:
                each.close()
        await until(lambda: not server.bus.subscriptions)
        assert (await server.client.get("/healthz")).status_code == 200
