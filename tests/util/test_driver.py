"""The driver of step functions: it runs a step when it is due or woken, and loses no wake-up."""

from __future__ import annotations

import math
import threading
import time
from collections import deque

from zbus.util.driver import ThreadDriver
from zbus.util.runtime import REAL

DEADLINE_S = 10.0


def unexpected(error: BaseException, pause_s: float | None) -> None:
    raise AssertionError("no step fails here") from error


def test_a_step_runs_again_when_it_is_due_and_the_driver_ends_with_none() -> None:
    ran: list[float] = []

    def step() -> float | None:
        ran.append(time.monotonic())
        return None if len(ran) == 3 else ran[-1] + 0.02

    driver = ThreadDriver(step, "zbus-test", time.monotonic, unexpected)

    assert driver.join(DEADLINE_S)
    assert len(ran) == 3
    assert ran[2] - ran[0] >= 0.04


def test_a_step_that_is_due_already_runs_again_at_once() -> None:
    dues: list[float | None] = [-math.inf, 0.0, None]

    driver = ThreadDriver(lambda: dues.pop(0), "zbus-test", time.monotonic, unexpected)

    assert driver.join(DEADLINE_S)
    assert dues == []


def test_a_step_that_waits_for_ever_runs_when_it_is_woken() -> None:
    ran = threading.Semaphore(0)
    ended = False

    def step() -> float | None:
        ran.release()
        return None if ended else math.inf

    driver = REAL.driver(step, "zbus-test", unexpected)
    assert ran.acquire(timeout=DEADLINE_S)
    assert not driver.join(0.02)

    driver.wake()
    assert ran.acquire(timeout=DEADLINE_S)
    ended = True
    driver.wake()

    assert driver.join(DEADLINE_S)


def test_no_wake_up_during_a_step_is_lost() -> None:
    """Each item is put and announced while the step may run: the last one must be taken too."""
    items: deque[int] = deque()

    def step() -> float | None:
        while items:
            if items.popleft() < 0:
                return None
        return math.inf

    for _ in range(50):
        driver = ThreadDriver(step, "zbus-test", time.monotonic, unexpected)
        for item in (1, 2, 3, -1):
            items.append(item)
            driver.wake()
        assert driver.join(DEADLINE_S)


def test_a_wake_up_while_a_step_runs_leads_to_another_step() -> None:
    inside, go_on = threading.Event(), threading.Event()
    steps = 0

    def step() -> float | None:
        nonlocal steps
        steps += 1
        inside.set()
        go_on.wait(DEADLINE_S)
        return None if steps == 2 else math.inf

    driver = ThreadDriver(step, "zbus-test", time.monotonic, unexpected)
    assert inside.wait(DEADLINE_S)
    driver.wake()
    driver.wake()
    go_on.set()

    assert driver.join(DEADLINE_S)
    assert steps == 2


class Panic(BaseException):
    """As a Rust library raises it: not an `Exception`."""


def test_a_step_that_raises_anything_is_reported_and_called_again_after_a_pause() -> None:
    failures: list[tuple[type[BaseException], float | None]] = []
    ran: list[float] = []

    def step() -> float | None:
        ran.append(time.monotonic())
        if len(ran) <= 2:
            raise (OSError if len(ran) == 1 else Panic)("boom")
        return None

    driver = ThreadDriver(step, "zbus-test", time.monotonic, lambda error, pause: failures.append((type(error), pause)))
    driver.wake()

    assert driver.join(DEADLINE_S)
    assert [kind for kind, _ in failures] == [OSError, Panic]
    assert all(pause is not None and pause > 0 for _, pause in failures)
    assert ran[2] - ran[0] >= sum(pause or 0.0 for _, pause in failures)


def test_a_step_that_ends_the_thread_is_reported() -> None:
    failures: list[tuple[str, float | None]] = []

    def step() -> float | None:
        raise SystemExit(3)

    driver = ThreadDriver(step, "zbus-test", time.monotonic, lambda error, pause: failures.append((repr(error), pause)))

    assert driver.join(DEADLINE_S)
    assert failures == [("SystemExit(3)", None)]
