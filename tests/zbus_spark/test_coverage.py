"""The job `coverage`: what one log has and another has not, by identity."""

from __future__ import annotations

import random
from typing import Any

from pipeline_support import Stored, frame, plain
from pyspark.sql import DataFrame

from zbus_spark.jobs import coverage
from zbus_spark.jobs.coverage import SEQUENCES_A_BUCKET, differing

Finding = tuple[int, int, str, int | None, int | None, str | None, str | None]


def compared(left: list[Stored], right: list[Stored]) -> list[Finding]:
    return plain(coverage(frame(left), frame(right)).collect())


def expected(left: list[Stored], right: list[Stored]) -> list[Finding]:
    """The same in plain Python, event by event."""
    sides: list[dict[tuple[int, int], tuple[int, Stored]]] = []
    for events in (left, right):
        side: dict[tuple[int, int], tuple[int, Stored]] = {}
        for offset, event in enumerate(events, 1):
            side.setdefault(event[:2], (offset, event))
        sides.append(side)
    ours, theirs = sides
    found: list[Finding] = []
    for identity in sorted(ours.keys() | theirs.keys()):
        offset, event = ours.get(identity, (None, None))
        other_offset, other = theirs.get(identity, (None, None))
        finding = "left_only" if other is None else "right_only" if event is None else "differs"
        if event and other and (event.key, event.payload) == (other.key, other.payload):
            continue
        keys = [each and each.key for each in (event, other)]
        found.append((*identity, finding, offset, other_offset, *keys))
    return found


def some(*sequences: int, **fields: Any) -> list[Stored]:
    return [Stored(7, sequence, **{"payload": b"%d" % sequence} | fields) for sequence in sequences]


def test_two_logs_with_the_same_events_in_another_order_have_no_findings() -> None:
    assert compared(some(*range(50)), some(*reversed(range(50)))) == []


def test_missing_and_different_events_are_listed_with_offsets_and_keys() -> None:
    left = some(0, 1, 2) + some(3, key="a/x", payload=b"same")
    right = some(1) + some(2, payload=b"other") + some(3, key="a/y", payload=b"same") + some(4)

    assert compared(left, right) == [
        (7, 0, "left_only", 1, None, "a/b/c", None),
        (7, 2, "differs", 3, 2, "a/b/c", "a/b/c"),
        (7, 3, "differs", 4, 3, "a/x", "a/y"),
        (7, 4, "right_only", None, 4, None, "a/b/c"),
    ]


def test_a_duplicate_event_is_not_a_difference_by_identity() -> None:
    assert compared(some(0, 1, 1), some(0, 1)) == []


def test_two_pairs_of_duplicates_do_not_hide_each_other_in_the_digests() -> None:
    assert [each[2] for each in compared(some(0, 0), some(1, 1))] == ["left_only", "right_only"]


def test_a_log_without_events_covers_nothing() -> None:
    assert [each[2] for each in compared(some(0, 1), [])] == ["left_only"] * 2


def test_events_of_equal_buckets_are_not_compared_one_by_one() -> None:
    every = range(8 * SEQUENCES_A_BUCKET)
    left, right = frame(some(*every)), frame(some(*every[:-1]))

    found = coverage(left, right)

    assert [tuple(row)[:3] for row in found.collect()] == [(7, every[-1], "left_only")]
    assert len(differing(left, right)) == 1
    assert rows_out(found, "LeftSemi") == [SEQUENCES_A_BUCKET, SEQUENCES_A_BUCKET - 1]


def test_two_equal_logs_compare_no_event_at_all() -> None:
    events = some(*range(2 * SEQUENCES_A_BUCKET))

    found = coverage(frame(events), frame(events))

    assert found.collect() == []
    assert sum(rows_out(found, "LeftSemi")) == 0


def test_findings_equal_those_of_a_comparison_of_all_events() -> None:
    dice = random.Random(5)

    def side() -> list[Stored]:
        events = [
            Stored(
                publisher,
                sequence * 400,
                dice.choice(["a/b", "a/b", "a/b", "a/c"]),
                payload=dice.choice([b"x"] * 9 + [b"y"]),
            )
            for publisher in (*range(1, 12), 1 << 60)
            for sequence in dice.sample(range(30), 25)
        ]
        dice.shuffle(events)
        return events

    left, right = side(), side()

    assert compared(left, right) == expected(left, right)


def rows_out(frame: DataFrame, kind: str) -> list[int]:
    """How many rows came out of each join of a kind, in the plan that was executed."""
    found: list[int] = []

    def walk(node: Any) -> None:
        name = node.getClass().getSimpleName()
        if name == "AdaptiveSparkPlanExec":
            return walk(node.executedPlan())
        if name.endswith("QueryStageExec"):
            return walk(node.plan())
        if "Join" in name and kind in node.simpleString(10_000):
            found.append(node.metrics().apply("numOutputRows").value())
        children = node.children()
        for place in range(children.size()):
            walk(children.apply(place))
        return None

    walk(frame._jdf.queryExecution().executedPlan())
    return found
