"""Logs with many keys: every expression finds the same events as matching each key, and no page sends the ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from log_support import append, sealed_blocks, wait_until

from zbus import BusConfig
from zbus.keys import KeySet, matches
from zbus.ports.log import Row, Span
from zbus_log import SqliteLog, open_log
from zbus_log.file.key_condition import EXPRESSIONS_MAX, condition_of
from zbus_log.file.key_table import IDS_MAX
from zbus_log.file.tables import BLOCK
from zbus_log.read.reader import SqliteReader, readable

KEYS = 3000
ODD_NAMES = (
    "ns3",
    "ns30",
    "ns3-x/1",
    "ns3/@admin/1",
    "ns3/Todo/@x",
    "ns30/Todo/1",
    "ns[3]/Todo/1",
    "it's/a/quote",
    "Todo/1",
    "1",
    "x/%_/1",
    "ns3/\U0010ffff/1",
    "ns3/é/1",
)
EXPRESSIONS = (
    "**",
    "ns3/**",
    "ns3",
    "ns3/*",
    "ns3/*/*",
    "ns3/@admin/**",
    "ns3/Todo/000003",
    "ns3/Todo/0$*3",
    "ns$*/**",
    "*/Todo/$*1",
    "**/1",
    "*/**/1",
    "ns[3]/**",
    "it's/**",
    "nothing/**",
)


def names() -> list[str]:
    return [*ODD_NAMES, *[f"ns{number % 10}/Todo/{number:06d}" for number in range(KEYS)]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in which every key has an event in a sealed block and another one in the tail, in another order."""
    path = tmp_path_factory.mktemp("log") / "app.db"
    log = open_log(BusConfig(log=str(path)))
    keys = names()
    order = [*keys, *keys[: BLOCK - len(keys)], *reversed(keys)]
    append(log, [Row(1, sequence, 1000 + sequence, key, key.encode(), None) for sequence, key in enumerate(order)])
    wait_until(lambda: sealed_blocks(path) == 1)
    log.close(5.0)
    return path


@pytest.fixture
def log(path: Path) -> Iterator[SqliteLog]:
    log = open_log(BusConfig(log=str(path), read_only=True))
    yield log
    log.close(5.0)


def read(log: SqliteLog, keys: KeySet, span: Span = Span(), limit: int = 700) -> list[tuple[int, str]]:  # noqa: B008
    found: list[tuple[int, str]] = []
    span = log.narrow(span)
    while span.until is not None and span.after < span.until:
        page = log.read(keys, span, limit)
        events, error, _ = page.events()
        assert error is None
        assert len(events) <= limit
        found += [(event.offset, event.key) for event in events]
        span = span._replace(after=page.covered)
    return found


@pytest.mark.parametrize("expressions", [(each,) for each in EXPRESSIONS] + [("ns3/**", "ns4/*/*"), EXPRESSIONS[1:]])
def test_an_expression_finds_exactly_the_keys_that_match(log: SqliteLog, expressions: tuple[str, ...]) -> None:
    everything = read(log, KeySet.all())

    found = read(log, KeySet(expressions))

    assert found == [each for each in everything if any(matches(expression, each[1]) for expression in expressions)]


def test_times_and_offsets_limit_the_events_of_many_keys(log: SqliteLog) -> None:
    keys, everything = KeySet(["ns3/**"]), read(log, KeySet.all())
    wanted = [each for each in everything if each[1] in keys]

    assert read(log, keys, Span(500, 5000)) == [each for each in wanted if 500 < each[0] <= 5000]
    assert read(log, keys, Span(from_ns=2000, to_ns=6000)) == [each for each in wanted if 1001 <= each[0] <= 5001]


def test_more_expressions_than_a_condition_can_have_are_matched(log: SqliteLog) -> None:
    keys = KeySet([f"ns{number % 10}/Todo/{number:06d}" for number in range(0, KEYS, 4)])
    assert len(keys.expressions) > max(EXPRESSIONS_MAX, IDS_MAX)

    assert read(log, keys) == [each for each in read(log, KeySet.all()) if each[1] in keys]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_condition_is_true_for_every_key_that_matches(path: Path, expression: str) -> None:
    engine, condition = readable(str(path)), condition_of(KeySet([expression]))
    with engine.connect() as connection:
        found = connection.exec_driver_sql(f"SELECT key FROM keys WHERE {condition.sql}", condition.values).scalars()
        chosen = set(found)
    engine.dispose()

    expected = {key for key in names() if matches(expression, key)}
    assert chosen >= expected
    assert not condition.exact or chosen == expected


def test_a_page_for_many_keys_does_not_send_their_ids(path: Path) -> None:
    engine = readable(str(path))
    try:
        choice = SqliteReader(str(path), engine).choose(KeySet(["ns3/**", "ns4/**", "ns5/**"]))
    finally:
        engine.dispose()

    assert sum(map(len, choice.values.values())) < 100


def test_a_key_that_is_added_later_is_found_too(tmp_path: Path) -> None:
    log = open_log(BusConfig(log=str(tmp_path / "app.db")))
    keys = KeySet(["ns3/**"])
    sequence = 0
    for number in (1, IDS_MAX, 1, 1):  # from a list of ids to a condition, and further
        append(log, [Row(1, sequence + each, 1, f"ns3/{sequence + each}", b"", None) for each in range(number)])
        append(log, [Row(2, sequence, 1, f"other/{sequence}", b"", None)])
        sequence += number

        assert [key for _, key in read(log, keys)] == [f"ns3/{each}" for each in range(sequence)]
    log.close(5.0)


def test_a_log_whose_keys_all_match_is_read_without_a_filter(path: Path) -> None:
    engine = readable(str(path))
    try:
        reader = SqliteReader(str(path), engine)
        everything, most = reader.choose(KeySet.all()), reader.choose(KeySet(["**"]))
        all_but_literal = reader.choose(KeySet(["**", "ns3/@admin/**", "ns3/Todo/@x"]))
    finally:
        engine.dispose()

    assert most != everything  # two keys have a segment that no wildcard matches
    assert all_but_literal == everything
