"""A mailbox: any thread posts, the loop wakes up once for many items, and nothing stays behind or is lost unnoticed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from zbus.util.mailbox import Calls, Mailbox


class Loop:
    """A loop that runs what was scheduled only on demand, and counts how often it was woken."""

    def __init__(self) -> None:
        self.woken = 0
        self.closed = False
        self.errors: list[BaseException] = []
        self._scheduled: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.woken += 1
        self._scheduled.append((function, args))

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        self._scheduled.append((function, args))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context["exception"])

    def turn(self) -> None:
        scheduled, self._scheduled = self._scheduled, []
        for function, args in scheduled:
            function(*args)

    @property
    def idle(self) -> bool:
        return not self._scheduled


def made(loop: Loop, *args: Any, **options: Any) -> tuple[Mailbox[Any], list[list[Any]]]:
    batches: list[list[Any]] = []
    return Mailbox(loop, batches.append, *args, **options), batches  # type: ignore[arg-type]


def test_the_loop_is_woken_once_for_many_items() -> None:
    loop = Loop()
    mailbox, batches = made(loop)
    for item in range(100):
        mailbox.post(item)

    loop.turn()

    assert (loop.woken, batches, len(mailbox)) == (1, [list(range(100))], 0)


def test_the_loop_is_woken_again_after_a_batch_was_taken() -> None:
    loop = Loop()
    mailbox, batches = made(loop)
    for item in "ab":
        mailbox.post(item)
        loop.turn()

    assert (loop.woken, batches) == (2, [["a"], ["b"]])


def test_an_item_posted_while_a_batch_is_taken_is_taken_next() -> None:
    loop, batches = Loop(), list[list[str]]()

    def take(batch: list[str]) -> None:
        batches.append(batch)
        if batch == ["a"]:
            mailbox.post("b")

    mailbox = Mailbox[str](loop, take)  # type: ignore[arg-type]
    mailbox.post("a")
    loop.turn()
    loop.turn()

    assert batches == [["a"], ["b"]]


def test_an_exception_of_the_consumer_does_not_stop_later_items() -> None:
    loop, batches = Loop(), list[list[str]]()

    def take(batch: list[str]) -> None:
        batches.append(batch)
        raise ValueError

    mailbox = Mailbox[str](loop, take, turn=1)  # type: ignore[arg-type]
    mailbox.post("a")
    mailbox.post("b")
    for _ in range(2):
        with pytest.raises(ValueError):
            loop.turn()
    mailbox.post("c")
    with pytest.raises(ValueError):
        loop.turn()

    assert batches == [["a"], ["b"], ["c"]]


def test_a_closed_loop_is_not_an_error() -> None:
    loop = Loop()
    mailbox, batches = made(loop)
    loop.closed = True

    mailbox.post("a")
    mailbox.post("b")

    assert batches == []


def test_items_that_do_not_fit_are_counted_once() -> None:
    loop = Loop()
    mailbox, batches = made(loop, 3)
    for item in range(5):
        mailbox.post(item)
    loop.turn()
    mailbox.post(5)
    loop.turn()

    assert batches == [[0, 1, 2], [5]]
    assert [mailbox.take_overflowed(), mailbox.take_overflowed()] == [2, 0]


def test_a_mailbox_can_be_bounded_by_size() -> None:
    loop = Loop()
    mailbox, batches = made(loop, 10, len)
    for item in (b"12345", b"1234", b"too much", b"1"):
        mailbox.post(item)
    loop.turn()
    mailbox.post(b"1234567890")
    mailbox.post(b"1")
    loop.turn()

    assert batches == [[b"12345", b"1234", b"1"], [b"1234567890"]]
    assert mailbox.take_overflowed() == 2


def test_an_item_larger_than_the_mailbox_fits_if_it_is_alone() -> None:
    loop = Loop()
    mailbox, batches = made(loop, 10, len)
    mailbox.post(b"x" * 100)
    mailbox.post(b"y")
    loop.turn()

    assert (batches, mailbox.take_overflowed()) == ([[b"x" * 100]], 1)


def test_a_turn_is_limited_by_number_and_the_rest_follows_without_a_wake_up() -> None:
    loop = Loop()
    mailbox, batches = made(loop, turn=2)
    for item in range(5):
        mailbox.post(item)
    loop.turn()
    assert batches == [[0, 1]]
    loop.turn()
    loop.turn()

    assert (batches, loop.woken, loop.idle) == ([[0, 1], [2, 3], [4]], 1, True)


def test_a_turn_is_limited_by_size() -> None:
    loop = Loop()
    mailbox, batches = made(loop, None, len, turn=3, turn_size=4)
    for item in ("aaa", "bbb", "c", "d", "e", "f"):
        mailbox.post(item)
    while not loop.idle:
        loop.turn()

    assert batches == [["aaa", "bbb"], ["c", "d", "e"], ["f"]]


def test_a_paused_mailbox_keeps_its_items_and_does_not_wake_its_reader() -> None:
    loop = Loop()
    mailbox, batches = made(loop, 3)
    mailbox.post("a")
    mailbox.pause()
    loop.turn()
    for item in "bcd":
        mailbox.post(item)
    assert (batches, loop.woken, loop.idle) == ([], 1, True)

    mailbox.resume()
    loop.turn()

    assert (batches, mailbox.take_overflowed()) == ([["a", "b", "c"]], 1)
    mailbox.post("e")
    loop.turn()
    assert batches[1:] == [["e"]]


def test_a_mailbox_that_was_paused_while_it_was_empty_does_not_wake_its_reader_either() -> None:
    loop = Loop()
    mailbox, batches = made(loop)
    mailbox.pause()
    mailbox.post("a")
    assert loop.woken == 0

    mailbox.resume()
    loop.turn()
    assert batches == [["a"]]


def test_a_consumer_that_pauses_within_a_turn_gets_nothing_more_until_it_resumes() -> None:
    loop, batches = Loop(), list[list[int]]()

    def take(batch: list[int]) -> None:
        batches.append(batch)
        mailbox.pause()

    mailbox = Mailbox[int](loop, take, turn=1)  # type: ignore[arg-type]
    mailbox.post(1)
    mailbox.post(2)
    for _ in range(3):
        loop.turn()
    assert batches == [[1]]

    mailbox.resume()
    loop.turn()
    assert batches == [[1], [2]]


def test_what_is_cleared_is_not_taken_and_frees_its_room() -> None:
    loop = Loop()
    mailbox, batches = made(loop, 4, len)
    mailbox.post(b"1234")

    assert mailbox.clear() == [b"1234"]
    loop.turn()
    mailbox.post(b"5678")
    loop.turn()

    assert (batches, mailbox.take_overflowed()) == ([[b"5678"]], 0)


@pytest.mark.parametrize("options", [{}, {"size": int.bit_length, "max": 1 << 60}], ids=["unbounded", "sized"])
async def test_items_of_several_threads_all_arrive_each_thread_s_in_order(options: dict[str, Any]) -> None:
    taken: list[int] = []
    everything = asyncio.Event()

    def take(batch: list[int]) -> None:
        taken.extend(batch)
        if len(taken) == 40_000:
            everything.set()

    mailbox = Mailbox[int](asyncio.get_running_loop(), take, **options)

    def fill(start: int) -> None:
        for item in range(start, start + 10_000):
            mailbox.post(item)

    threads = [threading.Thread(target=fill, args=(start,)) for start in range(0, 40_000, 10_000)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(30):
        await everything.wait()
    for thread in threads:
        thread.join()

    assert sorted(taken) == list(range(40_000))
    for start in range(0, 40_000, 10_000):
        assert [item for item in taken if start <= item < start + 10_000] == list(range(start, start + 10_000))


def test_functions_are_called_in_order_and_one_that_raises_does_not_stop_the_next() -> None:
    loop, called = Loop(), list[int]()
    calls = Calls(loop)  # type: ignore[arg-type]

    def call(number: int) -> None:
        called.append(number)
        if number == 2:
            raise ValueError(number)

    for number in (1, 2, 3):
        calls.soon(call, number)
    loop.turn()

    assert (called, loop.woken, [str(error) for error in loop.errors]) == ([1, 2, 3], 1, ["2"])
