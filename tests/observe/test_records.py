"""Records: one vocabulary, a correlation id on each, as text, as JSON, and on the bus itself."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inside import node_of

import zbus
from zbus.observe import records
from zbus.observe.records import correlated, listen, record
from zbus.util.run_id import run_id

Reported = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Reported:
    """What was written so far, as fields, from DEBUG on; of some names only, if they are given."""
    caplog.set_level(logging.DEBUG, "zbus")

    def fields(*names: str) -> list[dict[str, Any]]:
        found = [each.zbus for each in caplog.records if each.name == "zbus"]
        return [each for each in found if not names or each["record"] in names]

    return fields


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a program that asked for JSON lines would see."""
    stream, level = io.StringIO(), records.logger.level
    handler = zbus.configure_logging("json", level="DEBUG", stream=stream)
    yield stream
    records.logger.removeHandler(handler)
    records.logger.setLevel(level)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_bus_tells_of_its_life_and_of_events_once_per_burst(log_path: Path, reported: Reported) -> None:
    async with zbus.open(log_path) as bus, bus.subscribe("shop/**") as subscription:
        await (await bus.publisher("shop/orders")).publish_many([b"x"] * 300)
        await anext(subscription)

    names = [each["record"] for each in reported()]
    assert names[0] == "BUS_STARTED"
    assert names[-1] == "BUS_STOPPED"
    published, received = reported("EVENT_PUBLISHED"), reported("EVENT_RECEIVED")
    assert sum(each["events"] for each in published) == sum(each["events"] for each in received) == 300
    assert len(published) < 30  # per burst
    assert (published[0]["first"], published[-1]["last"], published[0]["keys"]) == (1, 300, ["shop/orders"])
    assert all(each["correlation_id"] for each in reported())


async def test_the_record_of_an_event_carries_its_correlation_id_or_its_identity(reported: Reported) -> None:
    async with zbus.open() as bus, bus.subscribe("**"):
        publisher = await bus.publisher("a/b")
        await publisher.publish(b"x", correlation_id="order-7")
        await publisher.publish(b"y")

    by_name = [(each["record"], each["correlation_id"]) for each in reported("EVENT_PUBLISHED", "EVENT_RECEIVED")]
    second = f"{publisher.publisher_id:x}-1"
    expected = [("EVENT_PUBLISHED", "order-7"), ("EVENT_RECEIVED", "order-7")]
    assert by_name == [*expected, ("EVENT_PUBLISHED", second), ("EVENT_RECEIVED", second)]


async def test_a_burst_of_several_names_the_ids_in_it(log_path: Path, reported: Reported) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        first = zbus.Event(publisher.publisher_id, 0, 1, "a/b", b"x", {"correlation-id": "one"})
        second = zbus.Event(publisher.publisher_id, 1, 1, "a/b", b"x", {"correlation-id": "two"})
        await bus.put(first, second, zbus.Event(publisher.publisher_id, 2, 1, "a/b", b"x"))

    (burst,) = reported("EVENT_PUBLISHED")
    assert (burst["correlation_ids"], burst["correlation_id_count"]) == (["one", "two"], 2)
    assert burst["correlation_id"] not in ("one", "two")


async def test_events_are_not_logged_unless_debug_is_enabled(caplog: pytest.LogCaptureFixture, log_path: Path) -> None:
    caplog.set_level(logging.INFO, "zbus")
    async with zbus.open(log_path) as bus, bus.subscribe("**") as subscription:
        await (await bus.publisher("a/b")).publish(b"x")
        await anext(subscription)

    assert [each.zbus["record"] for each in caplog.records] == ["BUS_STARTED", "BUS_STOPPED"]  # type: ignore[attr-defined]


async def test_what_a_handler_causes_belongs_to_its_event(reported: Reported, log_path: Path) -> None:
    done = asyncio.Event()
    async with zbus.open(log_path) as bus:

        @bus.on("jobs/*", durable="worker")
        async def work(event: zbus.Event) -> None:
            record("SOMETHING_DONE")
            done.set()

        await (await bus.publisher("jobs/one")).publish(b"x", correlation_id="job-1")
        await asyncio.wait_for(done.wait(), 20)

    assert [each["correlation_id"] for each in reported("SOMETHING_DONE")] == ["job-1"]


async def test_retries_have_a_limit_and_the_event_that_exceeds_it_is_named(log_path: Path, reported: Reported) -> None:
    seen: list[tuple[str, int]] = []
    async with zbus.open(log_path) as bus:

        @bus.on("jobs/*", durable="worker", retries=2)
        async def work(event: zbus.Event) -> None:
            seen.append((event.key, event.offset))
            if event.key == "jobs/bad":
                raise ValueError("no")

        await (await bus.publisher("jobs/bad")).publish(b"x", correlation_id="bad-one")
        await (await bus.publisher("jobs/good")).publish(b"x")
        await until(lambda: ("jobs/good", 2) in seen)
        stats = bus.stats()

    assert seen == [("jobs/bad", 1)] * 3 + [("jobs/good", 2)]
    (exceeded,) = reported("EVENT_RETRY_LIMIT_EXCEEDED")
    assert (exceeded["key"], exceeded["offset"], exceeded["tried"]) == ("jobs/bad", 1, 3)
    assert exceeded["correlation_id"] == "bad-one"
    assert [each["tried"] for each in reported("EVENT_RETRY")] == [1, 2]
    assert (stats["redelivered"], stats["retry_limit_exceeded"], stats["handler_errors"]) == (2, 1, 3)


async def test_without_a_name_retries_can_be_set_too() -> None:
    tried = 0
    async with zbus.open() as bus:

        @bus.on("jobs/*", retries=1)
        async def work(event: zbus.Event) -> None:
            nonlocal tried
            tried += 1
            raise ValueError("no")

        await (await bus.publisher("jobs/bad")).publish(b"x")
        await until(lambda: bus.stats().get("retry_limit_exceeded") == 1)
    assert tried == 2


@pytest.mark.parametrize("retries", [-1, True, 1.5, "many"])
async def test_a_number_of_retries_that_is_none_is_refused(retries: Any) -> None:
    async with zbus.open() as bus:
        with pytest.raises(zbus.ConfigInvalid, match="retries"):
            bus.on("jobs/*", retries=retries)


async def test_a_full_reader_is_reported_as_dropped_and_slow(reported: Reported) -> None:
    async with zbus.open() as bus, bus.subscribe("a/**", queue_events=2) as subscription:
        publisher = await bus.publisher("a/b")
        for _ in range(50):
            await publisher.publish(b"x")
        with pytest.raises(zbus.SubscriberLagged):
            await anext(subscription)

    (dropped,) = reported("EVENT_DROPPED")  # while it goes on, once a second
    assert (dropped["keys"], dropped["policy"], dropped["dropped_total"]) == (("a/**",), "drop_oldest", 1)
    (slow,) = reported("EVENT_SUBSCRIBER_SLOW")
    assert slow["missed"] == 48


async def test_publishers_that_must_wait_are_reported(reported: Reported) -> None:
    async with zbus.open() as bus, bus.subscribe("a/**", queue_events=2, overflow="block") as subscription:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"x"] * 2)
        waiting = asyncio.create_task(publisher.publish(b"y"))
        await until(lambda: bus.stats()["publish_blocked"] == 1)
        assert not waiting.done()
        for _ in range(3):
            await anext(subscription)
        await waiting

    (reported_keys,) = reported("EVENT_BACKPRESSURE")
    assert "queue is full" in reported_keys["reason"]


async def test_a_replay_is_reported_at_its_beginning_and_its_end(log_path: Path, reported: Reported) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/b")).publish_many([b"x"] * 5)
        assert len([event async for event in bus.replay("a/**", after=2)]) == 3

    (asked,), (delivered,) = reported("EVENT_REPLAY_REQUESTED"), reported("EVENT_REPLAY_DELIVERED")
    assert (asked["keys"], delivered["events"]) == (("a/**",), 3)
    assert asked["correlation_id"] == delivered["correlation_id"] != run_id.get()


async def test_a_replay_of_what_retention_removed_is_reported_as_failed(log_path: Path, reported: Reported) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/b")).publish_many([b"x"] * 10)
    subprocess.run([sys.executable, "-m", "zbus", "log", "prune", str(log_path), "--max-events", "2"], check=True)
    async with zbus.open(log_path) as bus:
        with pytest.raises(zbus.LogTrimmed):
            await anext(bus.replay("a/**", after=1))

    (failed,) = reported("EVENT_REPLAY_FAILED")
    assert (failed["code"], bool(failed["reason"])) == ("replay_failed", True)
    assert failed["events"] == 0


async def test_json_lines_hold_every_field(lines: io.StringIO) -> None:
    with correlated("request-1"):
        record("SOMETHING", logging.WARNING, ValueError("odd"), path=Path("x"), number=1 << 70, text="ä\n")
    logging.getLogger("zbus").info("plain %s", "text")

    first, second = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert (first["record"], first["level"], first["correlation_id"]) == ("SOMETHING", "WARNING", "request-1")
    assert first["error"] == "ValueError: odd"
    assert "traceback" in first
    assert first["text"] in ("ä\n", repr("ä\n"))
    assert (second["message"], second["correlation_id"]) == ("plain text", run_id.get())


@pytest.mark.parametrize(("form", "level"), [("xml", "INFO"), ("json", "LOUD")])
def test_an_unknown_form_or_level_is_refused(form: Any, level: str) -> None:
    before = list(records.logger.handlers)
    with pytest.raises(zbus.ConfigInvalid):
        zbus.configure_logging(form, level=level)
    assert records.logger.handlers == before


async def test_records_reach_the_bus_under_a_key_that_no_wildcard_matches(log_path: Path) -> None:
    async with zbus.open(log_path, system_events="info") as bus:
        async with bus.subscribe("**") as everything, bus.subscribe("@zbus/record/*") as reported_here:
            record("SOMETHING", logging.WARNING, number=7)
            record("DETAIL", logging.DEBUG)
            event = await asyncio.wait_for(anext(reported_here), 20)

            assert (event.key, event.decode(dict)["number"], event.correlation_id) == (
                "@zbus/record/SOMETHING",
                7,
                run_id.get(),
            )
            assert reported_here.queued == everything.queued == 0
            assert await bus.head() == 0  # not stored


async def test_records_reach_other_nodes_that_ask_for_them(tmp_path: Path) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/n.sock"
    async with zbus.open(mode="peer", listen=[endpoint]) as there:
        async with there.subscribe("@zbus/record/*") as reported_there, there.subscribe("@zbus/gap") as gaps:
            async with zbus.open(mode="peer", connect=[endpoint], system_events="warning") as here:
                assert node_of(here).network is not None
                fabric = node_of(here).network.links[0].fabric
                await until(lambda: fabric.ready("@zbus/record/SOMETHING"))
                for number in range(3):
                    record("SOMETHING", logging.WARNING, number=number)
                    record("OTHER", logging.WARNING)
                async with asyncio.timeout(20):
                    found = [(await anext(reported_there)).decode(dict) for _ in range(6)]

            assert [each["number"] for each in found if each["record"] == "SOMETHING"] == [0, 1, 2]
            assert gaps.queued == 0, (await anext(gaps)).payload


async def test_a_reader_of_records_that_is_slow_makes_no_more_of_them() -> None:
    async with zbus.open(system_events="info") as bus, bus.subscribe("@zbus/record/*", queue_events=1) as reported_here:
        for _ in range(5):
            record("SOMETHING", logging.WARNING)
        await until(lambda: reported_here.dropped == 5)  # with BUS_STARTED
        for _ in range(20):
            await asyncio.sleep(0)

        assert reported_here.dropped == 5


async def test_a_flood_of_records_is_bounded_and_counted() -> None:
    async with zbus.open(system_events="debug") as bus:
        for _ in range(5000):
            record("SOMETHING", logging.DEBUG)
        await until(lambda: bus.stats().get("dropped_records", 0) >= 4000)


async def test_a_closed_bus_receives_no_records() -> None:
    before = set(records._listeners)  # of objects that other tests left to garbage collection
    async with zbus.open(system_events="debug"):
        (own,) = set(records._listeners) - before
    assert own not in records._listeners


def test_the_command_line_writes_records_as_json() -> None:
    command = [sys.executable, "-m", "zbus", "--logging", "json", "pub", "a/b", "x", "--log", "memory"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stderr
    names = [json.loads(line)["record"] for line in done.stderr.splitlines() if line.startswith("{")]
    assert names == ["BUS_STARTED", "BUS_STOPPED"]


def test_listeners_that_garbage_collection_ends_meanwhile_neither_hang_nor_come_back() -> None:
    arrived: list[str] = []
    finalizers = [records.listen(logging.INFO, lambda *reported: arrived.append("ended meanwhile"))]
    stop = records.listen(logging.INFO, lambda *reported: arrived.append("stays"))

    def change(now: Any) -> Any:
        while finalizers:
            finalizers.pop()()  # on this very thread, in the midst of a change
        return now

    records._change(change)
    records.record("BUS_STARTED")
    stop()
    records.record("BUS_STARTED")

    assert arrived == ["stays"]


def test_a_record_never_raises_whatever_handlers_listeners_and_errors_do(capsys: pytest.CaptureFixture[str]) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the handler is broken")

    def broken_listener(level: int, fields: dict[str, Any]) -> None:
        raise OSError("the listener is broken")

    arrived: list[dict[str, Any]] = []
    broken, logger = Broken(), logging.getLogger("zbus")
    logger.addHandler(broken)
    ends = [listen(logging.WARNING, broken_listener), listen(logging.WARNING, lambda _, fields: arrived.append(fields))]
    try:
        record("EVENT_RETRY", logging.WARNING, Unprintable(), key="a/b")
    finally:
        logger.removeHandler(broken)
        for end in ends:
            end()

    assert [(each["key"], each["error"]) for each in arrived] == [("a/b", "Unprintable")]
    err = capsys.readouterr().err
    assert "the handler is broken" in err
    assert "the listener is broken" in err
