"""`GET /log`: pages in both directions, every filter, and bounded work."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from log_support import raw
from web_support import Web, error_of, numbered, web

from zbus.event import Event

SECOND = 1_000_000_000
BEGIN = 1_700_000_000 * SECOND


async def page(server: Web, query: str = "") -> dict[str, Any]:
    response = await server.client.get(f"/log{query}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    assert set(found) == {"events", "next", "head", "low_water"}
    return found


async def pages(server: Web, query: str, limit: int) -> tuple[list[int], int]:
    """Read all pages. Return the offsets and the number of pages."""
    offsets: list[int] = []
    after, number = "", 0
    while True:
        found = await page(server, f"?{query}&limit={limit}{after}")
        number += 1
        assert len(found["events"]) <= limit
        offsets += [event["offset"] for event in found["events"]]
        if found["next"] is None:
            return offsets, number
        after = f"&after={found['next']}"


def iso(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / SECOND, UTC).isoformat().replace("+", "%2B")


async def fill(server: Web) -> list[Event]:
    """Return 300 events, one second apart: three keys, four publishers, some with headers."""
    chance = random.Random(7)
    events = [
        Event(
            chance.randrange(1, 5),
            number,
            BEGIN + number * SECOND,
            chance.choice(("shop/orders", "shop/payments", "audit/x")),
            b"%d" % number,
            chance.choice(({}, {"region": "eu"}, {"region": "us", "urgent": "1"}, {"note": "a:b"})),
        )
        for number in range(300)
    ]
    await server.bus.put(*events)
    return events


async def test_pages_cover_all_events_in_both_directions_with_every_filter(log_path: Path) -> None:
    async with web(log_path) as server:
        events = await fill(server)
        wanted: dict[str, list[int]] = {
            "": [*range(1, 301)],
            "key=shop/*": [n for n, e in enumerate(events, 1) if e.key.startswith("shop/")],
            "key=audit/x&key=shop/orders": [n for n, e in enumerate(events, 1) if e.key != "shop/payments"],
            "key=nothing/here": [],
            "publisher=3": [n for n, e in enumerate(events, 1) if e.publisher_id == 3],
            "header=region:eu": [n for n, e in enumerate(events, 1) if e.headers.get("region") == "eu"],
            "header=Region": [n for n, e in enumerate(events, 1) if "region" in e.headers],
            "header=region:us&header=urgent": [n for n, e in enumerate(events, 1) if "urgent" in e.headers],
            "header=note:a:b": [n for n, e in enumerate(events, 1) if "note" in e.headers],
            f"from={iso(BEGIN + 100 * SECOND)}&to={iso(BEGIN + 149 * SECOND)}": [*range(101, 151)],
            f"from={iso(BEGIN + 250 * SECOND)}": [*range(251, 301)],
            f"to={iso(BEGIN + 9 * SECOND)}": [*range(1, 11)],
            "from=290&to=295": [*range(290, 296)],
            f"key=shop/orders&publisher=2&header=region&from={iso(BEGIN + 50 * SECOND)}": [
                n
                for n, e in enumerate(events, 1)
                if (e.key, e.publisher_id) == ("shop/orders", 2) and "region" in e.headers and n > 50
            ],
        }
        assert all(wanted[query] for query in wanted if query != "key=nothing/here")
        for query, expected in wanted.items():
            for limit in (40, 1000):
                assert (await pages(server, query, limit))[0] == expected, query
                assert (await pages(server, f"{query}&order=desc", limit))[0] == expected[::-1], query


async def test_a_page_has_events_in_the_form_of_a_stream_and_the_bounds_of_the_log(log_path: Path) -> None:
    async with web(log_path) as server:
        assert await page(server) == {"events": [], "next": None, "head": 0, "low_water": 0}
        await server.publish("a/b", b"\xff", b"text", region="eu")
        found = await page(server)
        async with server.stream("?from=beginning") as stream:
            assert found["events"] == [await stream.event(), await stream.event()]
        assert (found["next"], found["head"]) == (None, 2)
        assert found["events"][0]["payload_base64"] == "/w=="
        assert (await page(server, "?limit=1"))["next"] == 1
        assert (await page(server, "?after=2"))["events"] == []
        assert (await page(server, "?after=2&order=desc&limit=1"))["events"][0]["offset"] == 1
        assert (await page(server, "?after=1&order=desc"))["events"] == []
        assert (await page(server, "?after=0&order=desc"))["events"] == []


async def test_events_removed_by_retention_are_not_an_error(log_path: Path) -> None:
    from zbus_log.retention import Rules

    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 100))
        await node_of(server.bus).run(node_of(server.bus).log.prune, Rules(until=60))  # type: ignore[attr-defined]
        assert (await pages(server, "", 7))[0] == [*range(61, 101)]
        assert (await pages(server, "order=desc", 7))[0] == [*range(100, 60, -1)]
        found = await page(server, "?after=20&limit=1")
        assert (found["events"][0]["offset"], found["low_water"]) == (61, 60)


async def test_the_work_of_one_request_is_bounded_and_the_next_one_continues(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_web.introspect.pages.SCAN_EVENTS", 500)
    monkeypatch.setattr("zbus_web.introspect.pages.WINDOW_MIN", 200)
    async with web(log_path) as server:
        await server.publish("a", *[b""] * 3000)
        (last,) = await server.publish("a", b"", tag="x")
        (first_page, number) = await pages(server, "header=tag", 100)
        assert first_page == [last]
        assert number >= 3001 // 500
        offsets, number = await pages(server, "header=none&order=desc", 100)
        assert offsets == []
        assert number >= 3001 // 500
        empty = await page(server, "?header=tag&limit=100")
        assert (empty["events"], empty["next"]) == ([], 500)


async def test_a_request_that_ends_between_two_reads_continues_there(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_web.introspect.pages.SCAN_PAGES", 1)
    monkeypatch.setattr("zbus_web.introspect.pages.WINDOW_MIN", 100)
    async with web(log_path) as server:
        for number in range(5):
            await server.publish("a", *[b""] * 130)
            await server.publish(f"b/{number}", b"")
        assert (await pages(server, "", 1000))[0] == [*range(1, 656)]
        assert (await pages(server, "order=desc", 1000))[0] == [*range(655, 0, -1)]
        assert (await pages(server, "key=b/*", 1000))[0] == [131, 262, 393, 524, 655]
        assert (await pages(server, "key=b/*&order=desc", 1000))[0] == [655, 524, 393, 262, 131]


async def test_large_payloads_make_short_pages(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbus_web.introspect.pages.RESPONSE_BYTES", 10_000)
    async with web(log_path) as server:
        await server.publish("a", b"x" * 4000, b"x" * 4000, b"x" * 4000, b"x" * 20_000, b"x")
        for order in ("asc", "desc"):
            offsets, number = await pages(server, f"order={order}", 100)
            assert offsets == sorted(range(1, 6), reverse=order == "desc")
            assert number >= 3


async def test_reading_backwards_from_sparse_into_dense_events_reads_no_more_than_it_returns(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with web(log_path) as server:
        await server.publish("crowd", *[b""] * 5000)
        await server.publish("other", *[b""] * 8000)
        (last,) = await server.publish("crowd", b"")
        log, decoded = node_of(server.bus).log, []
        read = log.read  # type: ignore[union-attr]

        def counted(*arguments: Any) -> Any:
            page = read(*arguments)
            decoded.append(len(page.events()[0]))
            return page

        monkeypatch.setattr(log, "read", counted)
        found = await page(server, "?key=crowd&order=desc&limit=100")
        assert [event["offset"] for event in found["events"]] == [last, *range(5000, 4901, -1)]
        assert max(decoded) <= 1000
        assert (await pages(server, "key=crowd&order=desc", 1000))[0] == [last, *range(5000, 0, -1)]


async def test_a_corrupt_event_is_skipped_and_the_rest_is_returned(log_path: Path) -> None:
    async with web(log_path) as server:
        await server.publish("a", *numbered(1, 6))
    connection = raw(log_path)
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET payload = x'00' WHERE offset IN (1, 3, 6)")
    connection.close()
    async with web(log_path) as server:
        for limit in (1, 2, 100):
            assert (await pages(server, "", limit))[0] == [2, 4, 5]
            assert (await pages(server, "order=desc", limit))[0] == [5, 4, 2]


async def test_pages_read_during_publishing_neither_miss_nor_repeat_events(log_path: Path) -> None:
    async with web(log_path) as server:
        publisher = await server.bus.publisher("a")
        offsets, after = [], 0
        for _ in range(20):
            await publisher.publish_many([b""] * 7)
            found = await page(server, f"?after={after}&limit=5")
            offsets += [event["offset"] for event in found["events"]]
            after = offsets[-1]
        assert offsets == [*range(1, 101)]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=0", "invalid_limit"),
        ("limit=1001", "invalid_limit"),
        ("limit=ten", "invalid_limit"),
        ("after=-1", "invalid_after"),
        ("after=99999999999999999999", "invalid_after"),
        ("after=1.5", "invalid_after"),
        ("from=then", "invalid_from"),
        ("to=1600-01-01", "invalid_to"),
        ("publisher=me", "invalid_publisher"),
        ("header=:x", "invalid_header"),
        ("tag=region:eu", "renamed_parameter"),
        ("order=up", "invalid_order"),
        ("key=a//b", "invalid_key"),
    ],
)
async def test_an_invalid_query_is_rejected_with_a_code(log_path: Path, query: str, code: str) -> None:
    async with web(log_path) as server:
        response = await server.client.get(f"/log?{query}")
        assert response.status_code == 400
        found, reason = error_of(response.content)
        assert found == code
        assert query.partition("=")[0] in reason or code == "invalid_key"


async def test_the_old_name_of_the_header_filter_names_the_new_one(log_path: Path) -> None:
    async with web(log_path) as server:
        response = await server.client.get("/log?tag=region:eu")

        assert response.status_code == 400
        assert "header=NAME" in error_of(response.content)[1]
