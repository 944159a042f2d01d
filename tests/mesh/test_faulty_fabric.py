"""A transport plugin that raises what the port does not permit: the node reports it, goes on, and closes everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from mesh_fakes import FakeFabric, recorded

import zbus
from zbus import plugins
from zbus.ports.fabric import Fabric, OnReply, Receive, RequestHandle
from zbus.wire.announcement import NODES
from zbus.wire.envelope import encode


class Panic(BaseException):
    """As a Rust library raises it: not an `Exception`."""


class FaultyFabric(FakeFabric):
    """Raises `errors[name]` in the method of that name."""

    def __init__(self) -> None:
        self.errors: dict[str, BaseException] = {}
        super().__init__()

    def _raise(self, name: str) -> None:
        if name in self.errors:
            raise self.errors[name]

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        self._raise("listen")
        super().listen(expressions, receive)

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        self._raise("request")
        return super().request(key, payload, on_reply, timeout_s)

    def diagnostics(self) -> dict[str, Any]:
        self._raise("diagnostics")
        return {"connected": True}

    def close(self) -> None:
        super().close()
        self._raise("close")

    @property
    def endpoints(self) -> Sequence[str]:
        self._raise("endpoints")
        return self._endpoints

    @endpoints.setter
    def endpoints(self, endpoints: Any) -> None:
        self._endpoints = endpoints


@pytest.fixture
def fabrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, FaultyFabric]:
    """The fabrics of `fake://1` and `fake://2`."""
    found = {"fake://1": FaultyFabric(), "fake://2": FaultyFabric()}
    open_fabric = plugins.open_fabric

    def open_fake(config: Any, url: str, session: Any = None) -> Fabric:
        return found[url] if url in found else open_fabric(config, url, session)

    monkeypatch.setattr(plugins, "open_fabric", open_fake)
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def codes(records: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(each["record"], each["code"]) for each in records if "code" in each}


@pytest.mark.parametrize("error", [OSError("boom"), Panic("boom")], ids=["error", "panic"])
async def test_a_transport_whose_close_raises_leaves_nothing_else_open(
    fabrics: dict[str, FaultyFabric], log_path: Path, error: BaseException
) -> None:
    fabrics["fake://1"].errors["close"] = error
    with recorded() as records:
        async with zbus.open(log_path, transports=["fake://1", "fake://2"]):
            pass

        assert fabrics["fake://2"].closed
        assert ("TRANSPORT_ERROR", "close_failed") in codes(records)
        async with zbus.open(log_path) as again:  # so the log was closed
            assert await again.head() == 0


async def test_each_part_of_a_node_is_closed_even_if_another_one_raises(
    fabrics: dict[str, FaultyFabric], log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("boom")

    bus = zbus.open(log_path, transport="fake://1")
    with recorded() as records:
        async with bus:
            monkeypatch.setattr(node_of(bus).network, "close", fail)

    assert [(each["code"], each["part"]) for each in records if each["record"] == "BUS_CLOSE_FAILED"] == [
        ("close_failed", "network")
    ]
    async with zbus.open(log_path) as again:
        assert await again.head() == 0


@pytest.mark.parametrize("fault", ["diagnostics", "endpoints", "odd endpoints"])
async def test_a_transport_whose_state_cannot_be_read_is_reported_and_its_node_announces_itself(
    fabrics: dict[str, FaultyFabric], fault: str
) -> None:
    fabric = fabrics["fake://1"]
    if fault == "odd endpoints":
        fabric.endpoints = [object()]  # type: ignore[list-item]
    else:
        fabric.errors[fault] = OSError("boom")
    with recorded() as records:
        async with zbus.open(transport="fake://1") as bus:
            await until(lambda: any(key.startswith(NODES.removesuffix("*")) for key, _ in fabric.frames))
            bus.diagnostics()

    assert ("TRANSPORT_ERROR", "state_unreadable") in codes(records)


async def test_a_panic_of_send_is_recorded_and_what_it_kept_back_is_sent_again(
    fabrics: dict[str, FaultyFabric],
) -> None:
    fabric = fabrics["fake://1"]
    with recorded() as records:
        async with zbus.open(transport="fake://1") as bus:
            fabric.error = Panic("boom")
            await (await bus.publisher("shop/orders")).publish(b"x")
            await until(lambda: ("EVENT_RETRY", "send_failed") in codes(records))
            fabric.error = None
            await until(lambda: fabric.sequences == [0])


async def test_a_transport_whose_listen_raises_does_not_keep_the_others_from_listening(
    fabrics: dict[str, FaultyFabric],
) -> None:
    with recorded() as records:
        async with zbus.open(transports=["fake://1", "fake://2"]) as bus:
            fabrics["fake://1"].errors["listen"] = OSError("boom")
            async with bus.subscribe("shop/**"):
                assert "shop/**" in fabrics["fake://2"].listening

    assert ("TRANSPORT_ERROR", "declare_failed") in codes(records)


async def test_a_transport_whose_request_raises_is_as_one_that_is_not_connected(
    fabrics: dict[str, FaultyFabric],
) -> None:
    fabrics["fake://1"].errors["request"] = OSError("boom")
    async with zbus.open(transport="fake://1") as bus:
        with pytest.raises(zbus.TransportError, match="boom"):
            await bus.request("shop/orders", b"")


async def test_an_acknowledgement_that_raises_stops_no_other_frame(fabrics: dict[str, FaultyFabric]) -> None:
    acknowledged: list[int] = []

    def fail() -> None:
        raise OSError("boom")

    with recorded() as records:
        async with zbus.open(transport="fake://1") as bus, bus.subscribe("shop/**") as subscription:
            receive = fabrics["fake://1"].receive
            assert receive is not None
            for sequence in range(3):
                frame = encode(zbus.Event(7, sequence, 1, "shop/orders", b"x"))
                receive(frame, fail if sequence == 0 else lambda: acknowledged.append(1))
            async with asyncio.timeout(10):
                assert [(await anext(subscription)).sequence for _ in range(3)] == [0, 1, 2]
            await until(lambda: len(acknowledged) == 2)

            assert bus.stats()["acknowledge_errors"] == 1
    assert ("RECEIVE_FAILED", "acknowledge_failed") in codes(records)


async def test_a_switch_of_the_transport_ends_with_an_error_when_the_bus_is_closed(
    fabrics: dict[str, FaultyFabric],
) -> None:
    async with zbus.open(transport="fake://1") as bus:
        switching = asyncio.create_task(bus.switch_transport("fake://2", overlap_s=30))
        await until(lambda: len(bus.stats()["links"]) == 2)
    done, _ = await asyncio.wait([switching], timeout=1)

    assert isinstance(switching.exception() if done else None, zbus.BusClosed)
    assert fabrics["fake://1"].closed
    assert fabrics["fake://2"].closed
