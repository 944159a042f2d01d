"""The job `sessions`: events with the same value of a field, without a long pause between them."""

from __future__ import annotations

import json
import random
from functools import reduce
from typing import Any

import pytest
from pipeline_support import BEGIN_NS, Stored, at, frame, plain
from pyspark.sql import DataFrame

from zbus.errors import ConfigInvalid
from zbus_spark.jobs import sessions
from zbus_spark.jobs.sessions import value_of

SECOND = 1_000_000_000


def event(value: str | None, second: float, key: str = "a/b/c") -> Stored:
    headers = {} if value is None else {"session-id": value}
    return Stored(key=key, published_ns=BEGIN_NS + int(second * SECOND), headers=headers)


def found_in(events: list[Stored], by: str = "header:session-id", gap: str = "10s") -> list[tuple[Any, ...]]:
    return plain(sessions(frame(events), by, gap).collect())


def expected(events: list[Stored], gap_ns: int) -> list[tuple[Any, ...]]:
    """The same in plain Python, event by event."""
    by_value: dict[str | None, list[Stored]] = {}
    for each in events:
        by_value.setdefault(each.headers.get("session-id"), []).append(each)
    found = []
    for value, its in sorted(by_value.items(), key=lambda item: (item[0] is not None, item[0])):
        runs: list[list[Stored]] = []
        for each in sorted(its, key=lambda each: each.published_ns):
            if runs and (value is None or each.published_ns - runs[-1][-1].published_ns < gap_ns):
                runs[-1].append(each)
            else:
                runs.append([each])
        for number, run in enumerate(runs, 1):
            first, last = run[0].published_ns, run[-1].published_ns
            keys = sorted({each.key for each in run})
            number_shown = None if value is None else number
            found.append((value, number_shown, at(first), at(last), (last - first) // 1_000_000, len(run), keys))
    return found


def test_a_session_lasts_until_there_is_no_event_for_the_gap() -> None:
    events = [event("s1", 0), event("s1", 9.9, "a/x"), event("s1", 19.9), event("s2", 5), event("s1", 20)]

    assert found_in(events) == [
        ("s1", 1, at(BEGIN_NS), at(BEGIN_NS + 9_900_000_000), 9900, 2, ["a/b/c", "a/x"]),
        ("s1", 2, at(BEGIN_NS + 19_900_000_000), at(BEGIN_NS + 20 * SECOND), 100, 2, ["a/b/c"]),
        ("s2", 1, at(BEGIN_NS + 5 * SECOND), at(BEGIN_NS + 5 * SECOND), 0, 1, ["a/b/c"]),
    ]


def test_events_without_the_field_are_counted_in_a_row_of_their_own() -> None:
    events = [event(None, 0), event("", 0), event(None, 100, "a/x"), Stored(headers={"other": "1"})]

    found = found_in(events)

    assert [(row[0], row[1], row[5], row[6]) for row in found] == [
        (None, None, 3, ["a/b/c", "a/x"]),
        ("", 1, 1, ["a/b/c"]),
    ]


PAYLOADS = {
    "a field": ({"id": "u1"}, "payload:id", "u1"),
    "a field of a field": ({"user": {"id": "u1"}}, "payload:user.id", "u1"),
    "a number": ({"user": {"id": 17}}, "payload:user.id", "17"),
    "a name with a blank": ({"the user": 1}, "payload:the user", "1"),
    "null": ({"id": None}, "payload:id", None),
    "no such field": ({"id": 1}, "payload:name", None),
    "no object": ([1, 2], "payload:id", None),
    "a name with a dot is two names": ({"a.b": 1}, "payload:a.b", None),
}


def test_the_value_is_taken_from_the_payload() -> None:
    taken = [
        frame([Stored(payload=json.dumps(payload).encode())]).select(value_of(by).alias("value"))
        for payload, by, _ in PAYLOADS.values()
    ]

    found = [row["value"] for row in reduce(DataFrame.union, taken).collect()]

    assert dict(zip(PAYLOADS, found, strict=True)) == {case: value for case, (_, _, value) in PAYLOADS.items()}


def test_a_payload_that_is_not_json_has_no_field() -> None:
    events = [Stored(payload=payload) for payload in (b"", b"\xff\xfe\x00", b"{", b'{"id": "u', b"\xc3\x28")]

    ((value, session, *_, count, _),) = found_in(events, "payload:id")

    assert (value, session, count) == (None, None, 5)


@pytest.mark.parametrize(
    "by", ["session-id", "header:", "payload:", "payload:a[0]", "payload:a..b", "payload:'", "", "key:x"]
)
def test_an_invalid_field_is_rejected(by: str) -> None:
    with pytest.raises(ConfigInvalid, match="neither header:NAME nor payload:FIELD"):
        found_in([], by)


@pytest.mark.parametrize("gap", ["", "0s", "soon", "-1 minute", "1 fortnight", "5"])
def test_an_invalid_gap_is_rejected(gap: str) -> None:
    with pytest.raises(ConfigInvalid, match="not a duration"):
        found_in([], gap=gap)


def test_sessions_equal_those_computed_from_all_events() -> None:
    dice = random.Random(5)
    values = [*(f"s{number}" for number in range(20)), "ß", "", None]
    events = [
        event(
            dice.choice(values),
            dice.choice([dice.uniform(0, 300), dice.randrange(30) * 10]),
            dice.choice(["a/b", "a/c"]),
        )
        for _ in range(2000)
    ]

    assert found_in(events) == expected(events, 10 * SECOND)
