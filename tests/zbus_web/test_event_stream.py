"""`GET /events`: order, resuming, the transition from log to live, slow clients, gaps and keep-alives."""

from __future__ import annotations

import asyncio
import gc
import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from inside import node_of
from log_support import raw
from web_support import SseClient, error_of, numbered, until, web

import zbus
from zbus.event import Event


async def test_an_event_is_a_frame_with_its_position_as_id(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.bus.put(Event(7, 0, 1_700_000_000_000_000_000, "a/b", b"hello", {"tag": "x"}))
        async with server.stream("?from=beginning") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.headers["cache-control"] == "no-store"
            assert stream.first is not None
            assert (stream.first.retry, stream.first.id, stream.first.data) == (1000, 0, None)
            frame = await stream.frame()
    assert frame is not None
    assert (frame.id, frame.event) == (1, "message")
    assert frame.data == {
        "offset": 1,
        "key": "a/b",
        "publisher_id": "7",
        "sequence": 0,
        "published_at": "2023-11-14T22:13:20.000000+00:00",
        "published_ns": "1700000000000000000",
        "headers": {"tag": "x"},
        "payload": "hello",
    }


async def test_a_binary_payload_is_base64_and_a_line_break_stays_inside_its_frame(log_path: Path) -> None:
    async with web(log_path) as server, server.stream() as stream:
        await server.publish("a", b"\xff\x00", b"one\n\ndata: two\r\nid: 99")
        assert (await stream.event())["payload_base64"] == "/wA="
        assert (await stream.event())["payload"] == "one\n\ndata: two\r\nid: 99"
        assert stream.last_id == 2


async def test_every_event_published_after_the_first_bytes_arrives(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", b"before")
        for number in range(20):
            async with server.stream("?key=a") as stream:
                (offset,) = await server.publish("a", b"%d" % number)
                assert await stream.offsets(1) == [offset]


async def test_several_expressions_are_one_stream_without_duplicates(log_path: Path) -> None:
    async with web(log_path) as server, server.stream("?key=shop/**&key=shop/*/created&key=audit/*") as stream:
        for key in ("shop/orders/created", "fleet/truck", "audit/x", "audit/x/y", "shop/a"):
            await server.publish(key, b"")
        assert [(await stream.event())["key"] for _ in range(3)] == ["shop/orders/created", "audit/x", "shop/a"]


@pytest.mark.parametrize("way", ["header", "parameter"])
async def test_a_resumed_stream_continues_exactly_after_the_last_event(log_path: Path, way: str) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 10))
        # A browser reconnects to the same URL, including `from`: the last event id takes precedence.
        query, headers = "?from=beginning", {"last_event_id": "4"}
        if way == "parameter":
            query, headers = "?from=beginning&last_event_id=4", {}
        async with server.stream(query, **headers) as stream:
            assert stream.first is not None
            assert stream.first.id == 4
            assert await stream.offsets(6) == [5, 6, 7, 8, 9, 10]
            await server.publish("a", b"11")
            assert await stream.offsets(1) == [11]


async def test_resuming_at_the_head_repeats_nothing(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 3))
        async with server.stream(last_event_id="3") as stream:
            await server.publish("a", b"4")
            assert await stream.offsets(1) == [4]


async def test_a_stream_starts_by_offset_time_or_age(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.bus.put(Event(7, 0, 1_700_000_000_000_000_000, "a", b"old"))
        await server.publish("a", b"2", b"3")
        moment = datetime.fromtimestamp(1_700_000_001, UTC).isoformat().replace("+", "%2B")
        for start, first in (("beginning", 1), ("2", 2), ("3", 3), ("0", 1), (moment, 2), ("-1h", 2)):
            async with server.stream(f"?from={start}") as stream:
                assert await stream.offsets(1) == [first], start
        async with server.stream("?from=new") as stream, server.stream("?from=4") as exact:
            await server.publish("a", b"4")
            assert await stream.offsets(1) == await exact.offsets(1) == [4]


async def test_a_stream_waits_for_a_future_offset(log_path: Path) -> None:
    async with web(log_path, keepalive_s=0.02) as server, server.stream("?from=3") as stream:
        frame = await stream.frame()
        assert frame is not None
        assert frame.comment
        assert stream.last_id is None  # If cut off now, a browser would send the same request again.
        await server.publish("a", *numbered(1, 4))
        assert await stream.offsets(2) == [3, 4]


async def test_clients_that_join_during_publishing_miss_and_repeat_nothing(log_path: Path) -> None:
    events = 1500

    async def publish(server: object) -> None:
        publisher = await server.bus.publisher("a/b")
        for number in range(events):
            await publisher.publish(b"%d" % number)

    async def read(server: object, join_at: int) -> list[int]:
        await until(lambda: node_of(server.bus).dispatcher.delivered >= join_at)
        async with server.stream("?key=a/*&from=beginning") as stream:
            return await stream.offsets(events)

    async with web(log_path, stream_queue_events=16) as server:
        reading = [asyncio.create_task(read(server, at)) for at in (0, 100, 400, 900, 1300)]
        await publish(server)
        for seen in await asyncio.gather(*reading):
            assert seen == list(range(1, events + 1))


async def test_a_client_that_reconnects_often_receives_every_event_once_in_order(log_path: Path) -> None:
    events, seen, last = 600, [], None

    async def publish() -> None:
        publisher = await server.bus.publisher("a/b")
        other = await server.bus.publisher("other")
        for number in range(events):
            await publisher.publish(b"%d" % number)
            await other.publish(b"")

    async with web(log_path) as server:
        publishing = asyncio.create_task(publish())
        # The first connection of a browser has no id yet, and may break before the first event.
        async with server.stream("?key=a/*&from=beginning") as stream:
            last = stream.last_id
        while len(seen) < events:
            async with server.stream("?key=a/*", last_event_id=str(last)) as stream:
                for _ in range(min(37, events - len(seen))):
                    seen.append(int((await stream.event())["payload"]))
                last = stream.last_id
        await publishing
    assert seen == list(range(events))


async def test_a_browser_that_is_cut_off_before_its_first_event_resumes_at_the_right_offset(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", b"1", b"2")
        async with server.stream() as stream:
            last = stream.last_id
        await server.publish("a", b"3")  # no client is connected
        async with server.stream(last_event_id=str(last)) as stream:
            assert await stream.offsets(1) == [3]


async def test_a_slow_client_costs_little_memory_and_misses_nothing_and_does_not_slow_others(log_path: Path) -> None:
    events, size = 6000, 4096  # 24 MB, more than the socket buffers hold
    async with web(log_path, stream_queue_events=64) as server:
        async with server.stream("?key=a") as slow, server.stream("?key=a") as quick:
            (waiting, live) = (
                node_of(server.bus).dispatcher.subscriptions
                if len(node_of(server.bus).dispatcher.subscriptions) == 2
                else (None, None)
            )
            assert waiting is not None
            publisher = await server.bus.publisher("a")
            most = 0
            for at in range(0, events, 100):
                await publisher.publish_many([b"%d " % number + b"x" * size for number in range(at, at + 100)])
                most = max(most, waiting.subscriber.queued, live.subscriber.queued)
                assert await quick.offsets(100) == list(range(at + 1, at + 101))  # while the other does not read
            assert not all(
                each.subscriber.is_live for each in node_of(server.bus).dispatcher.subscriptions
            )  # At least one subscription has spilled.
            assert await slow.offsets(events) == list(range(1, events + 1))
    assert most <= 128  # a page of the log at most


async def test_unread_events_of_a_slow_client_are_not_held_in_the_server(log_path: Path) -> None:
    async with web(log_path, stream_queue_events=64) as server, server.stream("?key=a") as slow:
        publisher = await server.bus.publisher("a")
        for _ in range(60):
            await publisher.publish_many([b"x" * 4096] * 100)
        (subscription,) = [each.subscriber for each in node_of(server.bus).dispatcher.subscriptions]
        await until(lambda: not subscription.is_live)
        assert subscription.queued <= 64
        assert slow.last_id == 0


async def test_events_removed_by_retention_are_a_gap_and_the_rest_follows(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 100))
        await node_of(server.bus).run(node_of(server.bus).log.prune, _rules(until=60))
    async with web(log_path) as server:
        for query in ("?last_event_id=20", "?from=21", "?last_event_id=0"):
            async with server.stream(query) as stream:
                after = 0 if query.endswith("=0") else 20
                gap = await stream.frame()
                assert gap is not None
                assert (gap.event, gap.id) == ("gap", 60)
                assert gap.data == {
                    "after": after,
                    "until": 60,
                    "code": "log_trimmed",
                    "reason": "removed by retention",
                }
                assert await stream.offsets(40) == list(range(61, 101))
        async with server.stream("?from=beginning") as stream:  # It starts with the remaining events, without a gap.
            assert await stream.offsets(40) == list(range(61, 101))
        async with server.stream("?last_event_id=60") as stream:
            assert await stream.offsets(40) == list(range(61, 101))


async def test_retention_that_overtakes_a_slow_client_is_reported_as_a_gap_in_its_place(log_path: Path) -> None:
    events, size = 4000, 8192
    async with web(log_path, stream_queue_events=16) as server, server.stream("?key=a") as slow:
        publisher = await server.bus.publisher("a")
        for _ in range(events // 100):
            await publisher.publish_many([b"x" * size] * 100)
        (subscription,) = [each.subscriber for each in node_of(server.bus).dispatcher.subscriptions]
        await until(lambda: not subscription.is_live)
        await node_of(server.bus).run(node_of(server.bus).log.prune, _rules(until=events - 10))
        expected, gaps = 1, []
        while expected <= events:
            frame = await slow.frame()
            assert frame is not None
            if frame.event == "gap":
                assert frame.data["after"] == expected - 1
                expected = frame.data["until"] + 1
                gaps.append(frame.data)
            elif frame.data is not None:
                assert frame.data["offset"] == expected
                expected += 1
        assert [gap["until"] for gap in gaps] == [events - 10]


async def test_a_corrupt_event_is_a_gap_of_one_and_the_rest_follows(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 5))
    connection = raw(log_path)
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET payload = x'00' WHERE offset = 3")
    connection.close()
    async with web(log_path) as server:
        async with server.stream("?from=beginning") as stream:
            assert await stream.offsets(2) == [1, 2]
            gap = await stream.event("gap")
            assert (gap["after"], gap["until"], gap["code"]) == (2, 3, "event_corrupt")
            assert await stream.offsets(2) == [4, 5]


async def test_an_event_that_violates_its_schema_is_skipped_and_the_rest_follows(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", b'{"id": 1}', b"{}", b'{"id": 3}')
        await server.bus.schemas.register("a", {"type": "object", "required": ["id"]})
        async with server.stream("?from=beginning") as stream:
            assert await stream.offsets(2) == [1, 3]
            await server.publish("a", b'{"id": 4}')
            assert await stream.offsets(1) == [4]


async def test_an_idle_stream_sends_keep_alives_and_advances_the_id(log_path: Path) -> None:
    async with web(log_path, keepalive_s=0.05) as server, server.stream("?key=rare") as stream:
        frame = await stream.frame()
        assert frame is not None
        assert (frame.comment, frame.id) == ("keep-alive", None)
        await server.publish("often", *numbered(1, 30))
        while stream.last_id != 30:
            frame = await stream.frame()
            assert frame is not None
            assert frame.data is None
        async with server.stream("?key=rare", last_event_id="30") as again:
            (offset,) = await server.publish("rare", b"")
            assert await stream.offsets(1) == await again.offsets(1) == [offset]


async def test_the_id_of_an_idle_stream_never_passes_an_undelivered_event(log_path: Path) -> None:
    async with web(log_path, keepalive_s=0.001) as server, server.stream("?key=a/*") as stream:
        often, rare = await server.bus.publisher("b"), await server.bus.publisher("a/b")
        for number in range(200):
            await asyncio.gather(often.publish(b""), rare.publish(b"%d" % number), often.publish(b""))
            before = stream.last_id
            event = await stream.event()
            assert int(event["payload"]) == number
            assert before < event["offset"] == stream.last_id


async def test_a_position_that_this_log_never_had_is_rejected(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 3))
        for bad, status, code in (
            ("4", 409, "unknown_position"),
            ("-1", 400, "invalid_last_event_id"),
            ("abc", 400, "invalid_last_event_id"),
            ("1" * 30, 400, "invalid_last_event_id"),
            (str((1 << 63) - 1), 400, "invalid_last_event_id"),
        ):
            async with server.stream(last_event_id=bad) as stream:
                assert stream.status == status, bad
                assert error_of(await stream.body())[0] == code
        assert node_of(server.bus).dispatcher.subscriptions == {}


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("?from=yesterday", "invalid_from"),
        ("?from=-10", "invalid_from"),
        ("?from=99999999999999999999", "invalid_from"),
        ("?key=a//b", "invalid_key"),
        ("?key=", "invalid_key"),
        ("?key=a&key=b*", "invalid_key"),
        ("?" + "&".join(f"key=k{number}" for number in range(101)), "too_many_keys"),
    ],
)
async def test_an_invalid_stream_request_is_rejected_with_a_code(log_path: Path, query: str, code: str) -> None:
    async with web(log_path) as server:
        response = await server.client.get(f"/events{query}")
        assert response.status_code == 400
        assert error_of(response.content)[0] == code
        assert node_of(server.bus).dispatcher.subscriptions == {}


async def test_a_disconnected_client_is_removed_at_once(log_path: Path) -> None:
    async with web(log_path) as server:
        async with server.stream("?key=rare"), server.stream("?key=rare") as other:
            assert len(node_of(server.bus).dispatcher.subscriptions) == 2
            await other.__aexit__()
            await until(lambda: len(node_of(server.bus).dispatcher.subscriptions) == 1)
        await until(lambda: not node_of(server.bus).dispatcher.subscriptions)
        metrics = (await server.client.get("/metrics")).text
        assert "zbus_web_streams 0.0" in metrics


async def test_a_stopping_server_ends_its_streams_with_a_reason(log_path: Path) -> None:
    async with web(log_path) as server:
        stream = SseClient(server.url, "/events", {})
        await stream.__aenter__()
        await server.publish("a", b"1")
    assert (await stream.event())["offset"] == 1
    end = await stream.frame()
    assert end is not None
    assert (end.event, end.data) == ("end", {"code": "server_stopping", "reason": "the server is stopping"})
    assert await stream.frame() is None
    await stream.__aexit__()


async def test_a_bus_that_closes_ends_its_streams(log_path: Path) -> None:
    async with web(log_path) as server, server.stream() as stream:
        await server.publish("a", b"1")
        await server.bus.aclose()
        assert await stream.offsets(1) == [1]
        assert await stream.event("end") == {"code": "bus_closed", "reason": "the bus was closed"}
        assert await stream.frame() is None
        response = await server.client.get("/events")
        assert (response.status_code, error_of(response.content)[0]) == (503, "bus_closed")


async def test_a_log_that_cannot_be_read_ends_the_stream_with_the_reason(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise zbus.LogError("the disk is gone")

    async with web(log_path) as server:
        await server.publish("a", b"1")
    async with web(log_path) as server:
        monkeypatch.setattr(node_of(server.bus).log, "read", fail)
        async with server.stream("?from=beginning") as stream:
            assert await stream.event("end") == {"code": "read_failed", "reason": "the disk is gone"}
            assert await stream.frame() is None
        await until(lambda: not node_of(server.bus).dispatcher.subscriptions)


async def test_a_client_that_never_reads_does_not_keep_the_server_from_stopping(log_path: Path) -> None:
    async with web(log_path, stop_timeout_s=1) as server:
        stuck = SseClient(server.url, "/events", {})
        await stuck.__aenter__()
        publisher = await server.bus.publisher("a")
        for _ in range(40):
            await publisher.publish_many([b"x" * 8192] * 100)
    transports = asyncio.get_running_loop()._transports  # the open transports of this loop, including ours
    await until(lambda: gc.collect() is not None and len(transports) == 1)
    await stuck.__aexit__()


async def test_a_head_request_opens_no_stream(log_path: Path) -> None:
    async with web(log_path) as server:
        response = await server.client.head("/events")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        await until(lambda: not node_of(server.bus).dispatcher.subscriptions)


async def test_a_log_that_another_process_owns_can_be_followed(log_path: Path) -> None:
    async with web(log_path) as owner:
        await owner.publish("a", *numbered(1, 3))
        async with web(log_path, bus={"read_only": True}) as reader, reader.stream("?from=2") as stream:
            assert await stream.offsets(2) == [2, 3]
            await owner.publish("a", b"4")
            assert await stream.offsets(1) == [4]
            response = await reader.client.post("/events/a", content=b"5")
            assert (response.status_code, error_of(response.content)[0]) == (409, "log_read_only")
        assert await owner.bus.head() == 4


async def test_a_stream_without_a_log_is_rejected() -> None:
    from zbus_web import serve
    from zbus_web.http.settings import WebSettings

    async with zbus.open() as bus, serve(bus, WebSettings(port=0)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for path in ("/events", "/log"):
                response = await client.get(path)
                assert (response.status_code, error_of(response.content)[0]) == (409, "log_required")


def _rules(**rules: int) -> object:
    from zbus_log.retention import Rules

    return Rules(**rules)


def test_frames_are_encoded_once_and_the_cache_is_bounded() -> None:
    from zbus_web.http.event_json import FRAMES_KEPT, EventFrames

    frames = EventFrames()
    events = [Event(1, number, 0, "a", b"x", {}, number + 1) for number in range(FRAMES_KEPT * 3)]
    assert frames.frame(events[0]) is frames.frame(events[0])
    for event in events:
        assert json.loads(frames.frame(event).partition(b"data: ")[2])["offset"] == event.offset
    assert list(frames._kept) == [event.offset for event in events[-FRAMES_KEPT:]]
