"""Connection limits: input that is not HTTP, endless heads, and too many connections."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path

import pytest
from inside import node_of
from web_support import DEADLINE_S, Web, error_of, until, web

from zbus_web.http.protocol import HttpConnection


async def connect(server: Web) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and body of the response before the connection closes."""
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
async def test_input_that_is_not_http_is_rejected_with_json(log_path: Path, sent: bytes) -> None:
    async with web(log_path) as server:
        reader, writer = await connect(server)
        writer.write(sent)
        status, body = await response(reader)
        writer.close()
        assert (status, error_of(body)[0]) == (400, "malformed_request")
        assert (await server.client.get("/healthz")).status_code == 200


async def test_a_request_followed_by_garbage_gets_its_response_before_the_connection_closes(log_path: Path) -> None:
    async with web(log_path) as server:
        for number in range(1, 6):
            reader, writer = await connect(server)
            writer.write(b"POST /events/a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nxand more\r\n\r\n")
            status, body = await response(reader)
            writer.close()
            assert (status, json.loads(body)["offset"]) == (201, number)


async def test_a_malformed_body_is_rejected_and_nothing_is_stored(log_path: Path) -> None:
    async with web(log_path) as server:
        reader, writer = await connect(server)
        writer.write(
            b"POST /events/a HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\nzz\r\n"
        )
        status, body = await response(reader)
        writer.close()
        assert (status, error_of(body)[0]) == (400, "malformed_request")
        assert (await server.client.post("/events/a", content=b"y")).json()["offset"] == 1


@pytest.mark.parametrize("part", [b"x" * 1000, b"x: y\r\n" * 100], ids=["one header", "many headers"])
async def test_a_head_without_end_is_rejected_before_it_is_large(log_path: Path, part: bytes) -> None:
    async with web(log_path, head_timeout_s=3600) as server:  # Only the size matters here.
        reader, writer = await connect(server)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nx: ")
        sent = 0
        try:
            while not reader.at_eof() and sent < 4_000_000:
                writer.write(part)
                sent += len(part)
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        writer.close()
        assert sent < 4_000_000
        assert (await server.client.get("/healthz")).status_code == 200
        assert 'status="200"' in (await server.client.get("/metrics")).text


async def test_the_limit_of_the_head_does_not_apply_to_the_body(log_path: Path) -> None:
    async with web(log_path) as server:
        assert (await server.client.post("/events/a", content=b"x" * 1_000_000)).status_code == 201
        assert (await server.client.post("/events/a", content=b"x" * 1_000_000)).status_code == 201


async def test_a_slow_head_and_a_silent_connection_are_rejected(log_path: Path) -> None:
    async with web(log_path, head_timeout_s=0.1) as server:
        silent, first = await connect(server)
        slow, second = await connect(server)
        second.write(b"GET /healthz HTTP/1.1\r\nHost")
        for reader in (silent, slow):
            status, body = await response(reader)
            assert (status, error_of(body)[0]) == (408, "head_too_slow")
        first.close()
        second.close()


async def test_the_time_limit_applies_to_the_second_head_of_a_connection_too(log_path: Path) -> None:
    async with web(log_path) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert b"200 OK" in await reader.readuntil(b"}")
        (connection,) = connections()
        type(connection)._head_timeout_s = 0.05
        writer.write(b"GET /heal")
        status, body = await response(reader)
        writer.close()
        assert (status, error_of(body)[0]) == (408, "head_too_slow")


async def test_the_time_limit_of_the_head_does_not_apply_to_a_stream(log_path: Path) -> None:
    async with web(log_path) as server:
        _, writer = await connect(server)
        await until(lambda: connections() and connections()[0]._late is not None)
        writer.close()
        await until(lambda: not connections())
        async with server.stream():
            (connection,) = connections()
            assert connection._late is None


def connections() -> list[HttpConnection]:
    """Return the connections of the server in this process."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, HttpConnection)]
    return [each for each in found if each in each.connections]


async def test_connections_beyond_the_limit_are_closed_and_earlier_ones_continue(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_web.http.protocol.SPARE", 0)
    async with web(log_path, connections_max=5) as server:
        async with server.stream() as stream:
            kept = [await connect(server) for _ in range(4)]
            reader, writer = await connect(server)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    assert await reader.read() == b""
            except ConnectionError:
                pass
            writer.close()
            await server.publish("a", b"x")
            assert await stream.offsets(1) == [1]
            for _, each in kept:
                each.close()
        await until(lambda: not node_of(server.bus).dispatcher.subscriptions)
        assert (await server.client.get("/healthz")).status_code == 200
