"""Pauses between attempts grow to a limit, are jittered, and start again after a success."""

from __future__ import annotations

import random

import pytest

from zbus.util.backoff import Backoff


def longest(low: float, high: float) -> float:
    return high


def shortest(low: float, high: float) -> float:
    return low


def test_pauses_double_up_to_the_limit() -> None:
    pauses = Backoff(0.05, 0.3, uniform=longest)

    assert [pauses.next() for _ in range(5)] == pytest.approx([0.05, 0.1, 0.2, 0.3, 0.3])


def test_a_pause_is_at_most_the_jitter_shorter() -> None:
    assert [Backoff(1.0, 8.0, 0.5, shortest).next(), Backoff(1.0, 8.0, 0.2, shortest).next()] == [0.5, 0.8]


def test_jitter_does_not_slow_the_growth() -> None:
    pauses = Backoff(1.0, 100.0, uniform=shortest)

    assert [pauses.next() for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]


def test_two_callers_do_not_try_again_in_step() -> None:
    first, second = (Backoff(1.0, 30.0, uniform=random.Random(seed).uniform) for seed in (1, 2))

    assert [first.next() for _ in range(5)] != [second.next() for _ in range(5)]


def test_after_a_success_the_pauses_start_small_again() -> None:
    pauses = Backoff(0.1, 5.0, uniform=longest)
    for _ in range(10):
        pauses.next()

    pauses.reset()

    assert pauses.next() == 0.1


def test_a_first_pause_over_the_limit_is_cut_to_it() -> None:
    assert Backoff(10.0, 2.0, uniform=longest).next() == 2.0


def test_an_outage_of_years_does_not_overflow() -> None:
    pauses = Backoff(0.1, 5.0, uniform=longest)
    for _ in range(5000):
        pauses.next()

    assert pauses.next() == 5.0
