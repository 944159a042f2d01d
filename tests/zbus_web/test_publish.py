"""`POST /events/{key}`: the stored event, the response and its time, and repeated requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from inside import node_of
from web_support import SseClient, error_of, until, web

import zbus
from zbus.ports.log import AppendResult, Refused, Unknown
from zbus_web.events.publish import Publication, put_once


class HeldCommits:
    """Keeps the appends of a bus until `release`: requests that arrive meanwhile share commits or are in the next."""

    def __init__(self, bus: zbus.Bus) -> None:
        self._commits: Any = node_of(bus).commits
        self._append, self._held = self._commits._append, list[tuple[Any, ...]]()
        self._commits._append = lambda *append: self._held.append(append)

    @property
    def rows(self) -> int:
        return sum(len(rows) for rows, *_ in self._held)

    def release(self) -> None:
        self._commits._append = self._append
        for append in self._held:
            self._append(*append)

    def fail(self, error: zbus.ZbusError) -> None:
        self._commits._append = self._append
        for _, done, about in self._held:
            done(AppendResult(about, Refused(error)))


async def test_the_body_becomes_the_event_and_the_response_has_its_offset(log_path: Path) -> None:
    async with web(log_path) as server:
        response = await server.client.post(
            "/events/shop/orders/created",
            content=b'{"id": 1}',
            headers={
                "content-type": "application/json",
                "X-Zbus-Header-Correlation-Id": "c-1",
                "x-zbus-header-a.b": "ü".encode(),
            },
        )
        assert response.status_code == 201
        assert response.headers["content-type"] == "application/json"
        (event,) = [event async for event in server.bus.replay()]
        expected = {"offset": 1, "publisher_id": str(event.publisher_id), "sequence": event.sequence}
        assert response.json() == expected
    assert (event.key, event.payload, event.decode()) == ("shop/orders/created", b'{"id": 1}', {"id": 1})
    assert event.headers == {"content-type": "application/json", "correlation-id": "c-1", "a.b": "ü"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, {}),
        ("application/octet-stream", {}),
        ("text/plain;charset=UTF-8", {"content-type": "text/plain"}),
        ("application/json; charset=utf-8", {"content-type": "application/json"}),
        ("image/png", {"content-type": "image/png"}),
    ],
)
async def test_the_content_type_is_stored_unless_it_is_the_default(
    log_path: Path, given: str | None, kept: dict[str, str]
) -> None:
    async with web(log_path) as server:
        headers = {"content-type": given} if given else {}
        response = await server.client.post("/events/a", content=bytes(range(256)), headers=headers)
        assert response.status_code == 201
        (event,) = [event async for event in server.bus.replay()]
    assert (event.payload, dict(event.headers)) == (bytes(range(256)), kept)


async def test_acknowledged_events_are_in_the_log_in_the_order_of_their_connection(log_path: Path) -> None:
    async with web(log_path) as server:
        responses = [(await server.client.post("/events/a", content=b"%d" % number)).json() for number in range(30)]
        stored = [event async for event in server.bus.replay()]
    assert [event.payload for event in stored] == [b"%d" % number for number in range(30)]
    assert [(each["offset"], each["sequence"]) for each in responses] == [(n + 1, n) for n in range(30)]
    assert {each["publisher_id"] for each in responses} == {str(stored[0].publisher_id)}


async def test_concurrent_requests_share_commits_and_each_has_its_own_offset(log_path: Path) -> None:
    async with web(log_path) as server:
        held = HeldCommits(server.bus)
        posts = [asyncio.create_task(server.client.post(f"/events/k/{n % 5}", content=b"%d" % n)) for n in range(64)]
        await until(lambda: held.rows == 64)
        held.release()
        stored_as = [response.json() for response in await asyncio.gather(*posts)]
        stored = {event.offset: event async for event in server.bus.replay()}
    assert sorted(stored) == sorted(each["offset"] for each in stored_as) == list(range(1, 65))
    sequences: dict[str, list[int]] = {}
    for n, each in enumerate(stored_as):
        event = stored[each["offset"]]
        assert (event.payload, event.key) == (b"%d" % n, f"k/{n % 5}")
        assert (str(event.publisher_id), event.sequence) == (each["publisher_id"], each["sequence"])
    for offset in sorted(stored):
        sequences.setdefault(stored[offset].key, []).append(stored[offset].sequence)
    assert all(each == list(range(len(each))) for each in sequences.values())  # in order, per key


async def test_a_repeated_request_returns_the_first_offset_and_stores_nothing(log_path: Path) -> None:
    once = {"idempotency-key": "order-1", "content-type": "text/plain"}
    async with web(log_path) as server:
        first = await server.client.post("/events/a", content=b"x", headers=once)
        await server.publish("b", b"between")
        again = await server.client.post("/events/a", content=b"x", headers=once)
        elsewhere = await server.client.post("/events/c", content=b"x", headers=once)
        assert await server.bus.head() == 3
    assert (first.status_code, again.status_code, elsewhere.status_code) == (201, 200, 201)
    assert again.json() == first.json() | {"duplicate": True}
    assert elsewhere.json()["offset"] == 3
    async with web(log_path) as server:  # after a restart
        later = await server.client.post("/events/a", content=b"x", headers=once)
        assert (later.status_code, later.json()) == (200, again.json())
        assert await server.bus.head() == 3


async def test_the_same_idempotency_key_for_another_event_is_rejected_and_nothing_is_lost(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.client.post("/events/a", content=b"x", headers={"idempotency-key": "1"})
        for content, more in ((b"y", {}), (b"x", {"content-type": "text/plain"}), (b"x", {"x-zbus-header-a": "1"})):
            response = await server.client.post("/events/a", content=content, headers={"idempotency-key": "1"} | more)
            assert (response.status_code, error_of(response.content)[0]) == (422, "idempotency_mismatch")
        assert [event.payload async for event in server.bus.replay()] == [b"x"]


async def test_a_repeated_request_may_have_another_trace_context(log_path: Path) -> None:
    contexts = [{}, {"x-zbus-header-traceparent": f"00-{1:032x}-{1:016x}-01"}, {"x-zbus-header-baggage": "try=2"}]
    async with web(log_path) as server:
        responses = [
            await server.client.post("/events/a", content=b"x", headers={"idempotency-key": "1"} | context)
            for context in contexts
        ]
        assert await server.bus.head() == 1
    assert [response.status_code for response in responses] == [201, 200, 200]


async def test_the_same_request_many_times_at_once_is_stored_once(log_path: Path) -> None:
    async with web(log_path) as server, server.stream("?key=a") as stream:
        for number in range(5):
            posts = [
                server.client.post("/events/a", content=b"same", headers={"idempotency-key": f"{number}"})
                for _ in range(20)
            ]
            responses = await asyncio.gather(*posts)
            assert sorted(response.status_code for response in responses) == [200] * 19 + [201]
            assert {response.json()["offset"] for response in responses} == {number + 1}
        assert await server.bus.head() == 5
        assert await stream.offsets(5) == [1, 2, 3, 4, 5]


async def test_two_concurrent_bodies_with_one_idempotency_key_store_one_event(log_path: Path) -> None:
    async with web(log_path) as server:
        posts = [
            server.client.post("/events/a", content=b"%d" % (n % 2), headers={"idempotency-key": "k"})
            for n in range(10)
        ]
        responses = await asyncio.gather(*posts)
        assert sorted(response.status_code for response in responses) == [200] * 4 + [201] + [422] * 5
        assert await server.bus.head() == 1


def post_once(server: Any, content: bytes) -> asyncio.Task[httpx.Response]:
    sending = server.client.post("/events/a", content=content, headers={"idempotency-key": "k"})
    return asyncio.get_running_loop().create_task(sending)


@pytest.mark.parametrize("bodies", [b"xxxxxxxx", b"xyxyxyxy"])
async def test_requests_with_one_idempotency_key_that_await_the_same_commits_store_one_event(
    log_path: Path, bodies: bytes
) -> None:
    async with web(log_path) as server, server.stream("?key=a") as stream:
        held = HeldCommits(server.bus)
        posts = [post_once(server, bytes([body])) for body in bodies]
        await until(lambda: held.rows == len(bodies))
        held.release()
        responses = await asyncio.gather(*posts)

        (event,) = [event async for event in server.bus.replay()]
        await server.publish("a", b"next")
        assert await stream.offsets(2) == [1, 2]
    first, others = event.payload[0], bytes(bodies).count(event.payload) - 1
    statuses = sorted(response.status_code for response in responses)
    assert statuses == [200] * others + [201] + [422] * (len(bodies) - others - 1)
    assert {each.status_code for each, body in zip(responses, bodies, strict=True) if body == first} == {200, 201}
    assert {each.json()["offset"] for each in responses if each.is_success} == {1}


async def test_requests_with_one_idempotency_key_fail_together_with_their_commit(log_path: Path) -> None:
    async with web(log_path) as server:
        held = HeldCommits(server.bus)
        posts = [post_once(server, b"x") for _ in range(5)]
        await until(lambda: held.rows == 5)
        held.fail(zbus.LogFull("app.db"))

        assert [response.status_code for response in await asyncio.gather(*posts)] == [507] * 5
        assert (await post_once(server, b"x")).status_code == 201
        assert await server.bus.head() == 1


async def test_a_cancelled_request_neither_fails_nor_repeats_the_one_beside_it(log_path: Path) -> None:
    publication = Publication("a", b"x", None, "k")
    async with zbus.open(log_path) as bus:
        held = HeldCommits(bus)
        first, second = (asyncio.create_task(put_once(bus, publication)) for _ in range(2))
        await until(lambda: held.rows == 2)
        first.cancel()
        held.release()

        assert (await second)[0]["offset"] == 1
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await put_once(bus, publication)) == ((await second)[0], False)
        assert await bus.head() == 1


async def test_a_request_that_is_cancelled_before_its_commit_leaves_the_key_to_the_next(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        backpressure = node_of(bus).backpressure
        reason = node_of(bus).commits
        backpressure.block(reason, "commits_pending", "a test")
        first, second = (asyncio.create_task(put_once(bus, Publication("a", body, None, "k"))) for body in (b"x", b"y"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        backpressure.unblock(reason)

        assert (await second)[1]
        assert [event.payload async for event in bus.replay()] == [b"y"]


async def test_a_client_that_disconnects_before_the_response_can_repeat_its_request(log_path: Path) -> None:
    async with web(log_path) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(10):
            _, writer = await asyncio.open_connection(host, int(port))
            request = (
                f"POST /events/a HTTP/1.1\r\nHost: {host}:{port}\r\nIdempotency-Key: k\r\nContent-Length: 1\r\n\r\nx"
            )
            writer.write(request.encode())
            await writer.drain()
            writer.transport.abort()
        response = await server.client.post("/events/a", content=b"x", headers={"idempotency-key": "k"})
        assert response.json()["offset"] == 1
        await until(lambda: not node_of(server.bus).commits._in_flight)
        assert await server.bus.head() == 1


async def test_an_incomplete_body_is_not_stored(log_path: Path) -> None:
    async with web(log_path) as server:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /events/a HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 100\r\n\r\nhalf".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        response = await server.client.post("/events/a", content=b"whole")
        assert response.json()["offset"] == 1
        assert [event.payload async for event in server.bus.replay()] == [b"whole"]


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/events/", {}, 400, "invalid_key"),
        ("/events/a//b", {}, 400, "invalid_key"),
        ("/events/a/*", {}, 400, "invalid_key"),
        ("/events/a%20b", {}, 400, "invalid_key"),
        ("/events/@zbus/x", {}, 400, "invalid_key"),
        ("/events/" + "k" * 1100, {}, 400, "invalid_key"),
        ("/events/a", {"idempotency-key": ""}, 400, "invalid_idempotency_key"),
        ("/events/a", {"idempotency-key": "k" * 201}, 400, "invalid_idempotency_key"),
        ("/events/a", {"x-zbus-header-": "v"}, 400, "invalid_event"),
        ("/events/a", {"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        ("/events/a", {"x-zbus-header-a": b"\xff"}, 400, "invalid_header"),
        ("/events/a", {"x-zbus-header-a": "v" * 60_000}, 400, None),
    ],
)
async def test_bad_requests_are_rejected_with_the_reason_and_nothing_is_stored(
    log_path: Path, path: str, headers: dict[str, str | bytes], status: int, code: str | None
) -> None:
    async with web(log_path) as server:
        response = await server.client.post(path, content=b"x", headers=headers)
        if code is not None:
            assert (response.status_code, error_of(response.content)[0]) == (status, code)
        assert response.status_code < 500
        good = await server.client.post("/events/a", content=b"y")
        assert [event.payload async for event in server.bus.replay()][-1] == b"y"
        assert good.status_code == 201


async def test_a_body_over_the_limit_is_rejected_however_it_is_sent(log_path: Path) -> None:
    async def chunks() -> object:
        for _ in range(3):
            yield b"x" * 50

    async with web(log_path, body_bytes_max=100) as server:
        for content in (b"x" * 101, chunks()):
            response = await server.client.post("/events/a", content=content)
            assert (response.status_code, error_of(response.content)[0]) == (413, "body_too_large")
        assert (await server.client.post("/events/a", content=b"x" * 100)).status_code == 201
        assert await server.bus.head() == 1
    async with web(log_path, bus={"payload_bytes_max": 50}) as server:
        response = await server.client.post("/events/a", content=b"x" * 51)
        assert (response.status_code, error_of(response.content)[0]) == (413, "event_too_large")
        assert await server.bus.head() == 1


async def test_an_event_that_violates_its_schema_is_rejected(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.bus.schemas.register("a", {"type": "object", "required": ["id"]})
        bad = await server.client.post("/events/a", content=b"{}")
        assert (bad.status_code, error_of(bad.content)[0]) == (422, "schema_violated")
        once = await server.client.post("/events/a", content=b"{}", headers={"idempotency-key": "k"})
        assert (once.status_code, error_of(once.content)[0]) == (422, "schema_violated")
        assert (await server.client.post("/events/a", content=b'{"id": 1}')).status_code == 201
        assert await server.bus.head() == 1


async def test_a_commit_that_fails_is_never_acknowledged(log_path: Path) -> None:
    async with web(log_path) as server:
        commits = node_of(server.bus).commits
        append = commits._append
        commits._append = lambda rows, done, about: done(AppendResult(about, Refused(zbus.LogFull("app.db"))))
        plain = await server.client.post("/events/a", content=b"x")
        once = await server.client.post("/events/a", content=b"x", headers={"idempotency-key": "k"})
        assert (plain.status_code, error_of(plain.content)[0]) == (507, "log_full")
        assert (once.status_code, error_of(once.content)[0]) == (507, "log_full")
        commits._append = append
        again = await server.client.post("/events/a", content=b"x", headers={"idempotency-key": "k"})
        assert (again.status_code, again.json()["offset"]) == (201, 1)


async def test_the_number_of_cached_publishers_is_bounded(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbus_web.events.publish.PUBLISHERS_MAX", 3)
    async with web(log_path) as server:
        stored_as = []
        for n in (0, 1, 2, 0, 3, 0, 1):
            stored_as.append((await server.client.post(f"/events/k/{n}", content=b"")).json())
        ids = [each["publisher_id"] for each in stored_as]
        assert ids[0] == ids[3] == ids[5]
        assert [stored_as[at]["sequence"] for at in (0, 3, 5)] == [0, 1, 2]
        assert ids[1] != ids[6]  # Evicted in between: a new identity whose sequence starts at 0.
        assert stored_as[6]["sequence"] == 0


async def test_a_posted_event_reaches_a_stream_unchanged(log_path: Path) -> None:
    async with web(log_path) as server, SseClient(server.url, "/events?key=a/**", {}) as stream:
        await server.client.post("/events/a/b", content="grüße".encode(), headers={"content-type": "text/plain"})
        event = await stream.event()
    assert (event["key"], event["payload"]) == ("a/b", "grüße")
    assert json.dumps(event["headers"]) == '{"content-type": "text/plain"}'


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Refused(zbus.LogError("busy")), "not_stored"),
        (Unknown(zbus.LogError("no reply")), "unknown_outcome"),
        (Refused(zbus.LogWriterFailed("app.db", "fsync failed")), "log_writer_failed"),
        (Unknown(zbus.LogWriterFailed("app.db", "fsync failed")), "unknown_outcome"),
    ],
)
async def test_an_event_that_was_not_stored_and_one_that_may_be_have_different_codes(
    log_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Refused | Unknown, code: str
) -> None:
    def fail(rows: Any, done: Any, about: Any) -> None:
        done(AppendResult(about, outcome))

    async with web(log_path) as server:
        monkeypatch.setattr(node_of(server.bus).commits, "_append", fail)
        response = await server.client.post("/events/a", content=b"x")

    assert response.status_code == 503
    found, message = error_of(response.content)
    assert found == code
    assert ("not stored" in message) is (type(outcome) is Refused)
