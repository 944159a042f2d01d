"""What a node wants of others."""

from __future__ import annotations

from zbus.mesh.interest import NEVER, Interest


def test_of_several_who_want_a_key_the_earliest_counts() -> None:
    wants = Interest()
    wants.add(["shop/**"], 7, record=False)
    wants.add(["shop/*"], 5, record=False)

    assert wants.of("shop/x") == (5, 5, False)
    assert wants.of("shop/x/y") == (7, 7, False)
    assert wants.of("audit").since == NEVER
    assert wants.earliest == 5


def test_what_is_recorded_and_what_is_live_are_told_apart() -> None:
    wants = Interest()
    wants.add(["shop/**"], 3, record=True)
    wants.add(["shop/x"], 9, record=False)

    assert wants.of("shop/x") == (3, 9, True)
    assert wants.of("shop/y") == (3, NEVER, True)
    assert wants.records


def test_what_nobody_wants_any_more_is_gone() -> None:
    wants = Interest()
    wants.add(["a", "b"], 1, record=True)
    wants.add(["a"], 1, record=True)

    wants.remove(["a", "b"], 1, record=True)

    assert wants.expressions == ("a",)
    assert wants.of("b").since == NEVER
    wants.remove(["a"], 1, record=True)
    assert wants.expressions == ()
    assert not wants.records


def test_an_expression_that_several_use_is_asked_for_once() -> None:
    wants = Interest()
    for since in (1, 2, 3):
        wants.add(["a/**"], since, record=since == 2)

    assert wants.expressions == ("a/**",)
