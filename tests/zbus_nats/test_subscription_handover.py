"""New subscriptions take over from old ones: each message once, whatever the order of its two copies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zbus_nats.subscription_handover import HandoverPhase, SubscriptionHandover

Copies = list[tuple[int, bool]]  # which message, and whether by the old subscription


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[Copies, list[int], int]:
    """What the server sends while a takeover goes on: copies in order, and where each phase begins in it."""
    copies: Copies = []
    begins: list[int] = []
    message = 0
    for phase in ("old or both", "both", "both", "both or new", "new"):
        if phase != "old or both":
            # The near end learns of a phase when the server is in it: no sooner, but between two copies as well.
            begins.append(len(copies) - draw(st.integers(0, min(1, len(copies) - (begins[-1] if begins else 0)))))
        changed = draw(st.integers(0, 6))
        for number in range(draw(st.integers(2, 6))):
            both = [(message, True), (message, False)] if draw(st.booleans()) else [(message, False), (message, True)]
            if phase == "old or both" and number < changed:
                both = [(message, True)]
            elif phase == "new" or (phase == "both or new" and number >= changed):
                both = [(message, False)]
            copies += both
            message += 1
    return copies, begins, message


@given(reported=deliveries())
def test_each_message_is_taken_once_and_in_order(reported: tuple[Copies, list[int], int]) -> None:
    copies, begins, messages = reported
    turn = SubscriptionHandover()
    turn.enter(HandoverPhase.BOTH_BEGIN)
    taken = []
    for at, (message, old) in enumerate(copies):
        for phase, begin in zip(
            (HandoverPhase.BOTH, HandoverPhase.BOTH_STILL, HandoverPhase.BOTH_END), begins, strict=False
        ):
            if begin == at:
                turn.enter(phase)
        if turn.takes(old, b"a", b"%d" % message, None):
            taken.append(message)

    assert taken == list(range(messages))


def test_equal_messages_are_several_messages() -> None:
    turn = SubscriptionHandover()
    taken = 0
    for phase, ways in [
        (
            HandoverPhase.BOTH_BEGIN,
            [True] * 5 + [True, False] * 3 + [False],
        ),  # the last one's other copy comes in the next phase
        (HandoverPhase.BOTH, [True] + [True, False] * 4),
        (HandoverPhase.BOTH_STILL, [True, False] * 4),
        (HandoverPhase.BOTH_END, [False, True] * 3 + [False] * 5),
    ]:
        turn.enter(phase)
        taken += sum(turn.takes(old, b"a", b"same", None) for old in ways)

    assert taken == 5 + 3 + 1 + 4 + 4 + 3 + 5


def test_equal_messages_near_the_turn_are_taken_once_each() -> None:
    for last, first in [(True, False), (False, True)]:  # which copy comes before the turn, and which after it
        turn = SubscriptionHandover()
        taken = 0
        for phase, ways in [
            (HandoverPhase.BOTH_BEGIN, [True, False]),
            (HandoverPhase.BOTH, [True, False] * 2),
            (HandoverPhase.BOTH_STILL, [True, False] * 2 + [last]),
            (HandoverPhase.BOTH_END, [first] + [False] * 3),
        ]:
            turn.enter(phase)
            taken += sum(turn.takes(old, b"a", b"same", None) for old in ways)
        assert taken == 1 + 2 + 2 + 1 + 3


def test_a_message_that_the_server_began_with_before_it_all_is_taken_even_after_the_turn() -> None:
    turn = SubscriptionHandover()
    for phase in (HandoverPhase.BOTH_BEGIN, HandoverPhase.BOTH, HandoverPhase.BOTH_STILL, HandoverPhase.BOTH_END):
        turn.enter(phase)

    assert turn.takes(True, b"a", b"late, and by the old subscription alone", None)
    assert turn.takes(False, b"a", b"both", None)
    assert not turn.takes(True, b"a", b"both", None)
