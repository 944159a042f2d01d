"""The time of age retention: a clock that jumps moves it slowly, also across restarts, and is reported once."""

from __future__ import annotations

import pytest

from zbus_log.age_clock import AgeClock, ClockState

S = 1_000_000_000
DAY = 86_400 * S
START = 1_800_000_000 * S
AGE_S = 7 * 86_400.0


class Machine:
    """A machine whose clock can be set."""

    def __init__(self) -> None:
        self.wall, self.steady = START, 5 * S

    def clock(self, newest_ns: int | None = None, stored: ClockState | None = None, age_s: float = AGE_S) -> AgeClock:
        return AgeClock(stored, newest_ns, [age_s], wall_ns=lambda: self.wall, steady_ns=lambda: self.steady)

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
    assert clock.take_jump() is None


def test_a_clock_that_jumps_ahead_is_followed_at_twice_the_speed_and_reported_once() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += 365 * DAY
    jumps: list[int | None] = []
    for number in range(1, 11):
        machine.passes(15)
        assert clock.now_ns() == START + 2 * 15 * number * S
        jumps.append(clock.take_jump())

    assert jumps == [365 * DAY - 15 * S, *[None] * 9]


def test_retention_catches_up_with_a_clock_that_was_set_right() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += 600 * S
    jumps = 0
    for _ in range(60):
        machine.passes(15)
        clock.now_ns()
        jumps += clock.take_jump() is not None

    assert clock.now_ns() == machine.wall
    machine.wall += 600 * S
    machine.passes(15)
    clock.now_ns()
    jumps += clock.take_jump() is not None
    assert jumps == 2  # another jump is another report


def test_a_clock_that_jumps_back_removes_nothing_early_and_is_believed_again_when_it_is_right() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall -= 365 * DAY
    machine.passes(3600)

    assert clock.now_ns() == machine.wall
    assert clock.take_jump() == -365 * DAY
    machine.wall += 365 * DAY
    machine.passes(15)
    assert clock.now_ns() == machine.wall
    assert clock.state == ClockState(machine.wall)


@pytest.mark.parametrize("jump", [365 * DAY, -365 * DAY])
def test_a_clock_that_differs_for_as_long_as_events_are_kept_is_believed(jump: int) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += jump
    for _ in range(8 * 24):
        machine.passes(3600)
        clock.now_ns()

    assert clock.now_ns() == machine.wall
    assert clock.state == ClockState(machine.wall)


def test_a_clock_that_is_set_again_is_not_believed_sooner() -> None:
    machine = Machine()
    clock = machine.clock()
    for _ in range(2):
        machine.wall += 365 * DAY
        machine.passes(15)
        clock.now_ns()

    assert clock.now_ns() == START + 60 * S


@pytest.mark.parametrize(
    ("newest", "now"),
    [
        (START - 3 * DAY, START),  # the log was closed for three days
        (START - 30 * DAY, START - 30 * DAY + 7 * DAY // 2),  # longer than its events are kept, or the clock is wrong
        (START + 365 * DAY, START),  # the clock is a year behind the events, or was ahead when they were published
        (START + 30 * S, START),  # as clocks differ
        (None, START),
    ],
)
def test_the_newest_events_of_a_log_without_a_stored_time_show_it_when_it_is_opened(
    newest: int | None, now: int
) -> None:
    assert Machine().clock(newest).now_ns() == now


def test_a_wrong_clock_does_not_become_right_by_restarts_whatever_is_published() -> None:
    machine = Machine()
    stored = machine.clock().state
    machine.wall += 365 * DAY
    for _ in range(100):
        clock = machine.clock(machine.wall, stored)
        machine.passes(60)
        clock.now_ns()
        stored = clock.state

    assert clock.take_jump() is not None
    assert START < stored.time_ns < START + 4 * DAY


def test_after_a_clock_that_was_ahead_is_set_right_retention_continues_where_it_was() -> None:
    machine = Machine()
    stored = machine.clock().state
    machine.wall += 365 * DAY
    stored = machine.clock(machine.wall, stored).state
    machine.wall -= 365 * DAY
    clock = machine.clock(START + 365 * DAY, stored)
    machine.passes(8 * 86_400)

    assert clock.now_ns() == machine.wall


def test_a_service_that_runs_for_a_minute_a_day_does_not_keep_events_of_an_hour_for_good() -> None:
    machine = Machine()
    stored: ClockState | None = None
    for _ in range(5):
        clock = machine.clock(None, stored, age_s=3600)
        machine.passes(60)
        now = clock.now_ns()
        stored = clock.state
        assert machine.wall - now < 2 * DAY
        machine.passes(86_400)


def test_an_idle_log_stores_the_time_only_now_and_then() -> None:
    machine = Machine()
    clock = machine.clock()
    stored = clock.state
    assert clock.is_due(None)
    machine.passes(3600)
    clock.now_ns()
    assert not clock.is_due(stored)
    machine.passes(86_400)
    clock.now_ns()
    assert clock.is_due(stored)
