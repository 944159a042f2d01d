"""Request admission: hosts, origins, rates, connections and sizes. Every rejection is counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from web_access_support import (
    WAIT_S,
    Site,
    bearer,
    frames,
    graph_socket,
    next_data,
    receive,
    served,
    session_token,
    subscribe,
    until,
)
from websockets.exceptions import ConnectionClosed, InvalidStatus

from zbus.errors import ConfigInvalid
from zbus_web.access.admission import _network
from zbus_web.access.origins import Origins
from zbus_web.http.http_errors import HttpError
from zbus_web.http.rates import Rates
from zbus_web.http.settings import WebSettings, load_settings

TOKEN = "a-token-of-another-7"


# `Origins`.

HOSTS = {
    "localhost": True,
    "localhost:80": True,
    "LOCALHOST:7480": True,
    "localhost.": True,
    "127.0.0.1:1": True,
    "[::1]:9": True,
    "[::1]": True,
    "10.0.0.7:7480": True,  # the address that it listens on
    "bus.example": True,
    "bus.example:99": True,
    "narrow.example:7480": True,
    "narrow.example": False,
    "narrow.example:7481": False,
    "evil.example": False,
    "localhost.evil.example": False,
    "evil.example:localhost": False,
    "localhost@evil.example": False,
    "evil.example@localhost": False,
    "127.0.0.1.evil.example": False,
    "127.0.0.2": False,
    "2130706433": False,
    "::1": False,
    "[::1": False,
    "localhost:": True,
    "localhost:x": False,
    "localhost:99999": False,
    "localhost/x": False,
    " localhost": False,
    "": False,
}


@pytest.mark.parametrize(("host", "may"), HOSTS.items())
def test_a_request_must_name_a_known_host(host: str, may: bool) -> None:
    origins = Origins(WebSettings(host="10.0.0.7", allowed_hosts=["bus.example", "narrow.example:7480"]))

    for _ in range(2):  # The second check uses the cache.
        if may:
            origins.check(host, None)
            continue
        with pytest.raises(HttpError) as caught:
            origins.check(host, None)
        assert (caught.value.status, caught.value.code) == (421, "host_rejected")


def test_a_request_must_name_one_host_and_not_the_wildcard_address() -> None:
    origins = Origins(WebSettings(host="0.0.0.0"))

    for named in ("", "localhost, evil.example", "localhost, localhost", "0.0.0.0", "0.0.0.0:7480"):
        with pytest.raises(HttpError):
            origins.check(named, None)


ORIGINS = {
    ("localhost:7480", "http://localhost:7480"): True,
    ("localhost:7480", "HTTP://LOCALHOST:7480"): True,
    ("localhost", "http://localhost"): True,
    ("localhost", "https://localhost"): True,  # A proxy terminates TLS.
    ("localhost:443", "https://localhost"): True,
    ("[::1]:7480", "http://[::1]:7480"): True,
    ("localhost:7480", "https://ops.example"): True,
    ("localhost:7480", "https://ops.example:443"): True,
    ("localhost:7480", "http://ops.example"): False,
    ("localhost:7480", "https://ops.example:444"): False,
    ("localhost:7480", "http://localhost"): False,
    ("localhost:7480", "http://localhost:7481"): False,
    ("localhost:7480", "http://127.0.0.1:7480"): False,
    ("localhost:7480", "http://evil.example"): False,
    ("localhost:7480", "http://localhost:7480.evil.example"): False,
    ("localhost:7480", "http://localhost:7480@evil.example"): False,
    ("localhost:7480", "null"): False,
    ("localhost:7480", ""): False,
    ("localhost:7480", "file://"): False,
    ("localhost:7480", "http://localhost:7480, http://evil.example"): False,
    ("localhost:7480", "chrome-extension://localhost:7480"): False,
}


@pytest.mark.parametrize(("named", "may"), ORIGINS.items())
def test_a_page_may_use_its_own_server_or_one_that_allows_its_origin(named: tuple[str, str], may: bool) -> None:
    origins = Origins(WebSettings(allowed_origins=["https://ops.example"]))

    for _ in range(2):
        if may:
            origins.check(named[0], named[1])
            continue
        with pytest.raises(HttpError) as caught:
            origins.check(named[0], named[1])
        assert (caught.value.status, caught.value.code) == (403, "origin_rejected")


def test_settings_with_an_invalid_host_or_origin_are_rejected() -> None:
    for wrong in (
        {"allowed_origins": ["ops.example"]},
        {"allowed_origins": ["*"]},
        {"allowed_hosts": ["http://x"]},
        {"allowed_hosts": ["a b"]},
    ):
        with pytest.raises(ConfigInvalid, match="such as"):
            Origins(WebSettings(**wrong))


# `Rates`.


def test_a_client_that_waits_may_send_again_and_clients_are_independent() -> None:
    now = [0.0]
    rates = Rates(10, 3, clock=lambda: now[0])

    assert [rates.take("a") for _ in range(3)] == [0, 0, 0]
    assert rates.take("a") == pytest.approx(0.1)
    assert rates.take("b") == 0
    now[0] += 0.1
    assert rates.take("a") == 0
    assert rates.take("a") > 0
    now[0] += 1000
    assert [rates.take("a") > 0 for _ in range(4)] == [False, False, False, True]  # A bucket holds at most one burst.


def test_many_clients_take_bounded_memory() -> None:
    rates = Rates(1, 1, clients_max=100)

    for number in range(1000):
        rates.take(str(number))

    assert len(rates) == 100
    assert rates.take("999") > 0  # The latest clients are kept.


def test_an_ipv6_network_is_one_client() -> None:
    assert _network("2001:db8::1") == _network("2001:db8::ffff:2") != _network("2001:db8:0:1::1")
    assert _network("::ffff:10.0.0.7") == "10.0.0.7"
    assert (_network("10.0.0.7"), _network("::1"), _network("strange")) == ("10.0.0.7", "::1", "strange")


# Over HTTP.


async def _rejected(site: Site) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in (await site.client.get("/metrics")).text.splitlines():
        if line.startswith("zbus_web_rejected_total{"):
            name, _, number = line.partition("} ")
            found[name.partition('reason="')[2].rstrip('"')] = int(float(number))
    return found


async def test_hosts_and_origins_are_checked_on_every_route_and_protocol(log_path: Path) -> None:
    async with served(log_path) as site:
        paths = ["/", "/events", "/log", "/metrics", "/healthz", "/api/stats", "/api/live", "/graphql", "/nothing"]
        ways = [("GET", path) for path in paths] + [("POST", path) for path in ("/events/a", "/graphql")]
        ways += [(method, "/log") for method in ("DELETE", "OPTIONS", "HEAD", "PUT")]
        for method, path in ways:
            for headers, status in (({"Host": "evil.example"}, 421), ({"Origin": "http://evil.example"}, 403)):
                response = await site.client.request(method, path, headers=headers)
                assert response.status_code == status, (method, path)
                assert not [name for name in response.headers if name.startswith("access-control")]
        for options, status in (
            ({"additional_headers": {"Origin": "http://evil.example"}}, 403),
            ({"additional_headers": {"Origin": "null"}}, 403),
        ):
            with pytest.raises(InvalidStatus) as caught:
                async with graph_socket(site, **options):
                    pass
            assert caught.value.response.status_code == status
            assert json.loads(caught.value.response.body)["error"]["code"] == "origin_rejected"

        rejected = await _rejected(site)
        assert rejected == {"host_rejected": len(ways), "origin_rejected": len(ways) + 2}
        assert await site.bus.head() == 0


async def test_a_raw_request_with_no_host_or_two_is_rejected(log_path: Path) -> None:
    async with served(log_path) as site:
        for lines in (b"GET /healthz HTTP/1.0", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example"):
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(lines + b"\r\nConnection: close\r\n\r\n")
            response = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            await writer.wait_closed()
            assert response.split()[1] in (b"400", b"421"), response


async def test_no_response_lets_pages_of_other_origins_read_it(log_path: Path) -> None:
    async with served(log_path, allowed_origins=["https://ops.example"]) as site:
        for origin in (site.url, "https://ops.example"):
            for method, path in (("GET", "/log"), ("OPTIONS", "/log"), ("POST", "/events/a"), ("GET", "/api/stats")):
                response = await site.client.request(method, path, headers={"Origin": origin})
                assert response.status_code in (200, 201, 405)
                assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_rate_limited_client_receives_retry_after(log_path: Path) -> None:
    tokens = [{"name": "one", "token": TOKEN}, {"name": "two", "token": TOKEN + "x"}]
    async with served(log_path, tokens=tokens, requests_per_s=0.001, requests_burst=3) as site:
        responses = [await site.client.get("/healthz", headers=bearer(TOKEN)) for _ in range(4)]

        assert [each.status_code for each in responses] == [200, 200, 200, 429]
        assert int(responses[-1].headers["retry-after"]) > 100
        assert responses[-1].json()["error"]["code"] == "rate_limited"
        # Another token is another client. Guessed tokens count for the address.
        assert (await site.client.get("/healthz", headers=bearer(TOKEN + "x"))).status_code == 200
        guesses = [await site.client.get("/log", headers=bearer(f"guess-{number}")) for number in range(4)]
        assert [each.status_code for each in guesses] == [401, 401, 401, 429]


async def test_connections_are_limited_in_total_and_per_client_and_are_released(log_path: Path) -> None:
    tokens = [{"name": "one", "token": TOKEN}, {"name": "two", "token": TOKEN + "x"}]
    one, two = bearer(TOKEN), bearer(TOKEN + "x")
    async with served(log_path, tokens=tokens, connections_max=4, connections_per_client_max=2) as site:
        async with AsyncExitStack() as open_streams:
            for headers in (one, one):
                await open_streams.enter_async_context(frames(site.client, "/events", headers=headers))
            response = await site.client.get("/healthz", headers=one)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "client_connections_full")
            assert response.headers["retry-after"] == "1"
            assert (await site.client.get("/healthz", headers=two)).status_code == 200
            for headers in (two, two):
                await open_streams.enter_async_context(frames(site.client, "/events", headers=headers))
            response = await site.client.get("/healthz", headers=bearer(session_token("a")))
            assert (response.status_code, response.json()["error"]["code"]) == (503, "connections_full")
            with pytest.raises(InvalidStatus) as caught:
                async with graph_socket(site, additional_headers=two):
                    pass
            assert caught.value.response.status_code == 503

        async def is_free() -> bool:
            return (await site.client.get("/healthz", headers=one)).status_code == 200

        await until(is_free)
        async with graph_socket(site, additional_headers=two), graph_socket(site, additional_headers=two):
            response = await site.client.get("/healthz", headers=two)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "client_connections_full")


async def _pieces(number: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(number):
        yield b"x" * size


async def test_a_large_body_is_rejected_with_or_without_a_content_length(log_path: Path) -> None:
    async with served(log_path, body_bytes_max=1000) as site:
        posts: list[tuple[str, dict[str, str]]] = [
            ("/events/a", {}),
            ("/graphql", {"Content-Type": "application/json"}),
            ("/api/cursors/a/reset", {}),
        ]
        for path, headers in posts:
            bodies: list[Any] = [b"x" * 1001, _pieces(11, 100), _pieces(1, 100_000), _pieces(50, 100_000)]
            for body in bodies:
                try:
                    response = await site.client.post(path, content=body, headers=headers)
                except httpx.TransportError:
                    assert body is bodies[-1]  # The server closed the connection during the upload.
                    continue
                assert response.status_code == 413, response.text
                assert response.json()["error"]["code"] in ("body_too_large", "event_too_large")
        assert await site.bus.head() == 0
        for body in (b"x" * 1000, _pieces(10, 100)):
            assert (await site.client.post("/events/a", content=body)).status_code == 201
        assert await site.bus.head() == 2
        assert (await _rejected(site))["body_too_large"] >= 6


async def test_websocket_messages_have_the_limits_of_requests(log_path: Path) -> None:
    async with served(log_path, body_bytes_max=1000, requests_per_s=0.001, requests_burst=20) as site:
        async with graph_socket(site) as socket:
            await subscribe(socket, "{ topics { key } }" + " " * 2000)
            with pytest.raises(ConnectionClosed) as caught:
                await receive(socket)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1009
        async with graph_socket(site) as socket:
            with pytest.raises(ConnectionClosed) as caught:
                for _ in range(30):
                    await socket.send(json.dumps({"type": "ping"}))
                while True:
                    await receive(socket)
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1008, "rate_limited")


async def test_open_streams_continue_while_others_are_rejected(log_path: Path) -> None:
    async with served(log_path, requests_per_s=0.001, requests_burst=2) as site:
        async with frames(site.client, "/events") as stream:
            await anext(stream)
            statuses = [(await site.client.get("/log")).status_code for _ in range(4)]
            assert statuses == [200, 429, 429, 429]
            await site.publish("a/b", b"1")
            assert (await next_data(stream))["key"] == "a/b"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hosts", "allowed_hosts"),
        ("origins", "allowed_origins"),
        ("feed_queue_events", "stream_queue_events"),
        ("feed_keys_max", "stream_keys_max"),
    ],
)
def test_a_setting_under_a_retired_name_is_refused_with_its_new_name(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zbus.toml").write_text(f'[web]\n{old} = ["bus.example"]\n')

    for make in (lambda: WebSettings(**{old: ["x.example"]}), lambda: load_settings(tmp_path / "zbus.toml")):
        with pytest.raises(ConfigInvalid) as caught:
            make()
        assert str(caught.value) == f"{old}: renamed: use {new}"
    monkeypatch.setenv(f"ZBUS_WEB_{old.upper()}", "x.example")
    with pytest.raises(ConfigInvalid) as caught:
        WebSettings()
    assert str(caught.value) == f"ZBUS_WEB_{old.upper()}: renamed: use ZBUS_WEB_{new.upper()}"
