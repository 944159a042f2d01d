"""What a NATS fabric does while its server is killed, frozen, and back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from nats_support import Collected, NatsServer, nats_server, wait_for

from zbus.config import BusConfig
from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus.ports.fabric import Fabric, IncomingRequest
from zbus_nats import fabric as nats_fabric
from zbus_nats.options import NatsOptions
from zbus_nats.outgoing import OutgoingMessages
from zbus_nats.reconnect import Reconnect


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path) as running:
        yield running


@pytest.fixture
def pair(server: NatsServer) -> Iterator[tuple[Fabric, Fabric]]:
    here, there = open_fabric(server), open_fabric(server)
    yield here, there
    here.close()
    there.close()


def open_fabric(server: NatsServer, **options: str) -> Fabric:
    return nats_fabric.open_fabric(BusConfig(options=options), server.url)


def test_after_a_kill_and_a_restart_it_reconnects_and_is_subscribed_again(
    server: NatsServer, pair: tuple[Fabric, Fabric], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = pair
    came, received = Collected(), Collected()
    there.listen(["a/**"], came)
    there.serve(["q"], lambda request: threading.Thread(target=lambda: _answer(request)).start())

    with caplog.at_level(logging.INFO, "zbus"):
        server.kill()
        wait_for(lambda: not here.ready("a/b") and not there.ready("a/b"))
        with pytest.raises(TransportError, match="not connected"):
            here.send([("a/b", b"lost")])
        with pytest.raises(TransportError, match="not connected"):
            here.request("q", b"?", received, 5.0)
        assert here.diagnostics()["disconnected_s"] >= 0
        server.start()
        wait_for(lambda: here.ready("a/b") and there.ready("a/b"))

    here.send([("a/b", b"1"), ("a", b"2")])
    assert came.wait(2) == [b"1", b"2"]
    here.request("q", b"?", received, 20.0)
    assert received.wait(2) == [b"yes", None]
    assert here.diagnostics()["reconnects"] == 1
    names = [each.getMessage().split()[0] for each in caplog.records if each.name == "zbus"]
    assert names.count("TRANSPORT_DISCONNECTED") >= 2
    assert names.count("TRANSPORT_RECONNECTED") == 2


def _answer(request: IncomingRequest) -> None:
    request.reply(b"yes")
    request.close()


def test_killed_and_restarted_under_load_what_is_sent_again_arrives_in_order(
    server: NatsServer, pair: tuple[Fabric, Fabric]
) -> None:
    here, there = pair
    came = Collected()
    there.listen(["load"], came)
    outages: list[int] = []
    total = 30_000

    def came_up_to(number: int) -> bool:
        return number <= 0 or (bool(came.items) and int(came.items[-1] or 0) >= number)

    def send_queue() -> None:
        """As the core does: what was not handed over, or may be lost, is sent again."""
        number = 0
        while number < total:
            try:
                here.send([("load", b"%d" % (number + each)) for each in range(100)])
                number += 100
                # By what came, not by how much: what is sent again comes again.
                wait_for(partial(came_up_to, number - 2_000), 0.5)
            except (TransportError, AssertionError):
                outages.append(number)
                wait_for(lambda: here.ready("load") and there.ready("load"))
                number = max(0, number - 5_000)

    sending = threading.Thread(target=send_queue)
    sending.start()
    for _ in range(3):
        before = len(came.items)
        wait_for(lambda before=before: len(came.items) > before + 1_000, 60)  # type: ignore[misc]
        server.kill()
        server.start()
    sending.join(100)

    wait_for(lambda: came.items and came.items[-1] == b"%d" % (total - 1), 60)
    assert outages, "the server was killed and nobody noticed"
    first_seen = list(dict.fromkeys(came.items))
    assert first_seen == [b"%d" % number for number in range(total)]


def test_a_request_in_flight_ends_when_the_server_is_killed(server: NatsServer, pair: tuple[Fabric, Fabric]) -> None:
    here, there = pair
    requests: list[IncomingRequest] = []
    there.serve(["held"], requests.append)
    received = Collected()
    here.request("held", b"?", received, 60.0)
    wait_for(lambda: requests)

    server.kill()

    assert received.wait(1) == [None]
    wait_for(lambda: not there.ready("held"))
    with pytest.raises(TransportError):
        requests[0].reply(b"x")
    requests[0].close()


def test_what_is_listened_to_while_there_is_no_server_is_in_force_when_it_is_back(
    server: NatsServer, pair: tuple[Fabric, Fabric]
) -> None:
    here, there = pair
    came = Collected()
    there.listen(["before"], came)
    server.kill()
    wait_for(lambda: not here.ready("a") and not there.ready("a"))

    there.listen(["after"], came)
    server.start()
    wait_for(lambda: here.ready("a") and there.ready("a"))
    # The server serves each connection on its own: only an answer shows that it knows the subscription.
    there.connection.run(there.connection.client.flush(10), 20.0)  # type: ignore[attr-defined]
    here.send([("before", b"no"), ("after", b"yes")])

    assert came.wait(1) == [b"yes"]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with unsent frames"])
def test_close_ends_in_bounded_time_while_the_server_is_frozen(server: NatsServer, busy: bool) -> None:
    fabric = open_fabric(server, pending_bytes_max="65536", send_timeout_s="0.5")
    fabric.listen(["a"], lambda frame, done: None)
    server.freeze()
    if busy:
        with pytest.raises(TransportError, match="accepted no data"):
            for _ in range(1_000):
                fabric.send([("a", bytes(100_000))])

    start = time.monotonic()
    fabric.close()

    assert time.monotonic() - start < 15
    server.thaw()


def test_a_frozen_server_holds_the_sender_back_and_memory_stays_bounded(server: NatsServer) -> None:
    fabric = open_fabric(server, pending_bytes_max="1000000", send_timeout_s="0.5")
    server.freeze()
    sent = 0
    with pytest.raises(TransportError, match="accepted no data"):
        for _ in range(1_000):
            fabric.send([("a", bytes(100_000))])
            sent += 100_000

    assert sent < 20_000_000, "the socket, its buffer and the queue are not that large"
    assert fabric.diagnostics()["pending_bytes"] <= 2_000_000
    server.thaw()
    wait_for(lambda: fabric.diagnostics()["pending_bytes"] == 0)
    fabric.send([("a", b"x")])
    fabric.close()


def test_a_frozen_server_is_given_up_and_found_again(server: NatsServer) -> None:
    fabric = open_fabric(server, ping_interval_s="0.2", connect_timeout_s="1")
    server.freeze()

    wait_for(lambda: not fabric.ready("a"))
    server.thaw()

    wait_for(lambda: fabric.ready("a"))
    assert fabric.diagnostics()["reconnects"] == 1
    fabric.close()


def test_close_ends_in_bounded_time_while_there_is_no_server(server: NatsServer) -> None:
    fabric = open_fabric(server)
    server.kill()
    wait_for(lambda: not fabric.ready("a"))

    start = time.monotonic()
    fabric.close()

    assert time.monotonic() - start < 15


def test_half_a_large_frame_cut_off_by_a_kill_is_not_delivered_and_the_next_is(
    server: NatsServer, pair: tuple[Fabric, Fabric]
) -> None:
    here, there = pair
    came = Collected()
    there.listen(["a"], came)
    here.send([("a", b"first")])
    came.wait(1)
    with pytest.raises(TransportError):
        while True:
            here.send([("a", bytes(50_000_000))])
            server.kill()
            wait_for(lambda: not here.ready("a") and not there.ready("a"))
    server.start()
    wait_for(lambda: here.ready("a") and there.ready("a"))

    def arrives() -> bool:  # both are connected, but the server may not know the subscription yet
        here.send([("a", b"next")])
        return came.items[-1] == b"next"

    wait_for(arrives)
    assert all(len(each or b"") in (5, 4, 50_000_000) for each in came.items)


async def test_attempts_to_connect_again_wait_longer_and_longer_up_to_a_limit_and_never_in_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(*arguments: object) -> None:
        raise ConnectionRefusedError

    async def pauses(attempts: int) -> list[float]:
        options, loop = NatsOptions(), asyncio.get_running_loop()
        upkeep = Reconnect(options, "nats", Counters("test"), OutgoingMessages(loop, options), asyncio.Event())
        upkeep.opened.set_result(None)  # it was connected once: from then on it never gives up
        found: list[float] = []

        async def waited(pause_s: float) -> None:
            found.append(pause_s)
            if len(found) == attempts:
                upkeep.closing.set()

        monkeypatch.setattr(upkeep, "_closing_within", waited)
        await upkeep.run()
        return found

    monkeypatch.setattr("zbus_nats.reconnect.login", refused)
    first, second = await pauses(300), await pauses(300)

    for each in (first, second):
        limits = [min(2.0, 0.05 * 2**attempt) for attempt in range(300)]
        assert all(limit / 2 <= pause <= limit for pause, limit in zip(each, limits, strict=True))
        capped = each[6:]
        assert min(capped) < 1.25 < 1.75 < max(capped)  # all over the range, not at one end of it
        assert 1.4 < sum(capped) / len(capped) < 1.6
    assert len({*first, *second}) > 590, "two nodes that lost one server do not come back in step"


async def test_after_a_connection_that_lasted_the_pauses_begin_small_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options, loop = NatsOptions(), asyncio.get_running_loop()
    upkeep = Reconnect(options, "nats", Counters("test"), OutgoingMessages(loop, options), asyncio.Event())
    upkeep.opened.set_result(None)
    monkeypatch.setattr("zbus_nats.reconnect.STEADY_S", 0.0)
    outcomes: list[Exception | None] = [OSError()] * 8 + [None] + [OSError()] * 3
    found: list[float] = []

    async def one(client: object, patience_s: float) -> Exception | None:
        await asyncio.sleep(0.001)
        return outcomes[len(found)]

    async def waited(pause_s: float) -> None:
        found.append(pause_s)
        if len(found) == len(outcomes):
            upkeep.closing.set()

    monkeypatch.setattr(upkeep, "_one", one)
    monkeypatch.setattr(upkeep, "_closing_within", waited)
    await upkeep.run()

    assert found[7] >= 1.0
    assert found[8] <= 0.05
    assert 0.05 <= found[9] <= 0.1
