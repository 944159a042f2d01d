"""/api: the state of a bus, the operations on cursors, and the live stream."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import pytest
from web_access_support import Site, bearer, frames, is_ticking, next_data, served, until

import zbus
from zbus.introspection import of
from zbus.observe.records import EVENT_DROPPED, record

READER = "a-token-of-a-reader-1"
SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}}}


async def _cursor(site: Site, name: str, key: str = "shop/**") -> None:
    """Create a cursor that has acknowledged one event and is not in use."""
    async with site.bus.subscribe(key, start="beginning", durable=name) as sub:
        await (await anext(sub)).ack()


async def test_nodes_buses_topics_and_publishers_are_listed(log_path: Path) -> None:
    async with served(log_path, bus={"node": "here", "bus": "shop"}) as site:
        await site.publish("shop/a", b"1", b"22")

        (node,) = (await site.get("/api/nodes"))["nodes"]
        assert (node["name"], node["is_self"], node["alive"], node["has_log"]) == ("here", True, True, True)
        assert node["publishes"] == ["shop/a"]
        assert (await site.get("/api/buses"))["buses"] == [{"bus": "shop", "nodes": [node["id"]], "alive": 1}]
        (topic,) = (await site.get("/api/topics"))["topics"]
        assert (topic["key"], topic["events"], topic["bytes"]) == ("shop/a", 2, 3)
        assert topic["events_per_s"] > 0
        (publisher,) = (await site.get("/api/publishers"))["publishers"]
        assert (publisher["key"], publisher["sequence"], publisher["events"]) == ("shop/a", 1, 2)
        assert publisher["id"].isdigit()
        stats = (await site.get("/api/stats"))["stats"]
        assert (stats["published"], stats["log"]["head"]) == (2, 2)
        assert (await site.get("/api/leases"))["leases"] == []


async def test_subscriptions_are_listed_with_their_queued_and_dropped_events(log_path: Path) -> None:
    async with served(log_path) as site:
        slow = site.bus.subscribe("shop/**", queue_events=3)
        behind = site.bus.subscribe("shop/a", start="beginning", durable="billing")
        await site.publish("shop/a", *[b"1"] * 5)
        async with behind:
            await (await anext(behind)).ack()
            found = {each["durable"]: each for each in (await site.get("/api/subscriptions"))["subscriptions"]}

            assert found[None]["key_exprs"] == ["shop/**"]
            assert {name: found[None][name] for name in ("queued", "live", "lag", "overflow")} == {
                "queued": slow.queued,
                "live": True,
                "lag": slow.queued,
                "overflow": "drop_oldest",
            }
            assert found[None]["dropped"] == slow.dropped > 0
            assert (found["billing"]["lag"], found["billing"]["overflow"]) == (4, "spill")
            async with site.bus.subscribe("**", start="beginning"):  # It has received nothing yet.
                assert max(each.lag for each in of(site.bus).subscriptions()) == 5
        await slow.aclose()


async def test_schemas_and_the_asyncapi_document_are_served(log_path: Path) -> None:
    async with served(log_path) as site:
        await site.bus.schemas.register("shop/*", SCHEMA)
        await site.publish("audit/x", b"1")

        (schema,) = (await site.get("/api/schemas"))["schemas"]
        assert (schema["expression"], schema["version"], schema["mode"]) == ("shop/*", 1, "strict")
        assert schema["schema"]["properties"] == SCHEMA["properties"]
        document = await site.get("/api/asyncapi")
        assert document["asyncapi"] == "3.0.0"
        assert {each["title"] for each in document["channels"].values()} == {"shop/*", "audit/x"}


async def test_an_operator_moves_and_deletes_a_cursor(log_path: Path) -> None:
    async with served(log_path) as site:
        await site.publish("shop/a", *[b"1"] * 4)
        await _cursor(site, "bill/ing ü")

        (cursor,) = (await site.get("/api/cursors"))["cursors"]
        assert {name: cursor[name] for name in ("name", "offset", "lag", "keys", "owner")} == {
            "name": "bill/ing ü",
            "offset": 1,
            "lag": 3,
            "keys": ["shop/**"],
            "owner": None,
        }
        response = await site.client.post("/api/cursors/bill%2Fing%20%C3%BC/reset", json={"offset": 3})
        assert (response.status_code, response.json()) == (200, {"name": "bill/ing ü", "offset": 3, "lag": 1})
        assert (await site.get("/api/cursors"))["cursors"][0]["offset"] == 3
        async with site.bus.subscribe("shop/**", durable="bill/ing ü") as sub:
            assert (await anext(sub)).offset == 4
        assert (await site.client.delete("/api/cursors/bill%2Fing%20%C3%BC")).json() == {"deleted": "bill/ing ü"}
        assert (await site.get("/api/cursors"))["cursors"] == []


async def test_an_invalid_cursor_operation_changes_nothing_and_returns_an_error(log_path: Path) -> None:
    async with served(log_path) as site:
        await site.publish("shop/a", b"1", b"2")
        await _cursor(site, "idle")
        async with site.bus.subscribe("shop/**", durable="busy") as sub:
            assert sub.durable == "busy"
            for path, body, expected in (
                ("missing/reset", {"offset": 1}, (404, "unknown_cursor")),
                ("busy/reset", {"offset": 1}, (409, "cursor_rejected")),
                ("idle/reset", {"offset": 3}, (422, "invalid_offset")),
                ("idle/reset", {"offset": -1}, (422, "invalid_offset")),
                ("idle/reset", {"offset": 10**30}, (422, "invalid_offset")),
                ("idle/reset", {"offset": "1"}, (400, "invalid_body")),
                ("idle/reset", {"offset": 1.5}, (400, "invalid_body")),
                ("idle/reset", {}, (400, "invalid_body")),
                ("idle/reset", {"offset": 1, "more": 2}, (400, "invalid_body")),
                ("idle/reset", [], (400, "invalid_body")),
            ):
                response = await site.client.post(f"/api/cursors/{path}", json=body)
                assert (response.status_code, response.json()["error"]["code"]) == expected, (path, body)
            for content in (b"", b"{", b'{"offset": 1e999}', b"\xff"):
                response = await site.client.post("/api/cursors/idle/reset", content=content)
                assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_body"), content
            assert (await site.client.delete("/api/cursors/missing")).status_code == 404
            assert (await site.client.delete("/api/cursors/busy")).status_code == 409
            offsets = {each["name"]: each["offset"] for each in (await site.get("/api/cursors"))["cursors"]}
            assert offsets["idle"] == 1
            assert set(offsets) == {"idle", "busy"}


async def test_an_invalid_limit_is_rejected(log_path: Path) -> None:
    async with served(log_path) as site:
        for limit in ("0", "-1", "x", "10001", "1e3", "٣", "9" * 30):
            response = await site.client.get("/api/topics", params={"limit": limit})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_limit")
        assert (await site.client.get("/api/nothing")).json()["error"]["code"] == "not_found"
        assert (await site.client.post("/api/topics")).json()["error"]["code"] == "method_not_allowed"


async def test_a_token_for_some_keys_sees_only_what_concerns_them(log_path: Path) -> None:
    tokens = [{"name": "reader", "token": READER, "read": ["shop/**"]}]
    async with served(log_path, tokens=tokens) as site:
        for key in ("shop/a", "audit/a"):
            await site.publish(key, b"1")
            await site.bus.schemas.register(key, {})
            await _cursor(site, key.replace("/", "-"), key)
        record(EVENT_DROPPED, logging.WARNING, key="audit/a")
        reader = {"headers": bearer(READER)}
        async with site.bus.subscribe("audit/*"), site.bus.subscribe("shop/*"), site.bus.subscribe("**"):
            assert [each["name"] for each in (await site.get("/api/cursors", **reader))["cursors"]] == ["shop-a"]
            assert [each["expression"] for each in (await site.get("/api/schemas", **reader))["schemas"]] == ["shop/a"]
            found = (await site.get("/api/subscriptions", **reader))["subscriptions"]
            assert [each["key_exprs"] for each in found] == [["shop/*"]]
            (node,) = (await site.get("/api/nodes", **reader))["nodes"]
            assert (node["publishes"], set(node["subscribes"])) == (["shop/a"], {"shop/*", "shop/a"})
            assert (await site.get("/api/log-records", **reader))["log_records"] == []
            assert "audit" not in str(await site.get("/api/asyncapi", **reader))
            async with frames(site.client, "/api/live", **reader) as live:
                snapshot = await next_data(live)
            assert [each["key"] for each in snapshot["topics"]] == ["shop/a"]
            assert [each["name"] for each in snapshot["cursors"]] == ["shop-a"]
            assert "audit" not in str({name: each for name, each in snapshot.items() if name != "stats"})


@pytest.mark.parametrize(("old", "new"), [("records", "log-records"), ("subscribers", "subscriptions")])
async def test_a_retired_path_names_the_new_one(log_path: Path, old: str, new: str) -> None:
    async with served(log_path) as site:
        response = await site.client.get(f"/api/{old}")

        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert response.json()["error"]["message"] == f"/api/{old} was renamed: use /api/{new}"


async def test_log_records_show_what_went_wrong(log_path: Path) -> None:
    async with served(log_path) as site:
        record(EVENT_DROPPED, logging.WARNING, keys=["a", "sessions/alice/x"], missed=3)

        found = (await site.get("/api/log-records"))["log_records"]
        assert [(each["record"], each["keys"], each["missed"]) for each in found] == [
            (EVENT_DROPPED, ["a", "sessions/…/x"], 3)
        ]


async def test_the_live_stream_tells_of_each_second_and_is_made_once_for_all(log_path: Path) -> None:
    async with served(log_path) as site:
        assert not is_ticking()
        async with frames(site.client, "/api/live") as first, frames(site.client, "/api/live") as second:
            snapshot = await next_data(first)
            assert set(snapshot) == {
                *("at", "stats", "topics", "rates", "latency", "subscriptions", "cursors", "nodes", "log_records")
            }
            assert snapshot["latency"]["commit_ms"] == {"p50": None, "p99": None}
            async with site.bus.subscribe("a/**"):
                await site.publish("a/b", *[b"x"] * 50)
                record(EVENT_DROPPED, logging.WARNING, key="a/b")
                while not snapshot["rates"]["published_per_s"]:
                    snapshot = await next_data(first)
            assert snapshot["rates"]["delivered_per_s"] == snapshot["rates"]["published_per_s"] > 0
            assert 0 < snapshot["latency"]["commit_ms"]["p50"] <= snapshot["latency"]["commit_ms"]["p99"]
            assert snapshot["latency"]["delivery_ms"]["p99"] > 0
            assert [(each["key"], each["events"]) for each in snapshot["topics"]] == [("a/b", 50)]
            assert snapshot["stats"]["published"] == 50
            assert snapshot["nodes"][0]["is_self"]
            while not snapshot["log_records"]:
                snapshot = await next_data(first)
            assert [each["record"] for each in snapshot["log_records"]] == [EVENT_DROPPED]
            quiet = await next_data(first)
            assert quiet["log_records"] == []  # Only new log records are sent.
            assert quiet["latency"]["commit_ms"] == {"p50": None, "p99": None}  # of the last second only
            (ticking,) = [task for task in asyncio.all_tasks() if task.get_name() == "zbus-web-live"]  # one for both
            # The other one was shown the same, and it was worked out once.
            seen = await next_data(second)
            while seen["at"] != snapshot["at"]:
                seen = await next_data(second)
            assert seen == snapshot

        async def has_ended() -> bool:
            return not is_ticking() and ticking.done()

        await until(has_ended)


async def test_the_live_stream_is_whole_when_the_server_stops(log_path: Path) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        async with served(log_path) as site:
            live = client.stream("GET", f"{site.url}/api/live")
            lines = (await live.__aenter__()).aiter_lines()
            first = await anext(lines)
        rest = [line async for line in lines]  # Raises if the response is truncated.
        await live.__aexit__(None, None, None)

    assert first.startswith("retry: ")
    assert rest[-1] == "", "the last frame has its end"


async def test_leases_of_the_zmq_registry_are_shown(log_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    url = f"zmq://?registry={folder}"
    async with served(log_path, bus={"transport": url}) as site, zbus.open(transport=url):

        async def both() -> list[dict[str, object]] | None:
            found: list[dict[str, object]] = (await site.get("/api/leases"))["leases"]
            return found if len(found) == 2 else None

        leases = await until(both)
        assert {each["transport"] for each in leases} == set(site.bus.stats()["links"])
        assert all(0 < each["left_s"] <= each["lease_s"] for each in leases)
        assert len({each["node"] for each in leases}) == 2
        graph = await site.query("{ leases { node pid leftS } }")
        assert {each["node"] for each in graph.json()["data"]["leases"]} == {each["node"] for each in leases}
