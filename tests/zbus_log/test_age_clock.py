"""The time of age retention: a clock that jumps moves it slowly, and it is reported once."""

from __future__ import annotations

import pytest

from zbus_log.age_clock import AgeClock

S = 1_000_000_000
DAY = 86_400 * S
START = 1_800_000_000 * S


class Machine:
    """A machine whose clock can be set."""

    def __init__(self) -> None:
        self.wall, self.steady = START, 5 * S
        self.reports: list[tuple[int, int]] = []

    def clock(self, newest_ns: int | None = None, age_s: float = 7 * 86_400) -> AgeClock:
        def report(wall: int, used: int) -> None:
            self.reports.append((wall, used))

        return AgeClock(newest_ns, age_s, report, wall_ns=lambda: self.wall, steady_ns=lambda: self.steady)

    def passes(self, seconds: float) -> None:
        self.wall += int(seconds * S)
        self.steady += int(seconds * S)


def test_a_clock_that_is_right_is_followed() -> None:
    machine = Machine()
    clock = machine.clock(START - 3600 * S)
    for _ in range(100):
        machine.passes(15)
        machine.wall += 5_000_000  # corrected a little all the time

        assert clock.now_ns() == machine.wall
    assert machine.reports == []


def test_a_clock_that_jumps_ahead_is_followed_at_twice_the_speed_and_reported_once() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += 365 * DAY
    for number in range(1, 11):
        machine.passes(15)
        assert clock.now_ns() == START + 2 * 15 * number * S

    assert machine.reports == [(START + 365 * DAY + 15 * S, START + 30 * S)]


def test_retention_catches_up_with_a_clock_that_was_set_right() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += 600 * S
    for _ in range(60):
        machine.passes(15)
        clock.now_ns()

    assert clock.now_ns() == machine.wall
    machine.wall += 600 * S
    machine.passes(15)
    clock.now_ns()
    assert len(machine.reports) == 2  # another jump is another report


def test_a_clock_that_jumps_back_does_not_stop_retention() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall -= 365 * DAY
    machine.passes(3600)

    assert clock.now_ns() == START + 3600 * S
    assert len(machine.reports) == 1


@pytest.mark.parametrize(
    ("newest", "now"),
    [
        (START - 3 * DAY, START),  # the log was closed for three days
        (START - 30 * DAY, START - 30 * DAY + 7 * DAY // 2),  # longer than its events are kept, or the clock is wrong
        (START + 365 * DAY, START + 365 * DAY),  # the clock is a year behind the log
        (START + 30 * S, START),  # as clocks differ
        (None, START),
    ],
)
def test_the_newest_events_of_a_log_show_the_time_when_it_is_opened(newest: int | None, now: int) -> None:
    assert Machine().clock(newest).now_ns() == now
