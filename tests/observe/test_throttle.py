"""A throttle lets each message through once in a time, and few of a flood."""

from __future__ import annotations

from zbus.observe.throttle import Throttle


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_key_is_due_once_in_a_time() -> None:
    throttle = Throttle(60.0, Clock())

    assert [throttle.due("a"), throttle.due("a"), throttle.due("b"), throttle.due("b")] == [True, False, True, False]


def test_a_key_is_due_again_when_its_time_is_over() -> None:
    clock = Clock()
    throttle = Throttle(60.0, clock)
    throttle.due("a")
    clock.now += 30.0
    throttle.due("b")

    clock.now += 29.9
    assert [throttle.due("a"), throttle.due("b")] == [False, False]
    clock.now += 0.1
    assert [throttle.due("a"), throttle.due("b")] == [True, False]


def test_messages_that_were_held_back_do_not_prolong_the_wait() -> None:
    clock = Clock()
    throttle = Throttle(1.0, clock)
    passed = 0
    for _ in range(100):
        passed += throttle.due()
        clock.now += 0.25

    assert passed == 25


def test_of_a_flood_of_keys_only_so_many_are_due() -> None:
    clock = Clock()
    throttle = Throttle(60.0, clock, keys_max=10)

    assert sum(throttle.due(number) for number in range(100)) == 10
    clock.now += 60.0
    assert throttle.due("after the flood")


def test_without_a_key_there_is_one_message() -> None:
    throttle = Throttle(1.0, Clock())

    assert [throttle.due(), throttle.due()] == [True, False]
