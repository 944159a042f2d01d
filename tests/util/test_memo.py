"""A bounded memo: values are made once, and the oldest entry makes room."""

from __future__ import annotations

import threading

import pytest

from zbus.util.memo import Memo


def test_a_value_is_made_once() -> None:
    made: list[str] = []
    memo = Memo[str, str](10, lambda key: made.append(key) or key.upper())  # type: ignore[func-returns-value]

    assert [memo["a"], memo["a"], memo["b"]] == ["A", "A", "B"]
    assert made == ["a", "b"]


def test_the_oldest_entry_makes_room_and_the_others_stay() -> None:
    memo = Memo[int, int](3, lambda key: key)
    for key in (1, 2, 3):
        memo[key]
    memo[1]  # reading does not make it younger

    memo[4]

    assert list(memo) == [2, 3, 4]


def test_an_entry_in_use_outlives_one_that_is_not() -> None:
    memo = Memo[int, int](3, lambda key: key)
    for key in (1, 2, 3):
        memo[key]

    assert memo.use(1) == 1
    memo.use(4)

    assert list(memo) == [3, 1, 4]


def test_a_value_that_is_replaced_takes_no_further_room() -> None:
    memo = Memo[str, int](2)
    memo["a"], memo["b"] = 1, 2
    memo["a"] = 3

    assert dict(memo) == {"a": 3, "b": 2}


def test_every_way_to_add_an_entry_is_bounded() -> None:
    memo = Memo[int, int](2)
    memo.update({key: key for key in range(5)})
    memo.setdefault(9, 9)

    assert list(memo) == [4, 9]


def test_evicted_entries_are_handed_to_the_callback_and_deleted_ones_are_not() -> None:
    evicted: list[tuple[str, int]] = []
    memo = Memo[str, int](2, len, lambda key, value: evicted.append((key, value)))
    for key in ("a", "bb", "ccc", "dddd"):
        memo[key]
    del memo["ccc"]
    memo.clear()

    assert evicted == [("a", 1), ("bb", 2)]


def test_nothing_is_kept_if_making_a_value_raises() -> None:
    memo = Memo[str, int](2, int)
    with pytest.raises(ValueError, match="invalid literal"):
        memo["x"]

    assert "x" not in memo


def test_a_memo_without_a_maker_raises_key_error() -> None:
    with pytest.raises(KeyError):
        Memo[str, int](2)["a"]


def test_several_threads_can_fill_a_memo() -> None:
    memo = Memo[int, int](50, lambda key: -key)
    failures: list[BaseException] = []

    def fill(start: int) -> None:
        try:
            for number in range(3000):
                assert memo[start + number % 200] == -(start + number % 200)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fill, args=(start,)) for start in (0, 100, 150, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)

    assert failures == []
    assert len(memo) <= 50
