"""GraphQL: queries, mutations, live subscriptions, and limits for expensive documents."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from graphql import GraphQLError, get_introspection_query, parse
from inside import node_of
from web_access_support import (
    bearer,
    errors_of,
    graph_socket,
    is_ticking,
    receive,
    served,
    subscribe,
    until,
)
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from zbus_web.graphql.limits import ALIASES_MAX, DEPTH_MAX, FIELDS_MAX, TOKENS_MAX, _too_much
from zbus_web.graphql.schema import make_schema
from zbus_web.graphql.types import LONG_MAX, read_long

ADMIN, SHOP = "admin-token-0123456789", "shop-token-0123456789"
TOKENS = [
    {"name": "admin", "token": ADMIN, "operate": True},
    {"name": "shop", "token": SHOP, "read": ["shop/**"]},
]
EVERYTHING = """{
  nodes { id name buses host pid version startedAt lastSeen isSelf alive hasLog transport trust endpoints publishes
          subscribes serves truncated metadata }
  buses { bus alive nodes { name } }
  topics(limit: 10) { key events eventsPerS bytes lastAt }
  publishers { key id sequence events lastAt }
  subscriptions { keyExprs durable overflow live queued dropped lag }
  cursors { name offset lag keys updatedAt owner }
  leases { transport node leaseS leftS allocatedBy }
  schemas { expression version mode hash schema registeredAt }
  stats { published delivered subscriptions head all }
  logRecords { id at level record fields }
}"""
EVENTS = """subscription($keys: [String!]!, $from: String! = "new") {
  events(keys: $keys, from: $from) { offset key payload payloadBase64 publisherId headers }
}"""


async def test_one_query_returns_every_view(log_path: Path) -> None:
    async with served(log_path) as site:
        await site.bus.schemas.register("audit/*", {"type": "object"})
        await site.publish("shop/a", b"1", b"2")
        async with site.bus.subscribe("shop/**", start="beginning", durable="billing") as sub:
            await (await anext(sub)).ack()
            response = await site.query(EVERYTHING)

        assert response.status_code == 200, response.text
        data = response.json()["data"]
        assert "errors" not in response.json()
        assert data["buses"][0]["nodes"] == [{"name": data["nodes"][0]["name"]}]
        assert [(each["key"], each["events"]) for each in data["topics"]] == [("shop/a", 2)]
        assert data["publishers"][0]["sequence"] == 1
        assert data["subscriptions"][0]["keyExprs"] == ["shop/**"]
        assert (data["cursors"][0]["name"], data["cursors"][0]["lag"]) == ("billing", 1)
        assert data["schemas"][0]["schema"]["type"] == "object"
        assert (data["stats"]["published"], data["stats"]["head"]) == (2, 2)
        assert data["stats"]["all"]["log"]["head"] == 2


async def test_only_an_operator_moves_and_deletes_cursors(log_path: Path) -> None:
    async with served(log_path, tokens=TOKENS) as site:
        await site.publish("shop/a", b"1", b"2", b"3")
        async with site.bus.subscribe("shop/**", start="beginning", durable="billing") as sub:
            await (await anext(sub)).ack()
        move = 'mutation { resetCursor(name: "billing", offset: 2) { name offset lag } }'

        rejected = await site.query(move, headers=bearer(SHOP))
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (403, "operate_denied")
        assert rejected.json()["errors"][0]["extensions"]["code"] == "operate_denied"
        (cursor,) = (await site.get("/api/cursors", headers=bearer(ADMIN)))["cursors"]
        assert cursor["offset"] == 1
        moved = await site.query(move, headers=bearer(ADMIN))
        assert moved.json()["data"]["resetCursor"] == {"name": "billing", "offset": 2, "lag": 1}
        for wrong, status, code in (
            ('resetCursor(name: "billing", offset: 4) { name }', 422, "invalid_offset"),
            ('resetCursor(name: "missing", offset: 1) { name }', 404, "unknown_cursor"),
            ('resetCursor(name: "billing", offset: 1.5) { name }', 400, "invalid_document"),
            ('deleteCursor(name: "missing")', 404, "unknown_cursor"),
        ):
            response = await site.query(f"mutation {{ {wrong} }}", headers=bearer(ADMIN))
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
        assert (await site.query('mutation { deleteCursor(name: "billing") }', headers=bearer(SHOP))).status_code == 403
        gone = await site.query('mutation { deleteCursor(name: "billing") }', headers=bearer(ADMIN))
        assert gone.json()["data"] == {"deleteCursor": "billing"}
        assert (await site.get("/api/cursors", headers=bearer(ADMIN)))["cursors"] == []


async def test_an_invalid_request_gets_a_4xx_response(log_path: Path) -> None:
    async with served(log_path) as site:
        headers = {"Content-Type": "application/json"}
        for content, kind, expected in (
            (b"{ nodes { name } }", "application/graphql", (415, "unsupported_content_type")),
            (b"query=x", "application/x-www-form-urlencoded", (415, "unsupported_content_type")),
            (b'{"query": "{ nodes { name } }"}', "text/plain", (415, "unsupported_content_type")),
            (b"", "application/json", (400, "invalid_body")),
            (b"{", "application/json", (400, "invalid_body")),
            (b"[" * 100_000, "application/json", (400, "batch_rejected")),
            (b'[{"query": "{ nodes { name } }"}]', "application/json", (400, "batch_rejected")),
            (b'{"query": 7}', "application/json", (400, "invalid_body")),
            (b'{"query": "{ nodes { name } }", "variables": []}', "application/json", (400, "invalid_body")),
            (b'{"query": "", "variables": null}', "application/json", (400, "invalid_document")),
            (b'{"query": "{"}', "application/json", (400, "invalid_document")),
            (b'{"query": "{ nothing }"}', "application/json", (400, "invalid_document")),
            (b'{"query": "subscription { stats { at } }"}', "application/json", (400, "invalid_operation")),
            (b'{"query": "{ topics(limit: 0) { key } }"}', "application/json", (400, "invalid_limit")),
            (b'{"query": "{ topics(limit: 1001) { key } }"}', "application/json", (400, "invalid_limit")),
        ):
            response = await site.client.post("/graphql", content=content, headers={"Content-Type": kind})
            found = response.status_code, response.json().get("error", {}).get("code")
            assert found == expected, (content[:80], response.text)
        unknown = {"query": "query A { stats { head } }", "operationName": "B"}
        response = await site.client.post("/graphql", json=unknown)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_operation")
        named = {"query": "query A { stats { head } } query B { nodes { isSelf } }", "operationName": "B"}
        assert (await site.client.post("/graphql", json=named)).json()["data"] == {"nodes": [{"isSelf": True}]}
        for method in ("GET", "PUT", "DELETE"):
            response = await site.client.request(method, "/graphql", headers=headers)
            assert response.status_code == 405
        assert "graphiql" not in (await site.client.get("/graphql", headers={"Accept": "text/html"})).text.lower()


# Limits.


def deep(levels: int) -> str:
    return "{ __schema { types { " + "ofType { " * levels + "name" + " }" * (levels + 3)


def fragments(levels: int, twice: str = "...F{0} ...F{0}") -> str:
    """Return fragments that each name the next one twice, so that the expanded size doubles with every line."""
    lines = [f"fragment F{level} on Query {{ {twice.format(level + 1)} }}" for level in range(levels)]
    return f"{{ ...F0 }} {' '.join(lines)} fragment F{levels} on Query {{ stats {{ head }} }}"


TOO_MUCH = {
    "aliases": "{ " + " ".join(f"a{number}: stats {{ head }}" for number in range(ALIASES_MAX + 1)) + " }",
    "tokens": "{ stats { " + "head " * TOKENS_MAX + "} }",
    "doubling fragments": fragments(40),
    "doubling fragments with aliases": fragments(30, "a: stats {{ head }} ...F{0} ...F{0}"),
    "a fragment of itself": "{ ...A } fragment A on Query { ...B } fragment B on Query { ...A }",
    "deep braces": "{ a" * 400,
    "nested introspection": "{ __schema { types { fields { type { fields { type { fields { name } } } } } } } }",
    "introspection by fragment": "{ __schema { types { ...T } } } fragment T on __Type { fields { type { fields { type "
    "{ fields { type { name } } } } } } }",
    "deep introspection": deep(30),
}


@pytest.mark.parametrize("document", TOO_MUCH.values(), ids=TOO_MUCH.keys())
async def test_an_expensive_document_is_rejected_at_once(document: str) -> None:
    before = time.process_time()
    result = await make_schema().execute(document)

    assert result.data is None
    assert result.errors
    assert time.process_time() - before < 20  # doubling takes longer than anybody waits


def test_the_expanded_size_of_a_document_is_computed_without_expanding_it() -> None:
    assert _too_much(parse("{ stats { head } }")) is None
    assert "fields" in str(_too_much(parse(fragments(80))))
    assert _too_much(parse(fragments(5))) is None  # 32 times two fields
    assert "fields" in str(_too_much(parse(fragments(8))))
    wide = "{ " + "stats { head } " * (FIELDS_MAX // 2) + "}"
    assert _too_much(parse(wide)) is None
    assert "fields" in str(_too_much(parse(wide.replace("{ stats", "{ stats { head } stats", 1))))
    assert "deeper" in str(_too_much(parse(deep(30))))
    assert "itself" in str(_too_much(parse(TOO_MUCH["a fragment of itself"])))


async def test_depth_is_limited_by_strawberry_too() -> None:
    nested = "{ buses { nodes { name } } }"
    assert "exceeds" not in str((await make_schema().execute(nested)).errors)
    levels = "buses { " * (DEPTH_MAX + 2) + "bus" + " }" * (DEPTH_MAX + 2)
    result = await make_schema().execute(f"{{ {levels} }}")
    assert any("exceeds maximum operation depth" in str(error) for error in result.errors or ())


async def test_tools_can_introspect_the_schema(log_path: Path) -> None:
    async with served(log_path) as site:
        response = await site.query(get_introspection_query(descriptions=True))

        assert response.status_code == 200, response.text
        names = {each["name"] for each in response.json()["data"]["__schema"]["types"]}
        assert {
            "Node",
            "Bus",
            "Topic",
            "Publisher",
            "OpenSubscription",
            "Cursor",
            "Lease",
            "Schema",
            "Stats",
            "Event",
        } <= names


def test_a_long_is_an_integer_that_json_can_represent() -> None:
    assert [read_long(value) for value in (0, -1, LONG_MAX, "42", "-7")] == [0, -1, LONG_MAX, 42, -7]
    for wrong in (LONG_MAX + 1, 1.5, True, "x", "1e3", "", "9" * 17, None, "٣"):
        with pytest.raises(GraphQLError, match="not an integer"):
            read_long(wrong)


# Subscriptions.


async def test_a_websocket_receives_events_from_any_position_and_misses_none(log_path: Path) -> None:
    async with served(log_path) as site:
        await site.publish("shop/a", *[b"%d" % number for number in range(50)])
        async with graph_socket(site) as socket:
            await subscribe(socket, EVENTS, keys=["shop/**"], **{"from": "11"})
            events = [(await receive(socket))["payload"]["data"]["events"] for _ in range(40)]
            await site.publish("shop/b", b"\xff\xfe", "text")
            await site.publish("audit/b", b"not subscribed")
            await site.publish("shop/c", b"last")
            events += [(await receive(socket))["payload"]["data"]["events"] for _ in range(3)]

        assert [each["offset"] for each in events] == [*range(11, 53), 54]
        assert events[0]["payload"] == "10"
        assert (events[40]["payload"], events[40]["payloadBase64"]) == (None, "//4=")
        assert events[0]["publisherId"].isdigit()


async def test_an_event_that_violates_its_schema_does_not_end_a_subscription(log_path: Path) -> None:
    async with served(log_path) as site:
        await site.publish("shop/a", b"not JSON", b"{}")
        await site.bus.schemas.register("shop/*", {"type": "object"})
        async with graph_socket(site) as socket:
            await subscribe(socket, EVENTS, keys=["shop/**"], **{"from": "beginning"})
            assert (await receive(socket))["payload"]["data"]["events"]["offset"] == 2


async def test_a_bug_is_logged_and_its_details_are_not_sent(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(log_path) as site:
        monkeypatch.setattr(site.bus, "nodes", lambda: 1 // 0)
        response = await site.query("{ nodes { name } }")
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        async with graph_socket(site) as socket:
            await subscribe(socket, "{ nodes { name } }")
            message = await receive(socket)
        assert errors_of(message)[0]["extensions"]["code"] == "internal_error"
        assert "division" not in response.text + json.dumps(message)


async def test_an_ended_subscription_leaves_nothing_behind(log_path: Path) -> None:
    async with served(log_path) as site:
        async with graph_socket(site) as socket:
            for number in ("1", "2"):
                await subscribe(socket, EVENTS, number, keys=["**"])

            async def both() -> bool:
                return len(node_of(site.bus).dispatcher.subscriptions) == 2

            await until(both)
            await socket.send(json.dumps({"id": "1", "type": "complete"}))

            async def one() -> bool:
                return len(node_of(site.bus).dispatcher.subscriptions) == 1

            await until(one)
            await site.publish("a", b"1")
            assert (await receive(socket))["id"] == "2"

        async def none() -> bool:
            return not node_of(site.bus).dispatcher.subscriptions

        await until(none)


async def test_stats_are_sent_every_second_and_only_while_there_is_a_listener(log_path: Path) -> None:
    async with served(log_path) as site:
        async with graph_socket(site) as socket:
            await subscribe(
                socket,
                "subscription { stats { at publishedPerS deliveredPerS commitMs { p50 p99 } deliveryMs { p50 } "
                "stats { published } } }",
            )
            snapshot: dict[str, Any] = (await receive(socket))["payload"]["data"]["stats"]
            assert snapshot["publishedPerS"] == 0
            await site.publish("a", *[b"x"] * 20)
            while not snapshot["publishedPerS"]:
                snapshot = (await receive(socket))["payload"]["data"]["stats"]
            assert snapshot["stats"]["published"] == 20
            assert snapshot["commitMs"]["p99"] > 0
            assert snapshot["deliveryMs"]["p50"] is None
            await socket.send(json.dumps({"id": "1", "type": "complete"}))

            async def has_ended() -> bool:
                return not is_ticking()

            await until(has_ended)


async def test_permissions_and_limits_apply_to_websockets_too(log_path: Path) -> None:
    async with served(log_path, tokens=TOKENS) as site:
        await site.publish("shop/a", b"1")
        with pytest.raises(InvalidStatus) as caught:
            async with graph_socket(site):
                pass
        assert caught.value.response.status_code == 401
        assert json.loads(caught.value.response.body)["error"]["code"] == "token_required"
        async with graph_socket(site, f"?access_token={SHOP}") as socket:
            for document, code in (
                ('subscription { events(keys: ["**"]) { key } }', "read_denied"),
                ('subscription { events(keys: ["audit/x"]) { key } }', "read_denied"),
                ('subscription { events(keys: ["a//b"]) { key } }', "invalid_key"),
                ("subscription { events(keys: []) { key } }", "invalid_keys"),
                ('subscription { events(keys: ["shop/**"], from: "yesterday") { key } }', "invalid_from"),
                ('mutation { deleteCursor(name: "x") }', "operate_denied"),
            ):
                await subscribe(socket, document, code)
                message = await receive(socket)
                assert errors_of(message)[0]["extensions"]["code"] == code, message
                if message["type"] == "next":
                    assert (await receive(socket))["type"] == "complete"
            for name in ("aliases", "doubling fragments", "a fragment of itself", "nested introspection"):
                await subscribe(socket, TOO_MUCH[name], name)
                assert errors_of(await receive(socket)), name
            await subscribe(socket, "", "empty")
            assert errors_of(await receive(socket))
            await subscribe(socket, EVENTS, "good", keys=["shop/**"], **{"from": "beginning"})
            assert (await receive(socket))["payload"]["data"]["events"]["key"] == "shop/a"


@pytest.mark.parametrize("document", [TOO_MUCH["tokens"], TOO_MUCH["deep braces"], "x" * 5000, '"' + "é" * 500])
async def test_an_unreadable_document_ends_only_its_own_socket(log_path: Path, document: str) -> None:
    async with served(log_path) as site, graph_socket(site) as other:
        async with graph_socket(site) as socket:
            await subscribe(socket, document)
            with pytest.raises(ConnectionClosed) as caught:
                while True:
                    assert errors_of(await receive(socket))
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code in (4400, 1008)
        await subscribe(other, EVENTS, keys=["**"], **{"from": "beginning"})
        await site.publish("a", b"1")
        assert (await receive(other))["payload"]["data"]["events"]["key"] == "a"


async def test_a_socket_of_another_protocol_is_rejected(log_path: Path) -> None:
    async with served(log_path) as site:
        for protocols in (None, ["graphql-ws"]):
            with pytest.raises(InvalidStatus) as caught:
                async with connect(site.socket_url, subprotocols=protocols):  # type: ignore[arg-type]
                    pass
            assert caught.value.response.status_code == 400
            assert json.loads(caught.value.response.body)["error"]["code"] == "unsupported_subprotocol"
