"""A log read over a transport: all events of a range, in order and exactly as stored, or an error."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cold_support import offload
from log_support import raw
from mesh_support import WIRES, Mesh, Nats, Node, ZenohPeers, Zmq, mesh_of, until
from remote_support import free_url, node_at, stored, trim

from zbus import blocking
from zbus.errors import ConfigInvalid, KeyInvalid, LogError, LogTrimmed, TransportError
from zbus.event import Event
from zbus.mesh.log_service import log_key
from zbus.ports.log import Span
from zbus.wire.envelope import encode
from zbus_spark import remote
from zbus_spark.remote import RemoteLog

TIMEOUT_S = 10.0


@pytest.fixture
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mesh]:
    with mesh_of(tmp_path, getattr(request, "param", ZenohPeers)) as found:
        yield found


@pytest.fixture
def url() -> Iterator[str]:
    with free_url() as found:
        yield found


def url_of(node: Node) -> str:
    """Return the URL of a node."""
    if isinstance(node.wire, ZenohPeers):
        return str(node.wire.settings(node.name)["listen"][0]).replace("tcp/", "zenoh://")
    return node.wire.url


def read(url: str, span: Span, *keys: str, origin: int | None = None) -> list[Event]:
    with RemoteLog(url, origin, TIMEOUT_S) as log:
        return [event for page in log.pages(span, keys) for event in page]


@pytest.mark.parametrize("mesh", WIRES, ids=[each.name for each in WIRES], indirect=True)
def test_a_log_is_read_over_every_transport_exactly_as_it_is_stored(mesh: Mesh) -> None:
    node = mesh.node("a")
    for key in ("shop/orders", "audit/x", "shop/orders"):
        node.call("publish", key, 5_000)

    with RemoteLog(url_of(node), None, TIMEOUT_S) as log:
        origin, head, low_water = log.describe()
        events = [event for page in log.pages(Span(0, head)) for event in page]

    assert (head, low_water) == (15_000, 0)
    assert f"{origin:x}" == node.call("diagnostics")["origin"]
    assert events == stored(node.log or "")
    assert [event.offset for event in events] == list(range(1, 15_001))


@pytest.mark.parametrize("setting", ["COLD_DIR", "RETAIN_AGE_S", "KEEP", "SESSION_SECRET_FILE", "CONFIG"])
def test_a_log_is_read_whatever_the_settings_of_a_log_of_this_application_are(
    setting: str, url: str, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish(b"o")
        monkeypatch.setenv(f"ZBUS_{setting}", "7")

        assert [event.payload for event in read(url, Span(0, 1))] == [b"o"]


def test_ranges_keys_and_times_are_those_of_the_log(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        orders, audit = bus.publisher("shop/orders"), bus.publisher("audit/x")
        for _ in range(3):
            orders.publish_many([b"o"] * 3_000, headers={"tenant": "x"})
            audit.publish_many([b"a"] * 10)
        everything = stored(log_path)

        assert read(url, Span(2_000, 7_000)) == everything[2_000:7_000]
        assert read(url, Span(2_000, 7_000), "audit/*", "none/**") == stored(log_path, "audit/*")[:20]
        assert read(url, Span(9_030, 9_030)) == []
        assert read(url, Span(0, None)) == everything
        half = everything[4_000].published_at
        early, late = read(url, Span(0, 9_030, None, half - 1)), read(url, Span(0, 9_030, half, None))
        assert early == [event for event in everything if event.published_at < half]
        assert late == [event for event in everything if event.published_at >= half]
        with pytest.raises(KeyInvalid):
            read(url, Span(0, 10), "shop//orders")


def test_events_that_a_node_keeps_of_others_are_read_with_their_offsets(mesh: Mesh) -> None:
    sink = mesh.node("sink", keep=["**"])
    publisher = mesh.node("a")
    publisher.call("publish", "shop/orders", 1_000)
    sink.call("publish", "sink/own", 10)
    until(lambda: sink.call("head") == 1_010, 20, "everything at the sink")
    origin = int(sink.call("diagnostics")["origin"], 16)

    events = read(url_of(sink), Span(0, 1_010), origin=origin)

    assert events == stored(sink.log or "")
    assert len({event.publisher_id for event in events}) == 2


def test_if_several_nodes_have_a_log_one_must_be_named_and_the_error_lists_them(mesh: Mesh) -> None:
    first, second = mesh.node("a"), mesh.node("b")
    first.call("publish", "shop/orders", 10)
    second.call("publish", "audit/x", 20)
    origins = {str(each.call("diagnostics")["origin"]): each for each in (first, second)}

    def refusal() -> str:
        with RemoteLog(url_of(first), None, TIMEOUT_S) as log:
            try:
                log.describe()
            except ConfigInvalid as error:
                return str(error)
            return ""

    def lists_all() -> bool:
        text = refusal()
        return all(origin in text for origin in origins)

    until(lists_all, 20, "a refusal that lists both")  # either node may reply, and knows of the other a moment later
    for origin, node in origins.items():
        events = read(url_of(first), Span(0, node.call("head")), origin=int(origin, 16))
        assert events == stored(node.log or "")


@pytest.mark.parametrize("mesh", [ZenohPeers, Nats, Zmq], ids=["zenoh", "nats", "zmq"], indirect=True)
def test_a_node_that_is_killed_and_comes_back_is_read_to_the_end(mesh: Mesh) -> None:
    node = mesh.node("a")
    node.call("publish", "shop/orders", 60_000)

    with RemoteLog(url_of(node), None, 3.0) as log:
        pages = log.pages(Span(0, 60_000))
        events = next(pages)
        node.kill()
        back = threading.Timer(1.0, node.start)
        back.start()
        events += [event for page in pages for event in page]
        back.join()

    assert [event.offset for event in events] == list(range(1, 60_001))
    assert events == stored(node.log or "")


def test_a_node_that_does_not_return_is_an_error_with_the_last_offset(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "AWAY_S", 1.0)
    node = mesh.node("a")
    node.call("publish", "shop/orders", 60_000)

    with RemoteLog(url_of(node), None, TIMEOUT_S) as log:
        pages = log.pages(Span(0, 60_000))
        came = len(next(pages))
        node.kill()
        with pytest.raises(TransportError) as caught:
            while True:
                came += len(next(pages))

    assert f"nothing was read after offset {came};" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    assert came < 60_000


def test_an_unreachable_node_is_an_error_that_names_the_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CONNECT_S", 0.5)

    with pytest.raises(TransportError, match=url), RemoteLog(url, None, TIMEOUT_S):
        pass


def test_nodes_without_that_log_are_an_error_that_names_the_url(
    url: str, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CONNECT_S", 0.5)
    listening = {"mode": "peer", "listen": [url.replace("zenoh://", "tcp/")]}

    with blocking.open(**listening), RemoteLog(url, None, TIMEOUT_S) as log:
        with pytest.raises(TransportError, match=f"no node with a log was found at {url}"):
            log.describe()
    for path in (None, log_path):
        with blocking.open(path, **listening), RemoteLog(url, 0xABC, TIMEOUT_S) as log:
            with pytest.raises(TransportError, match=f"the log abc is not served at {url}"):
                log.describe()


@pytest.mark.parametrize("url", ["zenoh://", "carrier-pigeon://roof"])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigInvalid), RemoteLog(url, None, TIMEOUT_S):
        pass


@pytest.mark.parametrize("mesh", [Nats], ids=["nats"], indirect=True)
def test_a_transport_that_only_carries_events_is_rejected(mesh: Mesh) -> None:
    with pytest.raises(ConfigInvalid, match="no nodes whose log can be requested"):
        read(mesh.wire.url.replace("nats://", "nats+raw://"), Span(0, 1))


def test_a_partly_removed_range_is_an_error(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish_many([b"x"] * 100)
        trim(bus, 40)

        with pytest.raises(LogTrimmed) as caught:
            read(url, Span(10, 100))
        assert (caught.value.after, caught.value.low_water) == (10, 60)
        with pytest.raises(LogTrimmed):
            read(url, Span(10, 50))
        assert [event.offset for event in read(url, Span(60, 100))] == list(range(61, 101))


def test_events_in_the_cold_tier_are_served_too(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish_many([b"x"] * 100)
        bus.publisher("audit/x").publish_many([b"y"] * 100, headers={"tenant": "x"})
        everything = stored(log_path)
        offload(log_path, 50, 120)
        trim(bus, 80)

        assert read(url, Span(0, 200)) == everything
        assert read(url, Span(30, 130), "audit/**") == everything[100:130]
        early = everything[110].published_at
        assert read(url, Span(0, 200, None, early)) == [event for event in everything if event.published_at <= early]


def test_a_range_that_is_trimmed_while_it_is_read_is_an_error_and_never_fewer_rows(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish_many([b"x"] * 60_000)
        with RemoteLog(url, None, TIMEOUT_S) as log:
            pages = log.pages(Span(0, 60_000))
            came = [event.offset for event in next(pages)]
            trim(bus, 100)
            with pytest.raises(LogTrimmed):
                while True:
                    came += [event.offset for event in next(pages)]
    assert came == list(range(1, len(came) + 1))


def test_if_data_loss_is_allowed_a_read_continues_after_a_trim(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish_many([b"x"] * 60_000)
        with RemoteLog(url, None, TIMEOUT_S) as log:
            pages = log.pages(Span(0, 60_000), fail_on_data_loss=False)
            came = [event.offset for event in next(pages)]
            trim(bus, 100)
            came += [event.offset for page in pages for event in page]
            assert [event.offset for page in log.pages(Span(0, 59_000), (), False) for event in page] == []
    assert came == sorted(set(came))
    assert came[-100:] == list(range(59_901, 60_001))
    assert len(came) < 60_000


def test_an_end_beyond_the_head_is_an_error(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish_many([b"x"] * 100)

        with pytest.raises(LogError, match="ends at offset 100, but 101 was requested"):
            read(url, Span(0, 101))


def test_corrupt_events_are_an_error_with_their_number_and_range(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish_many([b"x"] * 100)
        connection = raw(log_path)
        connection.execute("DROP TRIGGER events_are_not_updated")
        connection.execute("UPDATE events SET payload = x'00' WHERE offset IN (30, 60)")
        connection.close()

        with pytest.raises(LogError, match="2 events after offset 10, up to 100, are corrupt"):
            read(url, Span(10, 100))
        assert len(read(url, Span(60, 100))) == 40


@pytest.mark.parametrize(
    ("offsets", "covered"),
    [((), 10), ((), 101), ((12, 11), 100), ((10, 11), 100), ((11, 12), 11)],
    ids=["no-further", "beyond-the-end", "out-of-order", "once-more", "more-than-it-covers"],
)
def test_an_inconsistent_page_is_an_error(url: str, log_path: Path, offsets: tuple[int, ...], covered: int) -> None:
    with node_at(url, log_path) as bus:
        assert bus._inner._node.network is not None
        origin = bus._inner._node.network.origin
        frames = [encode(Event(7, offset, 1, "a/b", b"", offset=offset), origin) for offset in offsets]
        page = [*frames, b"\0" + msgspec.msgpack.encode((covered, 100, 0, 0))]
        bus._inner._node.network.request_server.serve(log_key(origin), lambda request, link: page)

        with pytest.raises(TransportError, match="the page after offset 10"):
            read(url, Span(10, 100))


def test_a_read_that_is_left_early_leaves_nothing_behind(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish_many([b"x"] * 60_000)
        for _ in range(3):
            with RemoteLog(url, None, TIMEOUT_S) as log:
                assert next(log.pages(Span(0, 60_000)))
