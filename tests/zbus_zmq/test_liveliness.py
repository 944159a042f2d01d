"""Discovery by Zenoh liveliness: nodes on other hosts, seen and missed at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zenoh
from free_ports import free_port
from zmq_support import Collector, Replies, children, until

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid
from zbus.observe.counters import Counters
from zbus_zmq.address.options import read_options
from zbus_zmq.fabric import open_fabric
from zbus_zmq.find.discovery import NodeRecord
from zbus_zmq.find.liveliness import LivelinessDiscovery


@pytest.fixture
def port() -> int:
    return free_port()


def router_config(port: int) -> zenoh.Config:
    config = zenoh.Config()
    for path, value in (
        ("mode", '"router"'),
        ("listen/endpoints", f'["tcp/127.0.0.1:{port}"]'),
        ("scouting/multicast/enabled", "false"),
        ("scouting/delay", "0"),
    ):
        config.insert_json5(path, value)
    return config


@pytest.fixture
def router(port: int) -> Iterator[str]:
    """A Zenoh router, and the URL of a node that joins by it."""
    session = zenoh.open(router_config(port))
    yield f"zmq://?discovery=zenoh&zenoh_mode=client&zenoh_connect=tcp/127.0.0.1:{port}"
    session.close()  # type: ignore[no-untyped-call]


@contextmanager
def opened(*urls: str) -> Iterator[list[Any]]:
    made: list[Any] = []
    try:
        for url in urls:
            made.append(open_fabric(BusConfig(), url))
        yield made
    finally:
        for each in made:
            each.close()


def test_nodes_that_meet_at_a_router_exchange_events_and_requests(router: str) -> None:
    collector, replies = Collector(), Replies()
    with opened(router, router, router) as (one, other, third):
        other.listen(["a/**"], collector)
        assert until(lambda: one.ready("a/b"))
        one.send([("a/b", b"x")])
        third.serve(["svc/é", *[f"svc/{number}" for number in range(500)]], _yes)
        one.request("svc/é", b"", replies, 5.0)

        assert collector.wait(1) == [b"x"]
        assert replies.wait() == [b"yes"]
        third.serve([], _yes)
        assert until(lambda: _asks_in_vain(one, "svc/7"))


def test_two_peers_find_each_other_without_a_router(port: int) -> None:
    collector = Collector()
    urls = [
        f"zmq://?discovery=zenoh&zenoh_listen=tcp/127.0.0.1:{port}",
        f"zmq://?discovery=zenoh&zenoh_connect=tcp/127.0.0.1:{port}",
    ]
    with opened(*urls) as (one, other):
        one.listen(["**"], collector)
        assert until(lambda: other.ready("a"))
        other.send([("a", b"x")])

        assert collector.wait(1) == [b"x"]


def test_the_first_frames_of_a_new_process_arrive_and_its_death_is_seen_at_once(router: str) -> None:
    collector = Collector()
    with opened(router) as (here,), children() as start:
        here.listen(["a/**"], collector)
        for number in range(2):
            child = start("publish", router, "a/b")
            child.say(f"life {number}")
            assert len(collector.wait(number + 1)) == number + 1
            before = time.monotonic()
            child.kill()
            assert until(lambda: here.diagnostics()["connections"] == 0)
            assert time.monotonic() - before < 8.0


def test_a_router_that_is_away_at_first_is_tried_again_and_the_trouble_is_seen(port: int) -> None:
    url = f"zmq://?discovery=zenoh&zenoh_mode=client&zenoh_connect=tcp/127.0.0.1:{port}"
    collector = Collector()
    with opened(url, url) as (one, other):
        assert until(lambda: one.diagnostics()["discovery"]["problem"] != "")
        assert one.diagnostics()["counts"]["liveliness_failed"] >= 1
        one.listen(["**"], collector)
        session = zenoh.open(router_config(port))
        try:
            assert until(lambda: other.ready("a"))
            other.send([("a", b"x")])
            assert collector.wait(1) == [b"x"]
            assert until(lambda: one.diagnostics()["discovery"]["problem"] == "")
        finally:
            session.close()  # type: ignore[no-untyped-call]


def test_a_session_that_cannot_be_opened_is_tried_again_after_pauses_that_grow(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def refuse(config: zenoh.Config) -> zenoh.Session:
        tried.append(time.monotonic())
        raise zenoh.ZError("no")

    monkeypatch.setattr("zbus_zmq.find.liveliness.zenoh.open", refuse)
    options = read_options(BusConfig(), f"zmq://?discovery=zenoh&zenoh_connect=tcp/127.0.0.1:{port}")
    discovery = LivelinessDiscovery(options, Counters("test"), None)
    try:
        assert until(lambda: len(tried) >= 5)
        discovery.announce(NodeRecord(node="aa"))  # what wakes the thread does not shorten the pause
        assert until(lambda: len(tried) >= 6)
    finally:
        before = time.monotonic()
        discovery.close()
    pauses = [after - at for at, after in itertools.pairwise(tried)]

    assert all(pause >= 0.99 * 0.05 * 2**turn for turn, pause in enumerate(pauses))
    assert "no" in discovery.diagnostics()["problem"]
    assert time.monotonic() - before < 3.0  # in the middle of a pause


def test_a_router_that_restarts_is_joined_again(port: int) -> None:
    url = f"zmq://?discovery=zenoh&zenoh_mode=client&zenoh_connect=tcp/127.0.0.1:{port}"
    collector = Collector()
    session = zenoh.open(router_config(port))
    with opened(url) as (one,):
        one.listen(["**"], collector)
        session.close()  # type: ignore[no-untyped-call]
        session = zenoh.open(router_config(port))
        try:
            with opened(url) as (late,):
                assert until(lambda: late.ready("a"))
                late.send([("a", b"x")])
                assert collector.wait(1) == [b"x"]
        finally:
            session.close()  # type: ignore[no-untyped-call]


def test_a_session_of_the_application_is_used_and_not_closed(router: str, port: int) -> None:
    session = zenoh.open(_client(port))
    try:
        with opened(router) as (one,):
            lent = open_fabric(BusConfig(), "zmq://?discovery=zenoh", session)
            try:
                one.listen(["**"], Collector())
                assert until(lambda: lent.ready("a"))
            finally:
                lent.close()
            assert not session.is_closed()
            assert until(lambda: one.diagnostics()["connections"] == 0)
    finally:
        session.close()  # type: ignore[no-untyped-call]


def test_nodes_of_another_realm_are_not_seen(router: str) -> None:
    with opened(f"{router}&realm=one", f"{router}&realm=two", f"{router}&realm=two") as (one, two, also_two):
        assert until(lambda: two.diagnostics()["connections"] == 1 and also_two.diagnostics()["connections"] == 1)
        assert one.diagnostics()["connections"] == 0


def test_tokens_that_are_none_of_ours_are_counted_and_passed_over(router: str, port: int) -> None:
    session = zenoh.open(_client(port))
    try:
        root = "zbus-zmq/default"
        tokens = [
            session.liveliness().declare_token(f"{root}/{tail}")
            for tail in ("x", "x/node/!!!", "y/node/e30", "z/answers/_w", "w/other/AA", "v/node/" + "A" * 100)
        ]
        with opened(router, router) as (one, other):
            other.listen(["**"], Collector())
            assert until(lambda: one.ready("a"))
            assert one.diagnostics()["counts"]["liveliness_token_invalid"] >= 1
            assert until(lambda: one.diagnostics()["connections"] == 1)
        for token in tokens:
            token.undeclare()  # type: ignore[no-untyped-call]
    finally:
        session.close()  # type: ignore[no-untyped-call]


def test_discovery_by_zenoh_needs_an_endpoint() -> None:
    with pytest.raises(ConfigInvalid, match="zenoh_listen"):
        open_fabric(BusConfig(), "zmq://?discovery=zenoh")


def _client(port: int) -> zenoh.Config:
    config = zenoh.Config()
    for path, value in (
        ("mode", '"client"'),
        ("connect/endpoints", f'["tcp/127.0.0.1:{port}"]'),
        ("scouting/multicast/enabled", "false"),
    ):
        config.insert_json5(path, value)
    return config


def _yes(request: Any) -> None:
    request.reply(b"yes")
    request.close()


def _asks_in_vain(fabric: Any, key: str) -> bool:
    replies = Replies()
    fabric.request(key, b"", replies, 5.0)
    return replies.wait() == []
