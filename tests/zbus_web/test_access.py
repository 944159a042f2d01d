"""Permissions to read, publish and operate over HTTP. A session token reads only its session."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from web_access_support import (
    SECRET,
    Site,
    bearer,
    errors_of,
    frames,
    graph_socket,
    next_data,
    receive,
    served,
    session_token,
    subscribe,
)
from web_support import web
from websockets.exceptions import InvalidStatus

from zbus.errors import KeyInvalid
from zbus.keys import check_expression, matches
from zbus_web.access.authenticator import Permissions
from zbus_web.http.http_errors import HttpError

ADMIN, SHOP, BLIND = "admin-token-0123456789", "shop-token-0123456789", "blind-token-0123456789"
TOKENS = [
    {"name": "admin", "token": ADMIN, "operate": True},
    {"name": "shop", "token": SHOP, "read": ["shop/**"], "publish": ["shop/*/created"]},
    {"name": "blind", "token": BLIND, "read": [], "publish": []},
]
OVERVIEWS = [
    "nodes",
    "buses",
    "subscriptions",
    "cursors",
    "leases",
    "schemas",
    "stats",
    "log-records",
    "asyncapi",
    "live",
]


# `Permissions`.


def test_permissions_read_every_key_within_one_of_their_expressions() -> None:
    permissions = Permissions("shop", read=["shop/**", "audit/*"])

    permissions.check_read(["shop/*/created", "audit/x", "shop"])

    for rejected in ("**", "shop$*/x", "audit/**", "*/created", "@zbus/record/*"):
        with pytest.raises(HttpError) as caught:
            permissions.check_read(["shop/x", rejected])
        assert (caught.value.status, caught.value.code) == (403, "read_denied")


def test_empty_permissions_read_and_publish_nothing() -> None:
    permissions = Permissions("blind")

    assert not permissions.shows("a")
    for rejected in (
        lambda: permissions.check_read(["a"]),
        lambda: permissions.check_publish("a"),
        permissions.check_operate,
    ):
        with pytest.raises(HttpError) as caught:
            rejected()
        assert caught.value.status == 403


def test_an_illegal_key_or_expression_raises_key_invalid() -> None:
    permissions = Permissions("anonymous", read=None, publish=None)

    with pytest.raises(KeyInvalid):
        permissions.check_read(["a//b"])
    with pytest.raises(KeyInvalid):
        permissions.check_publish("a/*")


@pytest.mark.parametrize(
    "expression", ["sessions/a/**", "sessions/*/x", "sessions/$*/**", "sessions/a$*/**", "sessions/**", "sessions/**/x"]
)
def test_session_keys_are_rejected_without_the_token_of_the_session(expression: str) -> None:
    for read in (None, ["**"], ["sessions/**"]):
        with pytest.raises(HttpError) as caught:
            Permissions("any", read=read).check_read([expression])
        assert (caught.value.status, caught.value.code) == (403, "session_token_required")


@pytest.mark.parametrize(
    "expression",
    [
        "**",
        "sessions/*/x",
        "sessions/$*/**",
        "*/a/**",
        "sessions/a$*/**",
        "sessions/**",
        "sessions/b/**",
        "sessions/ab/**",
        "sessions",
        "$*sions/a/x",
        "sessions/%61/x",
        "shop/**",
        "@zbus/record/*",
    ],
)
def test_a_session_token_reads_only_its_session(expression: str) -> None:
    permissions = Permissions("session:a", read=["sessions/a/**"], session="a")

    permissions.check_read(["sessions/a/**", "sessions/a/x", "sessions/a/*/y"])

    with pytest.raises(HttpError) as caught:
        permissions.check_read([expression])
    assert caught.value.status == 403


segments = st.sampled_from(["sessions", "a", "b", "ab", "x", "*", "**", "$*", "a$*", "s$*", "$*a", "@a"])
concrete = st.sampled_from(["sessions", "a", "b", "ab", "x", "@a"])


@settings(max_examples=500)
@given(
    st.lists(segments, min_size=1, max_size=4).map("/".join),
    st.lists(concrete, min_size=1, max_size=4).map("/".join),
)
def test_only_the_session_itself_sees_its_events_for_any_expression(expression: str, key: str) -> None:
    try:
        expression = check_expression(expression)
    except KeyInvalid:
        return
    is_of_a = matches("sessions/a/**", key)
    for permissions in (
        Permissions("session:a", read=["sessions/a/**"], session="a"),
        Permissions("all", read=None),
        Permissions("some", read=["**"]),
    ):
        try:
            permissions.check_read([expression])
        except HttpError:
            continue
        if matches(expression, key) and permissions.shows(key):
            assert is_of_a if permissions.session else not key.startswith("sessions/")


# Over HTTP.


async def test_without_configured_tokens_every_local_client_may_do_everything(log_path: Path) -> None:
    async with served(log_path) as site:
        assert (await site.client.post("/events/shop/x", content=b"1")).status_code == 201
        assert [each["key"] for each in (await site.get("/log"))["events"]] == ["shop/x"]


async def test_with_configured_tokens_a_client_without_one_may_do_nothing(log_path: Path) -> None:
    async with served(log_path, tokens=TOKENS) as site:
        await site.publish("shop/x", b"1")
        paths = ["/events", "/log", "/metrics", *[f"/api/{name}" for name in ("topics", "publishers", *OVERVIEWS)]]
        responses = [await site.client.get(path) for path in paths]
        responses += [
            await site.client.post("/events/shop/x", content=b"2"),
            await site.query("{ nodes { name } }"),
            await site.client.post("/api/cursors/a/reset", json={"offset": 0}),
            await site.client.delete("/api/cursors/a"),
        ]

        for response in responses:
            assert response.status_code == 401, response.url
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert response.json()["error"]["code"] == "token_required"
        assert await site.bus.head() == 1


UNKNOWN = [
    "Bearer wrong",
    f"Bearer {ADMIN[:-1]}",
    f"Bearer {ADMIN}x",
    "Bearer",
    f"Basic {ADMIN}",
    ADMIN,
    "Bearer \xff\xfe",
]


@pytest.mark.parametrize("tokens", [TOKENS, []], ids=["needed", "not needed"])
async def test_an_unknown_token_is_rejected_even_if_none_is_required(log_path: Path, tokens: Any) -> None:
    async with served(log_path, tokens=tokens) as site:
        for header in UNKNOWN:
            response = await site.client.get("/log", headers={"Authorization": header.encode("latin-1")})

            assert response.status_code == 401, header
            assert response.json()["error"]["code"] == "invalid_token"
            assert "bearer" in response.headers["www-authenticate"].lower()


async def test_a_token_is_accepted_in_a_header_a_cookie_or_the_url(log_path: Path) -> None:
    async with served(log_path, tokens=TOKENS) as site:
        for how in ({"headers": bearer(ADMIN)}, {"headers": {"Cookie": f"a=b; zbus_token={ADMIN}"}}):
            assert (await site.client.get("/log", **how)).status_code == 200
        assert (await site.client.get(f"/log?access_token={ADMIN}")).status_code == 200
        # URLs end up in histories and logs, so a token in one authorizes no changes.
        assert (await site.client.post(f"/events/a?access_token={ADMIN}", content=b"")).status_code == 401


async def test_each_token_has_its_own_keys(log_path: Path) -> None:
    async with served(log_path, tokens=TOKENS) as site:
        for key in ("shop/a/created", "audit/x"):
            await site.publish(key, b"1")
        shop = {"headers": bearer(SHOP)}

        assert [each["key"] for each in (await site.get("/log?key=shop/**", **shop))["events"]] == ["shop/a/created"]
        for key in ("**", "audit/x", "*/x"):
            response = await site.client.get("/log", params={"key": key}, **shop)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "read_denied")
        assert (await site.client.post("/events/shop/b/created", content=b"", **shop)).status_code == 201
        response = await site.client.post("/events/shop/b/gone", content=b"", **shop)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "publish_denied")
        assert [each["key"] for each in (await site.get("/api/topics", **shop))["topics"]] == [
            "shop/b/created",
            "shop/a/created",
        ]
        assert (await site.get("/api/topics", headers=bearer(BLIND)))["topics"] == []
        response = await site.client.post("/api/cursors/none/reset", json={"offset": 0}, **shop)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "operate_denied")
        response = await site.client.post("/api/cursors/none/reset", json={"offset": 0}, headers=bearer(ADMIN))
        assert response.status_code == 404


async def test_a_cookie_authorizes_changes_only_with_an_allowed_origin(log_path: Path) -> None:
    async with served(log_path, tokens=TOKENS, allowed_origins=["https://ops.example"]) as site:
        cookie = {"Cookie": f"zbus_token={ADMIN}"}
        own = site.url

        async def publish(**origin: str) -> int:
            return (await site.client.post("/events/a", content=b"", headers=cookie | origin)).status_code

        assert await publish() == 403
        assert await publish(Origin="https://evil.example") == 403
        assert await publish(Origin="null") == 403
        assert await publish(Origin=own) == 201
        assert await publish(Origin="https://ops.example") == 201
        for change in (
            site.client.delete("/api/cursors/a", headers=cookie),
            site.query('mutation { deleteCursor(name: "a") }', headers=cookie),
        ):
            response = await change
            assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_required")
        with pytest.raises(InvalidStatus) as caught:
            async with graph_socket(site, additional_headers=cookie):
                pass
        assert caught.value.response.status_code == 403
        async with graph_socket(site, additional_headers=cookie, origin=own):  # type: ignore[arg-type]
            pass
        assert (await site.client.get("/log", headers=cookie)).status_code == 200  # A read needs no Origin.
        assert await site.bus.head() == 2


# Sessions.

KEYS = ["sessions/a/x", "sessions/ab/x", "sessions/b/x", "sessions/%61/x", "shop/x", "sessions/a/deep/y"]
OF_A = ["sessions/a/x", "sessions/a/deep/y"]


async def _keys_of_log(site: Site, expression: str, headers: dict[str, str]) -> list[str] | int:
    response = await site.client.get("/log", params={"key": expression}, headers=headers)
    if response.status_code != 200:
        return response.status_code
    return [each["key"] for each in response.json()["events"]]


async def _keys_of_stream(site: Site, expression: str, headers: dict[str, str], until: str) -> list[str] | int:
    """Return the keys that a stream sends, up to `until`, or its status if it is rejected."""
    response = await site.client.send(
        site.client.build_request("GET", "/events", params={"key": expression, "from": "beginning"}, headers=headers),
        stream=True,
    )
    status = response.status_code
    await response.aclose()
    if status != 200:
        return status
    found: list[str] = []
    path = f"/events?key={quote(expression)}&from=beginning"
    async with frames(site.client, path, headers=headers) as stream:
        while until not in found:
            found.append((await next_data(stream))["key"])
    return found


async def _keys_of_graph(site: Site, expression: str, headers: dict[str, str], until: str) -> list[str] | int:
    found: list[str] = []
    async with graph_socket(site, additional_headers=headers) as socket:
        await subscribe(
            socket, 'subscription($k: [String!]!) { events(keys: $k, from: "beginning") { key } }', k=[expression]
        )
        while until not in found:
            message = await receive(socket)
            if errors := errors_of(message):
                status: int = errors[0]["extensions"]["status"]
                return status
            found.append(message["payload"]["data"]["events"]["key"])
    return found


async def test_a_session_token_never_reads_another_session_on_any_route(log_path: Path) -> None:
    async with served(log_path, tokens=TOKENS) as site:
        for key in KEYS:
            await site.publish(key, b"1")
        mine = bearer(session_token("a"))

        assert await _keys_of_log(site, "sessions/a/**", mine) == OF_A
        assert await _keys_of_stream(site, "sessions/a/**", mine, OF_A[-1]) == OF_A
        assert await _keys_of_graph(site, "sessions/a/**", mine, OF_A[-1]) == OF_A
        rejected = ["sessions/*/x", "sessions/$*/**", "**", "*/a/**", "sessions/a$*/**", "sessions/b/**", "shop/x"]
        rejected += ["sessions/ab/x", "sessions/%61/x", "sessions/**", "*/*/x", "sessions"]
        for expression in rejected:
            assert await _keys_of_log(site, expression, mine) == 403, expression
            assert await _keys_of_stream(site, expression, mine, "") == 403, expression
            assert await _keys_of_graph(site, expression, mine, "") == 403, expression
        # One allowed expression with one that is not.
        for path in ("/log", "/events"):
            response = await site.client.get(f"{path}?key=sessions/a/x&key=sessions/b/x", headers=mine)
            assert response.status_code == 403
        # Session ids in a URL, encoded once and twice.
        assert (await site.client.get("/log?key=sessions%2Fb%2F%2A%2A", headers=mine)).status_code == 403
        assert (await site.client.get("/log?key=sessions%252Fa%252Fx", headers=mine)).status_code == 403
        once = await site.get("/log?key=sessions%2F%61%2Fx", headers=mine)
        assert [each["key"] for each in once["events"]] == ["sessions/a/x"]


async def test_a_session_token_cannot_see_or_change_the_state_of_the_bus(log_path: Path) -> None:
    async with served(log_path, tokens=TOKENS) as site:
        for key in KEYS:
            await site.publish(key, b"1")
        mine = bearer(session_token("a"))

        topics = await site.get("/api/topics", headers=mine)
        assert sorted(each["key"] for each in topics["topics"]) == sorted(OF_A)
        assert topics["other"] == {"keys": 0, "events": 0, "bytes": 0}
        publishers = await site.get("/api/publishers", headers=mine)
        assert sorted(each["key"] for each in publishers["publishers"]) == sorted(OF_A)
        for path in ("/metrics", *[f"/api/{name}" for name in OVERVIEWS]):
            response = await site.client.get(path, headers=mine)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "session_scope"), path
        graph = await site.query("{ topics { key } publishers { key } }", headers=mine)
        assert {each["key"] for name in ("topics", "publishers") for each in graph.json()["data"][name]} == set(OF_A)
        fields = ["nodes { name }", "buses { bus }", "subscriptions { lag }", "cursors { name }", "leases { node }"]
        for field in [*fields, "schemas { hash }", "stats { published }", "logRecords { id }"]:
            response = await site.query(f"{{ {field} }}", headers=mine)
            assert (response.status_code, response.json()["data"]) == (403, None), field
        async with graph_socket(site, additional_headers=mine) as socket:
            await subscribe(socket, "subscription { stats { at } }")
            assert errors_of(await receive(socket))[0]["extensions"]["code"] == "session_scope"
        for key in ("sessions/a/x", "shop/x"):
            assert (await site.client.post(f"/events/{key}", content=b"", headers=mine)).status_code == 403
        assert (await site.client.delete("/api/cursors/a", headers=mine)).status_code == 403
        assert await site.bus.head() == len(KEYS)


async def test_other_tokens_see_everything_except_sessions(log_path: Path) -> None:
    tokens: Any
    for tokens, headers in ((TOKENS, bearer(ADMIN)), ([], {})):
        async with served(log_path, tokens=tokens) as site:
            start = await site.bus.head()
            for key in (*KEYS, "last"):
                await site.publish(key, b"1")

            for expression, expected in (("**", ["shop/x", "last"]), ("*/a/**", []), ("$*sions/a/**", [])):
                found = (await site.get("/log", params={"key": expression, "after": start}, headers=headers))["events"]
                assert [each["key"] for each in found] == expected
            assert set(await _keys_of_stream(site, "**", headers, "last")) == {"shop/x", "last"}  # type: ignore[arg-type]
            assert set(await _keys_of_graph(site, "**", headers, "last")) == {"shop/x", "last"}  # type: ignore[arg-type]
            for expression in ("sessions/a/**", "sessions/*/x", "sessions/**"):
                assert await _keys_of_log(site, expression, headers) == 403
                assert await _keys_of_stream(site, expression, headers, "") == 403
                assert await _keys_of_graph(site, expression, headers, "") == 403
            mine = bearer(session_token("a"))
            async with (
                frames(site.client, "/events?key=sessions/a/**", headers=mine),
                frames(site.client, "/events", headers=headers),
            ):
                shown = json.dumps(
                    [
                        await site.get(f"/api/{name}", headers=headers)
                        for name in ("topics", "publishers", *OVERVIEWS)
                        if name != "live"
                    ]
                )
                async with frames(site.client, "/api/live", headers=headers) as live:
                    shown += json.dumps(await next_data(live))
            assert "sessions/" not in shown
            assert '"key_exprs": ["**"]' in shown


def _tampered(token: str) -> list[str]:
    version, expires, session, signature = token.split(".")
    other = base64.urlsafe_b64encode(b"b").decode().rstrip("=")
    later = str(int(expires) + 1000)
    return [
        ".".join((version, expires, other, signature)),
        ".".join((version, later, session, signature)),
        ".".join(("zs2", expires, session, signature)),
        ".".join((version, expires, session, signature[:-1] + ("A" if signature[-1] != "A" else "B"))),
        ".".join((version, expires, session, "")),
        ".".join((version, expires, session)),
        token[:-1],
        token + "A",
        token.upper(),
    ]


async def test_an_expired_tampered_or_foreign_session_token_is_rejected(log_path: Path) -> None:
    async with served(log_path) as site:
        await site.publish("sessions/a/x", b"1")
        good = session_token("a")
        brief = session_token("a", ttl_s=0.001)
        await asyncio.sleep(0.01)
        assert await _keys_of_log(site, "sessions/a/**", bearer(good)) == ["sessions/a/x"]

        bad = [*_tampered(good), brief, session_token("a", secret=SECRET + "x")]
        for token in bad:
            for path in ("/log?key=sessions/a/**", "/events?key=sessions/a/**", "/api/topics"):
                response = await site.client.get(path, headers=bearer(token))
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_token"), token
            with pytest.raises(InvalidStatus) as caught:
                async with graph_socket(site, additional_headers=bearer(token)):
                    pass
            assert caught.value.response.status_code == 401


async def test_without_a_secret_every_session_token_is_rejected(log_path: Path) -> None:
    async with served(log_path, bus={"session_secret": None}) as site:
        await site.publish("sessions/a/x", b"1")

        response = await site.client.get("/log?key=sessions/a/**", headers=bearer(session_token("a")))

        assert response.status_code == 401
        assert (await site.client.get("/log?key=sessions/a/**")).status_code == 403


async def test_a_stream_ends_when_its_token_expires_and_a_new_token_resumes_it(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr("zbus_web.access.permissions.time", lambda: now)
    async with web(log_path, bus={"session_secret": SECRET}, keepalive_s=0.2) as site:
        token = session_token("a", ttl_s=3600)
        async with (
            site.stream("?key=sessions/a/**", Authorization=f"Bearer {token}") as busy,
            site.stream("?key=sessions/a/rare", Authorization=f"Bearer {token}") as idle,
        ):
            (first,) = await site.publish("sessions/a/x", b"1")
            assert await busy.offsets(1) == [first]
            now += 3601
            (second,) = await site.publish("sessions/a/x", b"2")

            assert (await busy.event("end"))["code"] == "token_expired"
            assert (await idle.event("end"))["code"] == "token_expired"
            assert await busy.frame() is None

        now -= 3601
        fresh = {"Authorization": f"Bearer {session_token('a')}", "Last-Event-ID": str(busy.last_id)}
        async with site.stream("?key=sessions/a/**", **fresh) as again:
            assert await again.offsets(1) == [second]
