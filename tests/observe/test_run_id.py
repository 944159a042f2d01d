"""Run ids: the records of a node carry the id that it drew, whichever task or thread writes them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from publish_paths import FakePorts, until

import zbus
from zbus import blocking
from zbus.config import BusConfig
from zbus.node import Node
from zbus.observe import records
from zbus.observe.records import record
from zbus.util.run_id import run_id
from zbus.util.runtime import Runtime

Written = tuple[str, str, str]  # the record, its correlation id, and the thread that wrote it


@pytest.fixture
def written() -> Iterator[list[Written]]:
    found: list[Written] = []

    def listen(level: int, fields: dict[str, Any]) -> None:
        found.append((fields["record"], fields["correlation_id"], threading.current_thread().name))

    stop = records.listen(logging.DEBUG, listen)
    yield found
    stop()


def ids(written: list[Written], name: str, thread: str = "") -> list[str]:
    return [id_ for each, id_, on in written if each == name and on.startswith(thread)]


def on_a_foreign_thread(call: Callable[[], object]) -> None:
    """As the threads of a transport's library do: they are not started by Python code of the node."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def fail() -> None:
    raise ValueError("a task of the log")


async def exercise(bus: zbus.Bus, ports: FakePorts) -> None:
    """Let every kind of task and thread of a bus write a record."""
    node, fabric = node_of(bus), ports.fabrics[0]
    publisher = await bus.publisher("a/b")
    async with (
        bus.subscribe("a/*", queue_events=2, overflow="drop_oldest") as full,
        bus.subscribe("a/*", queue_events=2, overflow="block"),
    ):
        await publisher.publish_many([b"x"] * 3)
        with pytest.raises(zbus.SubscriberLagged):
            await full.next()  # written by the task of the user
    await node.run(record, "ON_A_READ_THREAD")
    node.log._writer.run(fail)  # type: ignore[union-attr]
    on_a_foreign_thread(lambda: fabric.receive and fabric.receive(b"\xffmalformed"))
    fabric.disconnect()
    await publisher.publish(b"x")


@pytest.mark.parametrize("order", [1, -1])
async def test_the_records_of_two_buses_of_one_process_have_the_ids_of_their_buses(
    tmp_path: Path, written: list[Written], order: int
) -> None:
    record("OUTSIDE")
    buses, ports = [zbus.open(tmp_path / f"{name}.db") for name in "ab"], [FakePorts(), FakePorts()]
    for bus, fakes in zip(buses, ports, strict=True):
        node_of(bus)._ports = fakes
    own = {node_of(bus).runtime.run_id for bus in buses}
    async with buses[0], buses[1]:
        record("OUTSIDE")
        for bus, fakes in list(zip(buses, ports, strict=True))[::order]:
            await exercise(bus, fakes)
        await until(lambda: set(ids(written, "EVENT_RETRY")) == own and set(ids(written, "EVENT_INVALID")) == own)
    record("OUTSIDE")

    assert len(own) == 2
    expected = [node_of(bus).runtime.run_id for bus in buses][::order]
    for name, thread in (
        ("EVENT_DROPPED", "MainThread"),
        ("EVENT_BACKPRESSURE", "MainThread"),
        ("EVENT_SUBSCRIBER_SLOW", "MainThread"),
        ("ON_A_READ_THREAD", "zbus-read"),
        ("LOG_TASK_FAILED", "zbus-log-writer"),
        ("EVENT_INVALID", "MainThread"),
    ):
        assert ids(written, name, thread) == expected, name
    assert list(dict.fromkeys(ids(written, "EVENT_RETRY", "zbus-send-queue"))) == expected
    assert ids(written, "BUS_STARTED") == [node_of(bus).runtime.run_id for bus in buses]
    assert ids(written, "BUS_STOPPED") == [node_of(bus).runtime.run_id for bus in buses[::-1]]
    assert ids(written, "OUTSIDE") == [run_id.get()] * 3
    assert run_id.get() not in own


async def test_what_the_task_of_a_publisher_writes_without_a_log_has_the_id_of_the_bus(written: list[Written]) -> None:
    async with zbus.open() as one, zbus.open() as two:
        for bus in (one, two):
            await bus.schemas.register("a", {"type": "object"}, mode="permissive")
            async with bus.subscribe("a", queue_events=2), bus.subscribe("a", queue_events=2, overflow="block"):
                await (await bus.publisher("a")).publish_many([b"[]"] * 3)

    expected = [node_of(bus).runtime.run_id for bus in (one, two)]
    for name in ("EVENT_INVALID_SCHEMA", "EVENT_DROPPED", "EVENT_BACKPRESSURE"):
        assert ids(written, name) == expected, name


async def test_bursts_are_numbered_within_the_run_of_their_node(written: list[Written]) -> None:
    async with zbus.open("memory") as one, zbus.open() as two:
        for bus in (one, two):
            async with bus.subscribe("a"):
                await (await bus.publisher("a")).publish_many([b"x"] * 2)

    bursts = [node_of(one).runtime.run_id] * 2 + [node_of(two).runtime.run_id] * 2
    found = [id_ for name, id_, _ in written if name in ("EVENT_PUBLISHED", "EVENT_RECEIVED")]
    assert sorted(found) == sorted(f"{run}-{number}" for run, number in zip(bursts, [1, 2, 1, 2], strict=True))


async def test_the_runtime_of_a_node_draws_its_run_id(written: list[Written]) -> None:
    runtime = Runtime()
    runtime.token_hex = lambda size: "5eed" * (size // 2)
    node = Node(BusConfig(), runtime=runtime)
    await node.start()
    await node.aclose()

    assert ids(written, "BUS_STARTED") == ids(written, "BUS_STOPPED") == ["5eed" * 4]


async def test_the_tasks_of_handlers_belong_to_their_node_and_not_to_the_one_opened_last() -> None:
    bus, seen = zbus.open(), dict[str, str]()

    def on(key: str) -> None:
        @bus.on(key)
        async def work(event: zbus.Event) -> None:
            seen[event.key] = run_id.get()

    on("early")
    async with bus, zbus.open():
        on("late")
        for key in ("early", "late"):
            await (await bus.publisher(key)).publish(b"")
        await until(lambda: len(seen) == 2)

    assert seen == dict.fromkeys(("early", "late"), node_of(bus).runtime.run_id)


def test_a_bus_for_blocking_code_has_an_id_too(written: list[Written], log_path: Path) -> None:
    with blocking.open(log_path):
        record("OUTSIDE")

    assert ids(written, "BUS_STARTED") == ids(written, "BUS_STOPPED") != ids(written, "OUTSIDE") == [run_id.get()]


async def test_a_start_that_is_dropped_half_way_leaves_nothing_to_report() -> None:
    """As at the end of a program: the coroutine is closed in a context that never set the id."""
    runtime = Runtime()

    async def wait() -> None:
        with runtime.for_node().running():
            await asyncio.get_running_loop().create_future()

    waiting = wait()
    contextvars.copy_context().run(waiting.send, None)

    waiting.close()
