"""`GET /events`: order, resuming, the seam between log and live, slow clients, gaps, and signs of life."""

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
from web_support import Feed, numbered, refusal, until, web

import zbus
from zbus.event import Event


async def test_an_event_is_a_frame_with_its_position_as_id(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.bus.put(Event(7, 0, 1_700_000_000_000_000_000, "a/b", b"hello", {"tag": "x"}))
        async with server.feed("?from=beginning") as feed:
            assert feed.headers["content-type"].startswith("text/event-stream")
            assert feed.headers["cache-control"] == "no-store"
            assert feed.first is not None
            assert (feed.first.retry, feed.first.id, feed.first.data) == (1000, 0, None)
            frame = await feed.frame()
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


async def test_what_is_not_utf8_comes_as_base64_and_a_line_break_stays_inside_its_frame(log_path: Path) -> None:
    async with web(log_path) as server, server.feed() as feed:
        await server.publish("a", b"\xff\x00", b"one\n\ndata: two\r\nid: 99")
        assert (await feed.event())["payload_base64"] == "/wA="
        assert (await feed.event())["payload"] == "one\n\ndata: two\r\nid: 99"
        assert feed.last_id == 2


async def test_after_the_first_bytes_everything_published_arrives(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", b"before")
        for number in range(20):
            async with server.feed("?key=a") as feed:
                (offset,) = await server.publish("a", b"%d" % number)
                assert await feed.offsets(1) == [offset]


async def test_several_expressions_are_one_feed_and_each_event_comes_once(log_path: Path) -> None:
    async with web(log_path) as server, server.feed("?key=shop/**&key=shop/*/created&key=audit/*") as feed:
        for key in ("shop/orders/created", "fleet/truck", "audit/x", "audit/x/y", "shop/a"):
            await server.publish(key, b"")
        assert [(await feed.event())["key"] for _ in range(3)] == ["shop/orders/created", "audit/x", "shop/a"]


@pytest.mark.parametrize("way", ["header", "parameter"])
async def test_resuming_goes_on_exactly_after_the_last_event(log_path: Path, way: str) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 10))
        # `from` is in the address that a browser connects to again: the id of the last event wins.
        query, headers = "?from=beginning", {"last_event_id": "4"}
        if way == "parameter":
            query, headers = "?from=beginning&last_event_id=4", {}
        async with server.feed(query, **headers) as feed:
            assert feed.first is not None
            assert feed.first.id == 4
            assert await feed.offsets(6) == [5, 6, 7, 8, 9, 10]
            await server.publish("a", b"11")
            assert await feed.offsets(1) == [11]


async def test_resuming_at_the_head_repeats_nothing(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 3))
        async with server.feed(last_event_id="3") as feed:
            await server.publish("a", b"4")
            assert await feed.offsets(1) == [4]


async def test_a_feed_starts_by_offset_time_or_age(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.bus.put(Event(7, 0, 1_700_000_000_000_000_000, "a", b"old"))
        await server.publish("a", b"2", b"3")
        moment = datetime.fromtimestamp(1_700_000_001, UTC).isoformat().replace("+", "%2B")
        for start, first in (("beginning", 1), ("2", 2), ("3", 3), ("0", 1), (moment, 2), ("-1h", 2)):
            async with server.feed(f"?from={start}") as feed:
                assert await feed.offsets(1) == [first], start
        async with server.feed("?from=new") as feed, server.feed("?from=4") as exact:
            await server.publish("a", b"4")
            assert await feed.offsets(1) == await exact.offsets(1) == [4]


async def test_an_offset_that_is_still_to_come_is_waited_for(log_path: Path) -> None:
    async with web(log_path, keepalive_s=0.02) as server, server.feed("?from=3") as feed:
        frame = await feed.frame()
        assert frame is not None
        assert frame.comment
        assert feed.last_id is None  # cut off now, a browser would ask for the same again
        await server.publish("a", *numbered(1, 4))
        assert await feed.offsets(2) == [3, 4]


async def test_readers_that_join_while_events_are_published_miss_and_repeat_nothing(log_path: Path) -> None:
    events = 1500

    async def publish(server: object) -> None:
        publisher = await server.bus.publisher("a/b")
        for number in range(events):
            await publisher.publish(b"%d" % number)

    async def read(server: object, join_at: int) -> list[int]:
        await until(lambda: node_of(server.bus).dispatcher.delivered >= join_at)
        async with server.feed("?key=a/*&from=beginning") as feed:
            return await feed.offsets(events)

    async with web(log_path, feed_queue_events=16) as server:
        reading = [asyncio.create_task(read(server, at)) for at in (0, 100, 400, 900, 1300)]
        await publish(server)
        for seen in await asyncio.gather(*reading):
            assert seen == list(range(1, events + 1))


async def test_a_reader_that_reconnects_all_the_time_sees_every_event_once_in_order(log_path: Path) -> None:
    events, seen, last = 600, [], None

    async def publish() -> None:
        publisher = await server.bus.publisher("a/b")
        other = await server.bus.publisher("other")
        for number in range(events):
            await publisher.publish(b"%d" % number)
            await other.publish(b"")

    async with web(log_path) as server:
        publishing = asyncio.create_task(publish())
        # A browser's first connection has no id yet, and may be cut before the first event.
        async with server.feed("?key=a/*&from=beginning") as feed:
            last = feed.last_id
        while len(seen) < events:
            async with server.feed("?key=a/*", last_event_id=str(last)) as feed:
                for _ in range(min(37, events - len(seen))):
                    seen.append(int((await feed.event())["payload"]))
                last = feed.last_id
        await publishing
    assert seen == list(range(events))


async def test_a_browser_that_is_cut_off_before_its_first_event_still_knows_its_place(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", b"1", b"2")
        async with server.feed() as feed:
            last = feed.last_id
        await server.publish("a", b"3")  # nobody is connected
        async with server.feed(last_event_id=str(last)) as feed:
            assert await feed.offsets(1) == [3]


async def test_a_slow_client_costs_little_memory_slows_nobody_and_misses_nothing(log_path: Path) -> None:
    events, size = 6000, 4096  # 24 MB: more than sockets take
    async with web(log_path, feed_queue_events=64) as server:
        async with server.feed("?key=a") as slow, server.feed("?key=a") as quick:
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
                most = max(most, waiting.queued, live.queued)
                assert await quick.offsets(100) == list(range(at + 1, at + 101))  # while the other does not read
            assert not all(
                each.is_live for each in node_of(server.bus).dispatcher.subscriptions
            )  # one of them has spilled
            assert await slow.offsets(events) == list(range(1, events + 1))
    assert most <= 128  # a page of the log at most


async def test_what_a_slow_client_has_not_read_is_held_once_and_not_in_the_server(log_path: Path) -> None:
    async with web(log_path, feed_queue_events=64) as server, server.feed("?key=a") as slow:
        publisher = await server.bus.publisher("a")
        for _ in range(60):
            await publisher.publish_many([b"x" * 4096] * 100)
        (subscription,) = node_of(server.bus).dispatcher.subscriptions
        await until(lambda: not subscription.is_live)
        assert subscription.queued <= 64
        assert slow.last_id == 0


async def test_events_that_retention_removed_are_told_of_and_the_rest_follows(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 100))
        await node_of(server.bus).run(node_of(server.bus).log.retain, _rules(upto=60))
    async with web(log_path) as server:
        for query in ("?last_event_id=20", "?from=21", "?last_event_id=0"):
            async with server.feed(query) as feed:
                after = 0 if query.endswith("=0") else 20
                gap = await feed.frame()
                assert gap is not None
                assert (gap.event, gap.id) == ("gap", 60)
                assert gap.data == {"after": after, "until": 60, "reason": "removed by retention"}
                assert await feed.offsets(40) == list(range(61, 101))
        async with server.feed("?from=beginning") as feed:  # of what is left: nothing else was asked for
            assert await feed.offsets(40) == list(range(61, 101))
        async with server.feed("?last_event_id=60") as feed:
            assert await feed.offsets(40) == list(range(61, 101))


async def test_retention_that_overtakes_a_slow_client_is_told_where_it_happened(log_path: Path) -> None:
    events, size = 4000, 8192
    async with web(log_path, feed_queue_events=16) as server, server.feed("?key=a") as slow:
        publisher = await server.bus.publisher("a")
        for _ in range(events // 100):
            await publisher.publish_many([b"x" * size] * 100)
        (subscription,) = node_of(server.bus).dispatcher.subscriptions
        await until(lambda: not subscription.is_live)
        await node_of(server.bus).run(node_of(server.bus).log.retain, _rules(upto=events - 10))
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
        async with server.feed("?from=beginning") as feed:
            assert await feed.offsets(2) == [1, 2]
            gap = await feed.event("gap")
            assert (gap["after"], gap["until"]) == (2, 3)
            assert await feed.offsets(2) == [4, 5]


async def test_what_no_schema_accepts_is_passed_over_and_the_rest_follows(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", b'{"id": 1}', b"{}", b'{"id": 3}')
        await server.bus.schemas.register("a", {"type": "object", "required": ["id"]})
        async with server.feed("?from=beginning") as feed:
            assert await feed.offsets(2) == [1, 3]
            await server.publish("a", b'{"id": 4}')
            assert await feed.offsets(1) == [4]


async def test_an_idle_feed_shows_that_it_is_alive_and_moves_the_id_on(log_path: Path) -> None:
    async with web(log_path, keepalive_s=0.05) as server, server.feed("?key=rare") as feed:
        frame = await feed.frame()
        assert frame is not None
        assert (frame.comment, frame.id) == ("keep-alive", None)
        await server.publish("often", *numbered(1, 30))
        while feed.last_id != 30:
            frame = await feed.frame()
            assert frame is not None
            assert frame.data is None
        async with server.feed("?key=rare", last_event_id="30") as again:
            (offset,) = await server.publish("rare", b"")
            assert await feed.offsets(1) == await again.offsets(1) == [offset]


async def test_the_id_of_an_idle_feed_never_passes_an_event_that_is_still_to_come(log_path: Path) -> None:
    async with web(log_path, keepalive_s=0.001) as server, server.feed("?key=a/*") as feed:
        often, rare = await server.bus.publisher("b"), await server.bus.publisher("a/b")
        for number in range(200):
            await asyncio.gather(often.publish(b""), rare.publish(b"%d" % number), often.publish(b""))
            before = feed.last_id
            event = await feed.event()
            assert int(event["payload"]) == number
            assert before < event["offset"] == feed.last_id


async def test_a_position_that_this_log_never_had_is_refused(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 3))
        for bad, status, code in (
            ("4", 409, "position_unknown"),
            ("-1", 400, "last_event_id_invalid"),
            ("abc", 400, "last_event_id_invalid"),
            ("1" * 30, 400, "last_event_id_invalid"),
            (str((1 << 63) - 1), 400, "last_event_id_invalid"),
        ):
            async with server.feed(last_event_id=bad) as feed:
                assert feed.status == status, bad
                assert refusal(await feed.body())[0] == code
        assert node_of(server.bus).dispatcher.subscriptions == {}


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("?from=yesterday", "from_invalid"),
        ("?from=-10", "from_invalid"),
        ("?from=99999999999999999999", "from_invalid"),
        ("?key=a//b", "key_invalid"),
        ("?key=", "key_invalid"),
        ("?key=a&key=b*", "key_invalid"),
        ("?" + "&".join(f"key=k{number}" for number in range(101)), "keys_too_many"),
    ],
)
async def test_a_feed_that_cannot_be_is_refused_with_the_reason(log_path: Path, query: str, code: str) -> None:
    async with web(log_path) as server:
        answer = await server.client.get(f"/events{query}")
        assert answer.status_code == 400
        assert refusal(answer.content)[0] == code
        assert node_of(server.bus).dispatcher.subscriptions == {}


async def test_a_client_that_leaves_is_forgotten_at_once(log_path: Path) -> None:
    async with web(log_path) as server:
        async with server.feed("?key=rare"), server.feed("?key=rare") as other:
            assert len(node_of(server.bus).dispatcher.subscriptions) == 2
            await other.__aexit__()
            await until(lambda: len(node_of(server.bus).dispatcher.subscriptions) == 1)
        await until(lambda: not node_of(server.bus).dispatcher.subscriptions)
        metrics = (await server.client.get("/metrics")).text
        assert "zbus_web_streams 0.0" in metrics


async def test_a_server_that_stops_tells_its_feeds(log_path: Path) -> None:
    async with web(log_path) as server:
        feed = Feed(server.url, "/events", {})
        await feed.__aenter__()
        await server.publish("a", b"1")
    assert (await feed.event())["offset"] == 1
    end = await feed.frame()
    assert end is not None
    assert (end.event, end.data) == ("end", {"reason": "the server is stopping"})
    assert await feed.frame() is None
    await feed.__aexit__()


async def test_a_bus_that_closes_ends_its_feeds(log_path: Path) -> None:
    async with web(log_path) as server, server.feed() as feed:
        await server.publish("a", b"1")
        await server.bus.aclose()
        assert await feed.offsets(1) == [1]
        assert await feed.event("end") == {"reason": "the bus was closed"}
        assert await feed.frame() is None
        answer = await server.client.get("/events")
        assert (answer.status_code, refusal(answer.content)[0]) == (503, "bus_closed")


async def test_a_log_that_cannot_be_read_ends_the_feed_with_the_reason(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise zbus.LogError("the disk is gone")

    async with web(log_path) as server:
        await server.publish("a", b"1")
    async with web(log_path) as server:
        monkeypatch.setattr(node_of(server.bus).log, "read", fail)
        async with server.feed("?from=beginning") as feed:
            assert await feed.event("end") == {"reason": "the disk is gone"}
            assert await feed.frame() is None
        await until(lambda: not node_of(server.bus).dispatcher.subscriptions)


async def test_a_client_that_never_reads_does_not_keep_the_server_from_stopping(log_path: Path) -> None:
    async with web(log_path, stop_timeout_s=1) as server:
        stuck = Feed(server.url, "/events", {})
        await stuck.__aenter__()
        publisher = await server.bus.publisher("a")
        for _ in range(40):
            await publisher.publish_many([b"x" * 8192] * 100)
    transports = asyncio.get_running_loop()._transports  # of this loop, alive: ours is one of them
    await until(lambda: gc.collect() is not None and len(transports) == 1)
    await stuck.__aexit__()


async def test_asking_for_the_head_alone_opens_no_feed(log_path: Path) -> None:
    async with web(log_path) as server:
        answer = await server.client.head("/events")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        await until(lambda: not node_of(server.bus).dispatcher.subscriptions)


async def test_a_log_that_another_process_owns_can_be_followed(log_path: Path) -> None:
    async with web(log_path) as owner:
        await owner.publish("a", *numbered(1, 3))
        async with web(log_path, bus={"read_only": True}) as reader, reader.feed("?from=2") as feed:
            assert await feed.offsets(2) == [2, 3]
            await owner.publish("a", b"4")
            assert await feed.offsets(1) == [4]
            answer = await reader.client.post("/events/a", content=b"5")
            assert (answer.status_code, refusal(answer.content)[0]) == (409, "log_read_only")
        assert await owner.bus.head() == 4


async def test_without_a_log_there_is_no_feed_and_the_answer_says_so() -> None:
    from zbus_web.http.settings import WebSettings
    from zbus_web.server.running import serving

    async with zbus.open() as bus, serving(bus, WebSettings(port=0)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for path in ("/events", "/log"):
                answer = await client.get(path)
                assert (answer.status_code, refusal(answer.content)[0]) == (409, "log_missing")


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
