"""The replay service: pages of a log for other nodes, each with how far it reaches and what is not in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from log_support import append, raw
from msgspec.structs import replace

from zbus.errors import LogError, NoResponders, TransportError
from zbus.event import Event, Provenance
from zbus.headers import encode_headers
from zbus.keys import KeySet
from zbus.mesh.log_service import (
    ENDLESS,
    LOGS,
    PAGE_EVENTS,
    PAGE_EVENTS_MAX,
    LogPage,
    LogService,
    request_log_info,
    request_page,
)
from zbus.ports.lineage import NO_MARK, Mark, digest_number
from zbus.ports.log import Row, Span
from zbus_log import Rules, SqliteLog

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


@pytest.fixture
def log(log_path: Path) -> Iterator[SqliteLog]:
    opened = SqliteLog(str(log_path))
    yield opened
    opened.close(5.0)


def row(sequence: int, key: str = "shop/orders", at: int = 0, headers: bytes | None = None) -> Row:
    return Row(7, sequence, at or 1_000 + sequence, key, b"%d" % sequence, headers)


def recorded(sequence: int, key: str = "shop/orders") -> Row:
    """What another node published and this one recorded."""
    tenant = encode_headers({"tenant": "x"}, None, None)
    return replace(row(sequence, key, headers=tenant), provenance=Provenance(5, 900 + sequence))


class Asking:
    """Asks a service without a network in between."""

    def __init__(self, log: SqliteLog, other_logs: tuple[int, ...] = ()) -> None:
        self.service, self.origin = LogService(log, log.log_id, other_logs=lambda: other_logs), log.log_id

    async def ask(self, key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        for reply in (self.service.info if key == LOGS else self.service.page)(body):
            yield reply

    async def page(self, after: int = 0, keys: tuple[str, ...] = ("**",), from_ns: int = 0, **more: Any) -> LogPage:
        return await request_page(self.ask, self.origin, keys, after, from_ns, 5.0, **more)


def offsets(page: LogPage) -> list[int]:
    return [envelope.offset for envelope in page.envelopes]


def stored(log: SqliteLog) -> list[Event]:
    return log.read(KeySet.all(), Span(), 10_000).events()[0]


async def test_all_that_a_log_has_arrives_exactly_as_it_is_stored(log: SqliteLog) -> None:
    tenant = encode_headers({"tenant": "y"}, "c-1", None)
    append(log, [row(0), row(1, headers=tenant), recorded(2), row(3, "shop/@inner/key"), row(4, "audit/x")])

    page = await Asking(log).page(keys=(), own=False)

    events = [envelope.event(envelope.offset) for envelope in page.envelopes]
    assert events == stored(log)
    assert [event.offset for event in events] == [1, 2, 3, 4, 5]
    assert events[1].headers == {"tenant": "y", "correlation-id": "c-1"}
    assert events[2].headers == {"tenant": "x"}
    assert events[2].identity == (7, 2)
    assert {envelope.topic for envelope in page.envelopes} == {"orders", "key", "x"}


async def test_what_was_recorded_of_others_is_sent_only_where_all_is_requested(log: SqliteLog) -> None:
    append(log, [row(0), recorded(1), row(2)])
    asking = Asking(log)

    assert offsets(await asking.page()) == [1, 3]
    assert offsets(await asking.page(own=False)) == [1, 2, 3]


@pytest.mark.parametrize("until", [1, 5, 9, 10])
async def test_a_page_never_goes_beyond_the_end_requested_and_covers_it(log: SqliteLog, until: int) -> None:
    append(log, [row(n, "shop/orders" if n % 2 else "audit/x") for n in range(10)])
    asking = Asking(log)

    everything = await asking.page(until=until)
    some = await asking.page(keys=("audit/**",), until=until)

    assert offsets(everything) == list(range(1, until + 1))
    assert offsets(some) == list(range(1, until + 1, 2))
    assert everything.covered == some.covered == until
    assert everything.head == some.head == 10


@pytest.mark.parametrize("after", [3, 10, 11, ENDLESS])
async def test_an_end_that_is_passed_already_is_an_empty_page(log: SqliteLog, after: int) -> None:
    append(log, [row(n) for n in range(10)])

    page = await Asking(log).page(after=after, until=3)

    assert (page.envelopes, page.covered, page.head) == ([], 3, 10)


@pytest.mark.parametrize(
    ("from_ns", "to_ns", "expected"),
    [
        (1_004, ENDLESS, [5, 6, 7, 8]),
        (0, 1_002, [1, 2, 3]),
        (1_003, 1_005, [4, 5, 6]),
        (0, 5, []),
        (9_999, ENDLESS, []),
    ],
    ids=["from", "to", "both", "before-all", "after-all"],
)
async def test_times_choose_events_and_the_end_is_covered_all_the_same(
    log: SqliteLog, from_ns: int, to_ns: int, expected: list[int]
) -> None:
    append(log, [row(n) for n in range(10)])

    page = await Asking(log).page(from_ns=from_ns, to_ns=to_ns, until=8)

    assert offsets(page) == expected
    assert page.covered == 8


async def test_corrupt_events_are_left_out_and_counted(log: SqliteLog, log_path: Path) -> None:
    append(log, [row(n) for n in range(10)])
    connection = raw(log_path)
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET payload = x'00' WHERE offset IN (3, 6)")
    connection.close()
    asking = Asking(log)

    page, clean = await asking.page(), await asking.page(after=6)

    assert (offsets(page), page.skipped, page.covered) == ([1, 2, 4, 5, 7, 8, 9, 10], 2, 10)
    assert clean.skipped == 0


async def test_what_retention_removed_is_reported_by_the_low_water_mark(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10)])
    log.prune(Rules(max_events=4))

    page, gone = await Asking(log).page(after=2, until=8), await Asking(log).page(after=2, until=5, from_ns=1)

    assert (page.low_water, offsets(page), page.covered) == (6, [7, 8], 8)
    assert (gone.low_water, offsets(gone), gone.covered) == (6, [], 5)


async def test_pages_are_as_large_as_the_asker_takes_them_up_to_a_limit(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10_000)])
    asking = Asking(log)
    for _ in range(4):  # the log finds out how many events of this size are a page
        await asking.page(events=PAGE_EVENTS_MAX)

    assert len((await asking.page()).envelopes) == PAGE_EVENTS
    assert len((await asking.page(events=0)).envelopes) == 1
    assert offsets(await asking.page(events=1_000_000)) == list(range(1, PAGE_EVENTS_MAX + 1))


@pytest.mark.parametrize("page_request", [(["**"], 2, 0), (["**"], 2, 0, True)], ids=["three-fields", "four-fields"])
def test_a_request_of_an_earlier_version_is_answered_up_to_the_head(
    log: SqliteLog, page_request: tuple[Any, ...]
) -> None:
    append(log, [row(0), recorded(1), row(2), row(3)])

    *frames, last = LogService(log, log.log_id).page(encode(page_request))

    assert len(frames) == 1
    assert decode(last[1:])[:3] == [4, 4, 0]


async def test_a_page_that_reaches_the_head_has_a_mark_and_the_log_compares_it_later(log: SqliteLog) -> None:
    append(log, [row(number) for number in range(10)])
    reverted: list[Mark] = []
    service = LogService(log, log.log_id, on_reverted=reverted.append)

    async def ask(key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        for each in service.page(body):
            yield each

    async def page(mark: Mark | None = None, **more: Any) -> LogPage:
        return await request_page(ask, log.log_id, ("**",), 0, 0, 5.0, mark=mark, **more)

    own = log.lineage.current
    mark = (await page()).mark
    assert (mark.incarnation, mark.offset, mark.digest) == (own.id, 10, digest_number(log.digest(10)))
    assert (await page(probe=True)).mark == mark
    assert (await page(events=3)).mark == NO_MARK
    append(log, [row(number) for number in range(10, 15)])
    assert (await page(mark)).differs_after is None
    assert (await page(Mark(own.id, 10, 0))).differs_after == own.first - 1  # no log has this digest
    assert reverted == [Mark(own.id, 10, 0)]
    assert (await page(Mark(own.id, 16, 5))).differs_after == own.first - 1  # it does not reach so far any more
    assert reverted[1:] == [Mark(own.id, 16, 5)]
    assert (await page(Mark(own.id + 1, 16, 5))).differs_after is None  # an incarnation that it does not know
    log.begin_incarnation()
    assert (await page(mark)).differs_after is None
    append(log, [row(number) for number in range(15, 20)])
    assert (await page(Mark(own.id, 17, 5))).differs_after == own.first - 1  # its lineage shows it as well
    assert len(reverted) == 2


async def test_a_page_says_whether_retention_removed_events_of_the_requested_time(log: SqliteLog) -> None:
    append(log, [row(number) for number in range(10)])
    asking = Asking(log)
    assert not (await asking.page()).lacks
    log.prune(Rules(max_events=4))
    low_water = log.low_water()
    assert 0 < low_water < 10

    assert (await asking.page()).lacks
    assert (await asking.page(low_water - 1)).lacks
    assert not (await asking.page(low_water)).lacks
    assert (await asking.page(from_ns=1_000)).lacks  # the oldest event that is left is later
    assert not (await asking.page(from_ns=1_000 + low_water + 2)).lacks


async def test_a_log_that_cannot_read_its_digest_compares_nothing(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, [row(0)])

    def fail(self: SqliteLog, offset: int) -> bytes:
        raise LogError("the disk fails")

    monkeypatch.setattr(SqliteLog, "digest", fail)
    found = await request_page(Asking(log).ask, log.log_id, ("**",), 0, 0, 5.0, mark=Mark(log.lineage.current.id, 1, 5))

    assert (found.mark.digest, found.differs_after, len(found.envelopes)) == (0, None, 1)


def test_fields_that_a_later_version_adds_to_a_request_are_ignored(log: SqliteLog) -> None:
    append(log, [row(0)])

    later = encode((["**"], 0, 0, False, 1, ENDLESS, 10, {}, False, [], None, 0, True, "new", 5))
    _, last = LogService(log, log.log_id).page(later)

    assert decode(last[1:])[:4] == [1, 1, 0, 0]


async def test_an_answer_of_an_earlier_version_counts_nothing_as_skipped() -> None:
    async def ask(key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        yield b"\0" + encode((4, 9, 1))

    assert await request_page(ask, 5, ("**",), 0, 0, 5.0) == LogPage([], 4, 9, 1, 0)


@pytest.mark.parametrize(("end", "is_asked"), [((4, 4, 0), True), ((4, 4, 0, 0, [9, 1, 9]), False)])
async def test_a_node_that_went_back_to_the_first_version_is_asked_without_an_incarnation(
    end: tuple[Any, ...], is_asked: bool
) -> None:
    asked: list[str] = []

    async def ask(key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        asked.append(key)
        if len(asked) == 1:
            raise NoResponders(key)
        yield b"\0" + encode(end)

    page = request_page(ask, 5, ("**",), 0, 0, 5.0, incarnation=7)

    if is_asked:
        assert (await page).covered == 4
    else:  # another incarnation of the log replied
        with pytest.raises(NoResponders):
            await page
    assert asked == ["@zbus/log/5/7", "@zbus/log/5"]


async def test_replies_that_bring_no_event_are_no_page_however_long_they_go_on() -> None:
    asked = 0

    async def ask(key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b"\x02\x90"  # a frame of no events

    with pytest.raises(TransportError, match="without events"):
        await request_page(ask, 5, ("**",), 0, 0, 5.0)
    assert asked == 1


async def test_a_page_has_no_more_parts_than_events_and_its_end() -> None:
    async def ask(key: str, body: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        while True:
            yield b"\0" + encode((4, 9, 1))

    with pytest.raises(TransportError, match="parts"):
        await request_page(ask, 5, ("**",), 0, 0, 5.0, events=10)


async def test_a_log_reports_its_origin_its_bounds_and_which_other_logs_it_has_events_of(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10)])
    log.prune(Rules(max_events=4))

    reported = await request_log_info(Asking(log, (11, 13)).ask, 5.0)

    assert (reported.origin, reported.head, reported.low_water, reported.other_logs) == (log.log_id, 10, 6, (11, 13))


def test_the_command_line_prints_the_origin_by_which_nodes_know_a_log(log: SqliteLog, log_path: Path) -> None:
    command = [sys.executable, "-m", "zbus", "log", "stats", str(log_path)]

    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    metrics = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=60)

    assert f"{log.log_id:x}" in table.stdout
    assert json.loads(metrics.stdout)["origin"] == f"{log.log_id:x}"


async def test_removed_events_are_not_in_a_page_and_do_not_count_as_corrupt(log: SqliteLog) -> None:
    append(log, [row(n, f"shop/{n % 3}") for n in range(30)])
    log.purge(KeySet(["shop/1", "shop/2"]))

    page = await Asking(log).page(after=5)

    assert offsets(page) == list(range(7, 31, 3))
    assert (page.covered, page.head, page.low_water, page.skipped) == (30, 30, 0, 0)
