"""The job `gaps`: missing, late and duplicate events of each publisher."""

from __future__ import annotations

import random

import pytest
from pipeline_support import Stored, frame, plain

from zbus_spark.jobs import gaps

Finding = tuple[int, str, int, int, int]


def expected(events: list[Stored], announced: dict[int, int], low_water: int) -> list[Finding]:
    """The same in plain Python, event by event."""
    found: list[Finding] = []
    for publisher in {event.publisher_id for event in events} | announced.keys():
        stored = [event.sequence for event in events if event.publisher_id == publisher]
        missing = sorted(set(range(max([*stored, announced.get(publisher, -1)]) + 1)) - set(stored))
        ranges: list[list[int]] = []
        for sequence in missing:
            # A range ends at the first and at the last stored event.
            if ranges and ranges[-1][-1] == sequence - 1:
                ranges[-1].append(sequence)
            else:
                ranges.append([sequence])
        for each in ranges:
            where = "between"
            if not stored:
                where = "trimmed" if low_water else "after_last"
            elif each[0] < min(stored):
                where = "trimmed" if low_water else "before_first"
            elif each[0] > max(stored):
                where = "after_last"
            found.append((publisher, where, each[0], each[-1], len(each)))
        again = [sequence for place, sequence in enumerate(stored) if sequence in stored[:place]]
        late = [
            sequence
            for place, sequence in enumerate(stored)
            if sequence not in stored[:place] and any(other > sequence for other in stored[:place])
        ]
        for name, sequences in (("late", late), ("duplicate", again)):
            if sequences:
                found.append((publisher, name, min(sequences), max(sequences), len(sequences)))
    return sorted(found, key=lambda each: (each[0], each[2], each[1]))


def found_in(events: list[Stored], announced: dict[int, int] | None = None, low_water: int = 0) -> list[Finding]:
    return plain(gaps(frame(events), announced, low_water).collect())


def of(publisher_id: int, *sequences: int) -> list[Stored]:
    return [Stored(publisher_id, sequence) for sequence in sequences]


def test_missing_events_are_listed_before_the_first_between_and_after_the_last() -> None:
    assert found_in(of(7, 3, 4, 8, 9, 11), {7: 20}) == [
        (7, "before_first", 0, 2, 3),
        (7, "between", 5, 7, 3),
        (7, "between", 10, 10, 1),
        (7, "after_last", 12, 20, 9),
    ]


def test_late_and_duplicate_events_are_counted_and_are_not_missing() -> None:
    assert found_in(of(7, 0, 3, 1, 2, 2, 3, 4)) == [(7, "late", 1, 2, 2), (7, "duplicate", 2, 3, 2)]


def test_events_that_retention_removed_do_not_count_as_missing() -> None:
    assert found_in(of(7, 3, 5), {9: 4}, low_water=100) == [
        (7, "trimmed", 0, 2, 3),
        (7, "between", 4, 4, 1),
        (9, "trimmed", 0, 4, 5),
    ]


def test_a_publisher_known_only_from_beacons_lacks_all_events() -> None:
    assert found_in(of(7, 0), {9: 4}) == [(9, "after_last", 0, 4, 5)]


def test_a_complete_publisher_has_no_findings_even_if_beacons_are_behind() -> None:
    assert found_in(of(1, *range(100)) + of(2, 0) + of(3, 0, 1, 2), {1: 99, 2: 0, 3: 1}) == []


def test_the_largest_possible_numbers_do_not_overflow() -> None:
    top = (1 << 63) - 1

    assert found_in(of(top, top, top)) == [(top, "before_first", 0, top - 1, top), (top, "duplicate", top, top, 1)]


@pytest.mark.parametrize("low_water", [0, 17], ids=["a whole log", "a trimmed log"])
def test_findings_equal_those_of_a_check_of_all_events(low_water: int) -> None:
    dice = random.Random(low_water)
    publishers = [*range(1, 60), -3, 1 << 62]
    events = [
        Stored(publisher, sequence)
        for publisher in publishers
        for sequence in dice.choices(range(dice.randrange(4, 40)), k=dice.randrange(1, 50))
    ]
    dice.shuffle(events)
    events += [
        Stored(publisher, sequence) for publisher in range(70, 90) for sequence in range(30) if dice.random() < 0.8
    ]
    announced = {publisher: dice.randrange(60) for publisher in dice.sample([*publishers, 101, 102, 103], 40)}

    assert found_in(events, announced, low_water) == expected(events, announced, low_water)


def test_events_are_shuffled_once_for_both_orders() -> None:
    plan = gaps(frame(of(1, 0, 5)))._jdf.queryExecution().executedPlan().toString()

    assert plan.count("Exchange hashpartitioning(publisher_id") == 1
