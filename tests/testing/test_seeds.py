"""Seeds of a test that uses `zbus_world`."""

from __future__ import annotations

import pytest

from zbus.testing.seeds import SEEDS, choose_seeds, parse_seeds


@pytest.mark.parametrize(("text", "seeds"), [("0", [0]), ("7", [7]), ("3:6", [3, 4, 5]), ("0:1", [0])])
def test_a_text_names_one_seed_or_a_range_without_its_end(text: str, seeds: list[int]) -> None:
    assert list(parse_seeds(text)) == seeds


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "5:5", "6:5", ":5", "5:", "1:2:3", "1,2"])
def test_a_text_that_names_no_seed_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="seed"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("given", "number", "marked", "seeds"),
    [
        ([], None, None, list(range(SEEDS))),
        ([], None, 2, [0, 1]),
        ([], None, [9, 4, 9], [9, 4]),
        ([], None, range(5, 7), [5, 6]),
        ([], 4, 2, [0, 1, 2, 3]),
        ([], 1, [9], [0]),
        (["7"], 4, 2, [7]),
        (["7", "9:11", "7"], None, 2, [7, 9, 10]),
    ],
)
def test_seeds_of_the_command_line_come_before_a_number_and_both_before_the_mark(
    given: list[str], number: int | None, marked: object, seeds: list[int]
) -> None:
    assert choose_seeds(given, number, marked) == seeds


@pytest.mark.parametrize("marked", [0, -1, True, "5", 2.0, [], [-1], ["a"], [True]])
def test_a_mark_that_names_no_seeds_is_rejected(marked: object) -> None:
    with pytest.raises(ValueError, match="must be a number of seeds, or a list of seeds"):
        choose_seeds([], None, marked)
