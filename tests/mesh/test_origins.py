"""What a node knows of other logs: positions by incarnation, debts of the past, and copies."""

from __future__ import annotations

from zbus.mesh.origins import known_logs
from zbus.mesh.origins.incarnations import ENDED_S, LATE_S, Incarnations
from zbus.mesh.origins.known_logs import INCARNATIONS_MAX, KnownLogs
from zbus.ports.lineage import Branch, Incarnation, Lineage, Mark

FIRST, SECOND, THIRD = Branch(7, 1, 7), Branch(9, 101, 7), Branch(11, 101, 7)


# Positions and debts.


def test_a_position_belongs_to_an_incarnation_and_never_goes_back() -> None:
    logs = KnownLogs()
    logs.reached(5, 7, 100)
    logs.reached(5, 7, 90)
    logs.reached(5, 9, 20)

    assert logs.of(5) == {7: 100, 9: 20}
    assert logs.of(3) == {}


def test_the_incarnation_that_was_not_reached_for_longest_is_forgotten_first() -> None:
    logs = KnownLogs()
    for number in range(INCARNATIONS_MAX):
        logs.reached(5, number, 10)
    logs.reached(5, 0, 11)
    logs.reached(5, 99, 1)

    assert set(logs.of(5)) == {0, 99, *range(2, INCARNATIONS_MAX)}


def test_everything_is_loaded_from_the_names_that_are_stored() -> None:
    logs = KnownLogs()
    logs.reached(5, 7, 100)
    logs.reached(3, 0, 9)
    assert logs.owe(["a/**", "b"]) == {f"owed/{origin}/{each}": 0 for origin in (5, 3) for each in ("a/**", "b")}
    logs.fetched(5, "a/**", 40)
    logs.fetched(3, "b", None)
    loaded = KnownLogs()
    for name, value in logs.names().items():
        assert loaded.load(name, value)

    assert loaded.names() == logs.names()
    assert loaded.owed_by(5) == {"a/**": 40, "b": 0}
    assert loaded.owed_by(3) == {"a/**": 0}
    assert not loaded.load("since/a", 5)


def test_positions_of_the_first_version_have_no_incarnation_and_those_of_nodes_without_a_log_are_ignored() -> None:
    logs = KnownLogs()

    assert logs.load("from/5", 30)
    assert logs.load("from/6", 30)
    assert logs.of(5) == {0: 30}
    assert logs.of(6) == {}


def test_the_end_of_an_incarnation_is_remembered_but_not_stored() -> None:
    logs = KnownLogs()
    logs.reached(5, 7, 10)
    logs.settled(5, 7, 30)
    logs.settled(5, 9, 40)

    assert logs.of(5) == {7: 30, 9: 40}
    assert logs.names() == {"from/5/7": 10}
    logs.rewound(5, 20)
    assert logs.of(5) == {7: 20, 9: 20}
    logs.forget()
    assert logs.names() == {}


def test_the_mark_of_a_log_is_stored_with_its_position_and_forgotten_if_the_log_is_rewound() -> None:
    logs = KnownLogs()
    logs.marked(5, Mark(7, 100, 1 << 61))
    assert logs.names() == {}  # no position: nothing is compared
    logs.reached(5, 7, 90)
    logs.marked(5, Mark(9, 120, 3))

    assert logs.names() == {"from/5/7": 90, "digest/5/7": 1 << 61, "digest-at/5/7": 100}
    loaded = KnownLogs()
    for name, value in reversed(logs.names().items()):
        assert loaded.load(name, value)
    assert loaded.mark(5, FIRST) == loaded.mark(5, SECOND) == Mark(7, 100, 1 << 61)
    assert loaded.mark(5, Branch(13, 1, 13)) is None
    assert loaded.mark(3, FIRST) is None
    assert logs.mark(5, SECOND) == Mark(9, 120, 3)
    logs.rewound(5, 110)
    assert logs.mark(5, SECOND) == Mark(7, 100, 1 << 61)
    logs.rewound(5, 99)
    assert logs.mark(5, SECOND) is None


def test_a_position_in_an_incarnation_with_two_histories_ends_before_it() -> None:
    logs = KnownLogs()
    logs.reached(5, 7, 90)
    logs.reached(5, 9, 130)
    logs.settled(5, 9, 140)
    logs.marked(5, Mark(9, 120, 3))
    assert not logs.is_split(5, 9)

    logs.split(5, 9, 100)
    assert (logs.is_split(5, 9), logs.is_split(5, 7), logs.is_split(3, 9)) == (True, False, False)
    assert (logs.of(5), logs.mark(5, SECOND)) == ({7: 90, 9: 100}, None)
    logs.reached(5, 9, 150)
    logs.settled(5, 9, 150)
    logs.reached(5, 13, 160)

    assert logs.of(5) == {7: 90, 9: 100, 13: 160}
    assert logs.certain(5, {9: 200, 13: 200}) == {9: 100, 13: 200}
    for number in range(100, 100 + INCARNATIONS_MAX):
        logs.split(5, number, 0)
    assert not logs.is_split(5, 9)  # their number is bounded


def test_the_number_of_marks_of_a_log_is_bounded() -> None:
    logs = KnownLogs()
    for number in range(2 * INCARNATIONS_MAX):
        logs.marked(5, Mark(number, 10, 1))

    kept = [number for number in range(2 * INCARNATIONS_MAX) if logs.mark(5, Branch(number, 1, number)) is not None]
    assert kept == list(range(INCARNATIONS_MAX, 2 * INCARNATIONS_MAX))


def test_the_number_of_logs_is_bounded() -> None:
    before, known_logs.LOGS_MAX = known_logs.LOGS_MAX, 2
    try:
        logs = KnownLogs()
    finally:
        known_logs.LOGS_MAX = before
    for origin in (1, 3, 5):
        logs.reached(origin, 7, 1)

    assert [logs.of(origin) for origin in (1, 3, 5)] == [{}, {7: 1}, {7: 1}]


# Lineages.


def test_a_branch_shares_what_its_parent_had_before_it_began() -> None:
    assert SECOND.shared({7: 50}) == 50
    assert SECOND.shared({7: 180}) == 100
    assert SECOND.shared({9: 180, 7: 100}) == 180
    assert SECOND.shared({5: 180}) is None


def test_a_lineage_shares_the_newest_incarnation_that_both_know() -> None:
    lineage = Lineage((Incarnation(7, 1), Incarnation(9, 101), Incarnation(11, 201)))

    assert lineage.shared({7: 300}) == 100
    assert lineage.shared({7: 100, 9: 300}) == 200
    assert lineage.shared({9: 150, 11: 300}) == 300
    assert lineage.shared({13: 5}) is None
    assert lineage.branch == Branch(11, 201, 9)
    assert (lineage.until(7), lineage.until(9), lineage.until(13)) == (100, 200, None)


# Copies.


class Seen:
    """Incarnations under a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.copies: list[tuple[int, int, int]] = []
        self.logs = Incarnations(lambda: self.now, lambda *found: self.copies.append(found))

    def beacon(self, branch: Branch, head: int, digest: bytes = b"", proven: bool = True) -> None:
        self.logs.add(5, branch)
        if proven:
            self.logs.prove(5, branch.id)
        self.logs.check(5, branch, head, digest)


def test_a_restarted_log_is_no_copy_even_if_a_beacon_of_the_earlier_process_is_late() -> None:
    seen = Seen()
    seen.beacon(FIRST, 100)
    seen.beacon(SECOND, 100)
    seen.now += 2 * LATE_S
    seen.beacon(FIRST, 100)
    seen.beacon(SECOND, 120)

    assert seen.copies == []


def test_a_log_that_continues_after_another_incarnation_of_it_began_is_a_copy() -> None:
    seen = Seen()
    seen.beacon(FIRST, 100)
    seen.beacon(SECOND, 120)
    seen.now += LATE_S / 2
    seen.beacon(FIRST, 110)
    assert seen.copies == []  # it may be a late one
    seen.now += LATE_S
    seen.beacon(FIRST, 111)
    seen.beacon(FIRST, 112)

    assert seen.copies == [(5, 7, 9)]  # once


def test_an_incarnation_whose_log_does_not_reply_is_no_copy() -> None:
    seen = Seen()
    for _ in range(3):
        seen.beacon(SECOND, 120)
        seen.beacon(THIRD, 120, proven=False)
        seen.now += LATE_S

    assert seen.copies == []


def test_two_copies_of_one_backup_are_noticed_once_both_have_sent_beacons_for_a_while() -> None:
    seen = Seen()
    for _ in range(3):
        seen.beacon(SECOND, 120)
        seen.beacon(THIRD, 120)
        seen.now += LATE_S

    assert [set(found) for found in seen.copies] == [{5, 9, 11}]  # once


def test_a_backup_that_is_restored_after_another_one_has_ended_is_no_copy() -> None:
    seen = Seen()
    seen.beacon(SECOND, 120)
    seen.now += 2 * LATE_S
    for _ in range(3):
        seen.beacon(THIRD, 120)
        seen.now += LATE_S

    assert seen.copies == []


def test_two_digests_at_one_offset_of_one_incarnation_are_copies() -> None:
    seen = Seen()
    seen.beacon(FIRST, 100, b"one")
    seen.beacon(FIRST, 101, b"two")
    seen.beacon(FIRST, 100, b"one")
    assert seen.copies == []
    seen.beacon(FIRST, 100, b"other")

    assert seen.copies == [(5, 7, 7)]


def test_late_events_of_an_incarnation_belong_to_the_one_that_continues_it() -> None:
    seen = Seen()
    fourth = Branch(13, 151, 9)
    for branch in (FIRST, SECOND, fourth):
        assert seen.logs.add(5, branch)
    assert seen.logs.current(5, FIRST, 100) == FIRST  # nothing shows that the others exist
    for branch in (FIRST, SECOND, fourth):
        assert seen.logs.prove(5, branch.id)

    assert seen.logs.current(5, FIRST, 100) == fourth
    assert seen.logs.current(5, FIRST, 101) == FIRST
    assert seen.logs.current(5, SECOND, 150) == fourth
    assert seen.logs.current(5, SECOND, 151) == SECOND
    seen.now += ENDED_S
    assert seen.logs.current(5, FIRST, 100) == FIRST  # it still sends, so it has not ended
