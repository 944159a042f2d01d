"""A window forgets by number and by time, the oldest first, on the clock that it is given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zbus.util.window import Window


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_item_is_seen_from_the_second_time_on() -> None:
    window = Window[str](10)

    assert [window.seen("a"), window.seen("b"), window.seen("a")] == [False, False, True]


def test_a_full_window_forgets_the_oldest_item_only() -> None:
    window = Window[int](3)
    for item in (1, 2, 3):
        window.seen(item)
    window.seen(1)  # seeing it again does not make it younger

    window.seen(4)

    assert [item in window for item in (1, 2, 3, 4)] == [False, True, True, True]
    assert len(window) == 3


def test_an_item_that_is_added_again_is_the_youngest() -> None:
    window = Window[int](3)
    for item in (1, 2, 3, 1, 4):
        window.add(item)

    assert [item in window for item in (1, 2, 3, 4)] == [True, False, True, True]


def test_an_item_is_forgotten_after_its_time_on_the_injected_clock() -> None:
    clock = Clock()
    window = Window[str](10, 120.0, clock)
    window.add("a")

    clock.now += 119.9
    assert "a" in window
    assert window.seen("a")
    clock.now += 0.2
    assert "a" not in window
    assert not window.seen("a")
    assert window.seen("a")


def test_items_whose_time_is_over_take_no_room() -> None:
    clock = Clock()
    window = Window[int](1000, 10.0, clock)
    for item in range(500):
        window.add(item)

    clock.now += 10.0
    window.add(500)

    assert len(window) == 1


def test_adding_an_item_again_starts_its_time_anew() -> None:
    clock = Clock()
    window = Window[str](10, 10.0, clock)
    window.add("a")
    clock.now += 6.0
    window.add("a")
    clock.now += 6.0

    assert "a" in window


def test_an_item_can_be_taken_out_once() -> None:
    window = Window[str](10)
    window.add("a")

    assert [window.remove("a"), window.remove("a"), "a" in window] == [True, False, False]


def test_an_item_whose_time_is_over_cannot_be_taken_out() -> None:
    clock = Clock()
    window = Window[str](10, 5.0, clock)
    window.add("a")
    clock.now += 5.0

    assert not window.remove("a")


@given(st.lists(st.integers(0, 12), max_size=100), st.integers(1, 6))
def test_a_window_holds_exactly_the_last_different_items(items: list[int], size: int) -> None:
    window = Window[int](size)
    added: list[int] = []
    for item in items:
        assert window.seen(item) == (item in added[-size:])
        if item not in added[-size:]:
            added.append(item)
    assert {item for item in range(13) if item in window} == set(added[-size:])
