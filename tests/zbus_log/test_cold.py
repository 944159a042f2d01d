"""Reading the cold tier: what was moved out of the log's file is read like the rest, exactly, at every stage."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from cold_support import (
    DAY,
    EVENTS,
    START,
    epoch_of,
    fill,
    follow,
    make_row,
    offload,
    offsets,
    opened,
    trim,
    write_segment,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import node_of
from log_support import append

import zbus
from zbus import blocking
from zbus.errors import LogTrimmed
from zbus.event import Provenance
from zbus.keys import KeySet
from zbus.mesh.log_service import LogService
from zbus.ports.log import Row, Span
from zbus.wire.envelope import open_frame
from zbus_log import Cold, SqliteLog
from zbus_log.cold import merge as coldmerge

EXPRESSIONS = (
    "**",
    "shop/**",
    "*/a=b",
    "gr$*/*",
    "*/orders/paid",
    "@sys/**",
    "**/@own/x",
    "nobody/**",
    "**/@sys/*/b",
    "c:d/x",
)
BOUNDS = (200, 201, 450, 700)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteLog]:
    """A log that keeps everything in its file."""
    path = tmp_path_factory.mktemp("whole") / "app.db"
    fill(path)
    with opened(path, read_only=True) as log:
        yield log


STAGES = {"offloaded": 0, "one trimmed": 1, "half trimmed": 333, "to a seam": 450, "before the end": 699, "all": 700}


@pytest.fixture(scope="module", params=STAGES.values(), ids=STAGES.keys())
def joined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, whole: SqliteLog) -> Any:
    """The same log with its beginning in a tier, trimmed so far."""
    path = tmp_path_factory.mktemp("joined") / "app.db"
    shutil.copy(whole.path, path)
    shutil.copy(f"{whole.path}-head", f"{path}-head")
    with opened(path) as log:
        offload(path, *BOUNDS, row_group=40, file_rows=100)
        trim(log, request.param)
        yield log


SPANS = [Span(), Span(until=450), Span(199, 202), Span(333), Span(699, 701), Span(from_ns=START + DAY)]
SPANS += [Span(to_ns=START + DAY), Span(from_ns=START + DAY // 2, to_ns=START + DAY), Span(450, 800, START + DAY)]


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_every_expression_reads_the_same_as_without_a_tier(whole: SqliteLog, joined: SqliteLog, span: Span) -> None:
    for number, keys in enumerate([KeySet.all(), *(KeySet([expression]) for expression in EXPRESSIONS)]):
        assert follow(joined, keys, span, (1000, 150)[number % 2]) == follow(whole, keys, span, 1000), keys.expressions


def test_pages_and_slices_of_any_size_hold_the_same_events(
    whole: SqliteLog, joined: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coldmerge, "SLICE_ROWS_MIN", 2)
    for held, expression in product((16, 200), ("**", "shop/**", "@sys/**")):
        monkeypatch.setattr(coldmerge, "HELD_ROWS", held)
        keys = KeySet([expression])
        assert follow(joined, keys, limit=7) == follow(whole, keys, limit=1000), (held, expression)


moments = st.integers(START - DAY, START + 4 * DAY) | st.none()


@settings(max_examples=40, deadline=None)
@given(
    expressions=st.lists(st.sampled_from(EXPRESSIONS), min_size=1, max_size=3),
    after=st.integers(0, EVENTS),
    until=st.integers(0, EVENTS + 9) | st.none(),
    from_ns=moments,
    to_ns=moments,
    limit=st.sampled_from([1, 3, 64, 2000]),
)
def test_any_span_of_any_keys_reads_the_same_as_without_a_tier(
    whole: SqliteLog,
    joined: SqliteLog,
    expressions: list[str],
    after: int,
    until: int | None,
    from_ns: int | None,
    to_ns: int | None,
    limit: int,
) -> None:
    keys, span = KeySet(expressions), Span(after, until, from_ns, to_ns)
    assert follow(joined, keys, span, limit) == follow(whole, keys, span, limit)


def test_a_start_in_time_is_the_same_offset_as_without_a_tier(whole: SqliteLog, joined: SqliteLog) -> None:
    for moment in range(START - DAY, START + 4 * DAY, DAY // 10):
        assert joined.narrow(Span(from_ns=moment)).after == whole.narrow(Span(from_ns=moment)).after


def test_headers_and_where_an_event_came_from_survive(joined: SqliteLog) -> None:
    by_offset = {event.offset: event for event in follow(joined, KeySet.all())}

    assert dict(by_offset[5].headers) == {"h": "wert ü 5"}
    assert by_offset[11].provenance == Provenance(7, 11, (3, 5), "nats")
    assert dict(by_offset[11].headers) == {"n": "11"}


def test_nothing_is_gone_while_the_tier_has_it(joined: SqliteLog) -> None:
    assert joined.low_water() == 0
    assert joined.head() == EVENTS
    assert joined.read(KeySet.all(), Span(), 10).low_water == 0
    assert joined.read(KeySet.all(), Span(EVENTS - 1), 10).low_water == 0


def test_many_threads_read_the_tier_at_once(whole: SqliteLog, joined: SqliteLog) -> None:
    sets = [KeySet([expression]) for expression in EXPRESSIONS] * 3
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda keys: follow(joined, keys, limit=50), sets))

    assert found == [follow(whole, keys) for keys in sets]


def test_reading_while_the_file_is_trimmed_loses_nothing_and_yields_nothing_twice(log_path: Path) -> None:
    fill(log_path, 30_000)
    with opened(log_path) as log, opened(log_path, read_only=True) as reader:
        offload(log_path, 9_000, 30_000)
        started = threading.Event()

        def read(which: SqliteLog, limit: int) -> list[int]:
            started.set()
            return offsets(follow(which, KeySet.all(), limit=limit))

        with ThreadPoolExecutor(4) as pool:
            reading = [pool.submit(read, which, limit) for which in (log, reader) for limit in (300, 1000)]
            started.wait()
            for upto in range(1000, 30_001, 1000):
                trim(log, upto)
            assert all(each.result() == list(range(1, 30_001)) for each in reading)
        assert log.diagnostics()["low_water"] == 0


def test_a_reader_notices_segments_that_another_process_adds(log_path: Path) -> None:
    fill(log_path)
    with opened(log_path) as log, opened(log_path, read_only=True) as reader:
        for bound in (100, 300, 900):
            offload(log_path, bound)
            trim(log, bound)
            assert offsets(follow(reader, KeySet.all())) == list(range(1, EVENTS + 1))
            assert offsets(follow(reader, KeySet.all(), Span(bound - 1))) == list(range(bound, EVENTS + 1))


def test_a_tier_that_begins_later_says_what_is_gone_before_it(log_path: Path) -> None:
    fill(log_path)
    with opened(log_path) as log:
        trim(log, 100)
        cold = Cold(f"{log_path}-cold")
        cold.add([write_segment(log_path, cold.folder, 101, 500)], epoch_of(log_path))
        trim(log, 400)

        assert log.low_water() == 100
        assert offsets(follow(log, KeySet.all())) == list(range(101, EVENTS + 1))
        assert offsets(follow(log, KeySet.all(), Span(100, 102))) == [101, 102]
        for attempt in (log.read, lambda keys, span, limit: log.narrow(span)):
            with pytest.raises(LogTrimmed) as caught:
                attempt(KeySet.all(), Span(99), 10)
            assert (caught.value.after, caught.value.low_water) == (99, 100)


def test_a_gap_between_tier_and_file_is_never_read_over(log_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(log_path)
    with opened(log_path) as log, caplog.at_level(logging.WARNING, "zbus"):
        offload(log_path, 300)
        trim(log, 400)

        assert log.low_water() == 400
        assert offsets(follow(log, KeySet.all())) == list(range(401, EVENTS + 1))
        assert offsets(follow(log, KeySet.all(), Span(from_ns=START)))[0] == 401
        assert offsets(follow(log, KeySet.all(), Span(100, 300))) == list(range(101, 301))
        for span in (Span(100), Span(100, from_ns=START + 4 * DAY), Span(300), Span(350)):
            with pytest.raises(LogTrimmed) as caught:
                follow(log, KeySet.all(), span)
            assert caught.value.low_water == 400
        reported = [each for each in caplog.records if "LOG_COLD_GAP" in each.getMessage()]
        assert [(each.zbus["first"], each.zbus["last"]) for each in reported] == [(301, 400)]


# Memory.


def test_large_events_in_one_row_group_are_read_in_bounded_memory(log_path: Path) -> None:
    size, count = 1 << 20, 96
    with opened(log_path) as log:
        for number in range(count):
            append(log, [Row(1, number, START, f"{'ab'[number % 2]}/x", bytes([number]) * size, None)])
        offload(log_path, count)
        trim(log, count)
        after, highest, before = 0, 0, pyarrow.total_allocated_bytes()
        while after < count:
            page = log.read(KeySet.all(), Span(after), 2000)
            highest = max(highest, pyarrow.total_allocated_bytes() - before)
            assert [event.payload[0] for event in page.events()[0]] == list(range(after, page.covered))
            after = page.covered
            del page

        assert highest < 48 * size


# The bus, and the command line.


async def replayed(bus: zbus.Bus, *keys: str, **more: Any) -> list[int]:
    return [event.offset async for event in bus.replay(*keys, **more)]


async def test_a_replay_and_a_subscriber_from_the_beginning_get_cold_then_live_exactly_once(log_path: Path) -> None:
    async with zbus.open(log_path) as bus, zbus.open(log_path, read_only=True) as reader:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"%d" % number for number in range(6000)])
        offload(log_path, 2500, 5500)
        await node_of(bus).run(trim, node_of(bus).log, 5000)
        assert await replayed(bus, "**") == list(range(1, 6001))
        for each in (bus, reader):
            async with each.subscribe("a/*", start="beginning") as subscription, asyncio.timeout(30):
                found = [(await anext(subscription)).offset for _ in range(5800)]
                await node_of(bus).run(trim, node_of(bus).log, 5500)
                head = await publisher.publish(b"live")
                found += [(await anext(subscription)).offset for _ in range(head - 5800)]
                assert found == list(range(1, head + 1))


async def test_a_durable_name_that_was_behind_continues_from_the_tier(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b""] * 1000)
        async with bus.subscribe("**", durable="billing", start="beginning") as subscription:
            await (await anext(subscription)).ack()
        offload(log_path, 900)
        await node_of(bus).run(trim, node_of(bus).log, 900)
        async with bus.subscribe("**", durable="billing") as subscription, asyncio.timeout(30):
            assert [(await anext(subscription)).offset for _ in range(999)] == list(range(2, 1001))


async def test_a_subscriber_starts_at_a_time_in_the_tier_exactly(log_path: Path) -> None:
    fill(log_path)
    moment = datetime.fromtimestamp((START + DAY) // 1_000_000_000, UTC)
    async with zbus.open(log_path, read_only=True) as bus:
        async with bus.subscribe("**", start=moment) as subscription:
            expected = [(await anext(subscription)).offset for _ in range(100)]
    with opened(log_path) as log:
        offload(log_path, 200, 800)
        trim(log, 800)
    async with zbus.open(log_path, read_only=True) as bus:
        async with bus.subscribe("**", start=moment) as subscription, asyncio.timeout(30):
            assert [(await anext(subscription)).offset for _ in range(100)] == expected


def test_other_nodes_are_served_out_of_the_tier(log_path: Path) -> None:
    fill(log_path)
    with opened(log_path) as log:
        offload(log_path, 800)
        trim(log, 800)
        bodies = list(LogService(log, 1).page(msgspec.msgpack.encode((["c:d/**"], 0, 0, False))))

    served = [envelope.sequence for body in bodies[:-1] for envelope in open_frame(body)]
    assert served[:2] == [number for number in range(1, EVENTS) if make_row(number).key == "c:d/x"][:2]


async def test_the_folder_of_the_tier_can_be_another_one(log_path: Path, tmp_path: Path) -> None:
    fill(log_path)
    with opened(log_path) as log:
        offload(log_path, 800, folder=tmp_path / "elsewhere")
        trim(log, 800)
        assert log.low_water() == 800
    async with zbus.open(log_path, read_only=True, cold_dir=str(tmp_path / "elsewhere")) as bus:
        assert (await replayed(bus, "shop/**"))[0] < 10


def command(*arguments: object) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "zbus", "log", *map(str, arguments)], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_command_line_replays_and_tails_out_of_the_tier(log_path: Path) -> None:
    with blocking.open(log_path) as bus:
        bus.publisher("a/rare").publish(b"first")
        bus.publisher("a/b").publish_many([b""] * 500)
    offload(log_path, 200, 501)
    with opened(log_path) as log:
        trim(log, 501)

    assert [line["offset"] for line in command("replay", log_path)] == list(range(1, 502))
    assert [line["offset"] for line in command("replay", log_path, "--after", 199, "--until", 202)] == [200, 201, 202]
    assert [line["offset"] for line in command("tail", log_path, "-n", 3)] == [499, 500, 501]
    assert [line["offset"] for line in command("tail", log_path, "-n", 3, "--key", "a/rare")] == [1]


NO_SPARK = """
import asyncio, sys
for name in ("pyspark", "py4j", "zbus_spark", "pyspark_zbus", "adbc_driver_sqlite", "adbc_driver_manager"):
    sys.modules[name] = None  # as if it were not installed
import zbus
from zbus.cli.app import run

async def main(path):
    async with zbus.open(path) as bus:
        print(bus._node.log.low_water(), [event.offset async for event in bus.replay("**")])

asyncio.run(main(sys.argv[1]))
sys.exit(run(["log", "replay", sys.argv[1]]))
"""


def test_a_replay_reaches_into_the_tier_with_no_spark_installed(log_path: Path) -> None:
    command = [sys.executable, "-c", NO_SPARK, str(log_path)]
    fill(log_path)
    before = subprocess.run(command, capture_output=True, text=True, timeout=60)
    with opened(log_path) as log:
        offload(log_path, 800)
        trim(log, 800)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == before.returncode == 0, done.stderr
    assert done.stdout == before.stdout
    assert len(done.stdout.splitlines()) > 500


WITHOUT = """
import asyncio, sys
sys.modules["pyarrow"] = None  # as if it were not installed
import zbus

async def main(path):
    async with zbus.open(path) as bus:
        print(bus._node.log.low_water(), await bus.head(), (await (await bus.publisher("a/b")).publish(b"x")))
        print([event.offset async for event in bus.replay("**", after=890)])
        try:
            async for event in bus.replay("**"):
                print("not reached")
        except zbus.ConfigInvalid as error:
            print(error)

asyncio.run(main(sys.argv[1]))
"""


def test_only_reading_from_the_tier_needs_pyarrow_and_says_how_to_install_it(log_path: Path) -> None:
    fill(log_path)
    with opened(log_path) as log:
        offload(log_path, 800)
        trim(log, 800)
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(log_path)], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "0 900 901"
    assert json.loads(second)[-1] == 901
    assert third == "cold: reading the cold tier needs pyarrow: pip install 'pyarrow>=20'"
