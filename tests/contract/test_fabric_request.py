"""Requests: one responder replies, in order and completely, and the end of the replies always arrives."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from contract_node import WAIT_S
from contract_support import AnyNode, Mesh

QUICK_S = 2.0  # "at once", on a machine that may be busy
LEAVE_S = 2.0


def ask_until_answered(node: AnyNode, key: str, payload: bytes = b"") -> list[bytes]:
    """Wait until the responder is known here, which takes a moment."""
    deadline = time.monotonic() + WAIT_S
    while not (reported := node.ask(key, payload))["replies"]:
        assert time.monotonic() < deadline, f"no responders for {key!r}"
        assert reported["ends"] == 1
        time.sleep(0.02)
    assert reported["ends"] == 1
    assert reported["after_end"] == 0
    return list(reported["replies"])


@pytest.mark.parametrize("key", ["ask/echo", "@zbus/replay/7", "größe/a.b/%/>", "long/" + "🚀" * 254])
def test_a_request_and_its_reply_cross_byte_for_byte(transport: Mesh, key: str) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({key: {"echo": True}})
    ask_until_answered(near, key)

    for payload in (b"", b"\0", bytes(range(256)), random.Random(3).randbytes(100_000)):
        reported = near.ask(key, payload)
        assert reported["replies"] == [payload]
        assert (reported["ends"], reported["after_end"]) == (1, 0)


def test_both_ends_ask_and_answer(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    near.answer({"ask/near": {"text": "near"}})
    far.answer({"ask/far": {"text": "far"}})

    assert ask_until_answered(near, "ask/far") == [b"far"]
    assert ask_until_answered(far, "ask/near") == [b"near"]


@pytest.mark.parametrize("size", [1 << 20, (2 << 20) + 77])
def test_a_large_request_and_a_large_reply_arrive_whole(transport: Mesh, size: int) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/large": {"echo": True}})
    ask_until_answered(near, "ask/large")
    payload = random.Random(size).randbytes(size)

    reported = near.ask("ask/large", payload)

    assert [len(reply) for reply in reported["replies"]] == [size]
    assert reported["replies"] == [payload]


def test_one_of_several_who_answer_replies(transport: Mesh) -> None:
    asker, answerers = transport.open(), [transport.spawn(), transport.spawn(), transport.open()]
    for number, answerer in enumerate(answerers):
        answerer.answer({"ask/one": {"text": str(number)}})
    ask_until_answered(asker, "ask/one")

    reported = [asker.ask("ask/one") for _ in range(30)]

    assert [len(each["replies"]) for each in reported] == [1] * 30
    assert {each["ends"] for each in reported} == {1}
    assert set(Counter(each["replies"][0] for each in reported)) <= {b"0", b"1", b"2"}


def test_a_stream_of_replies_is_complete_and_in_order_and_then_ends(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/many": {"count": 5_000}, "ask/ping": {"echo": True}})
    ask_until_answered(near, "ask/ping")

    reported = near.ask("ask/many", timeout_s=30.0)

    assert reported["replies"] == [b"%d" % number for number in range(5_000)]
    assert (reported["ends"], reported["after_end"]) == (1, 0)


def test_a_request_without_responders_ends_at_once_with_no_reply(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/other": {"echo": True}})
    ask_until_answered(near, "ask/other")

    reported = near.ask("ask/nobody", b"x", timeout_s=10.0)

    assert reported["replies"] == []
    assert (reported["ends"], reported["after_end"]) == (1, 0)
    assert reported["took_s"] < QUICK_S


def test_a_single_node_learns_that_there_are_no_responders(transport: Mesh) -> None:
    alone = transport.open()
    alone.answer({"ask/self": {"echo": True}})

    reported = alone.ask("ask/anybody", timeout_s=10.0)

    assert (reported["replies"], reported["ends"]) == ([], 1)
    assert reported["took_s"] < QUICK_S


def test_a_responder_that_closes_without_a_reply_ends_the_request(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/silent": {"silent": True}, "ask/ping": {"echo": True}})
    ask_until_answered(near, "ask/ping")

    reported = near.ask("ask/silent", timeout_s=10.0)

    assert (reported["replies"], reported["ends"], reported["after_end"]) == ([], 1, 0)
    assert reported["took_s"] < QUICK_S
    assert far.asked(1)


def test_a_request_that_is_never_closed_ends_after_its_time(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/held": {"hold": True}, "ask/ping": {"echo": True}})
    ask_until_answered(near, "ask/ping")

    reported = near.ask("ask/held", timeout_s=1.0)

    assert (reported["replies"], reported["ends"], reported["after_end"]) == ([], 1, 0)
    assert 0.5 < reported["took_s"] < 1.0 + QUICK_S
    far.release()
    assert near.ask("ask/ping", b"x")["replies"] == [b"x"]


def test_a_requester_that_leaves_early_does_not_disturb_others(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/many": {"count": 20_000}, "ask/held": {"hold": True}, "ask/ping": {"echo": True}})
    ask_until_answered(near, "ask/ping")

    left_s = [near.ask_and_leave("ask/many", after_replies=10) for _ in range(3)]
    left_s += [near.ask_and_leave("ask/held") for _ in range(3)]

    assert max(left_s) < LEAVE_S
    assert near.ask("ask/ping", b"still there", timeout_s=20.0)["replies"] == [b"still there"]


def test_the_end_comes_also_when_the_answerer_dies(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/held": {"hold": True}, "ask/ping": {"echo": True}})
    ask_until_answered(near, "ask/ping")
    reported = near.ask_later("ask/held", timeout_s=2.0)
    assert far.asked(1)

    far.kill()

    assert reported.wait(lambda: reported.ends > 0, 2.0 + QUICK_S)
    assert (reported.replies, reported.ends, reported.after_end) == ([], 1, 0)


def test_new_answers_replace_the_earlier_ones(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/old": {"text": "old"}, "ask/both": {"text": "first"}})
    assert ask_until_answered(near, "ask/old") == [b"old"]
    assert ask_until_answered(near, "ask/both") == [b"first"]

    far.answer({"ask/new": {"text": "new"}, "ask/both": {"text": "second"}})

    assert ask_until_answered(near, "ask/new") == [b"new"]
    assert near.ask("ask/both")["replies"] == [b"second"]
    reported = near.ask("ask/old")
    assert (reported["replies"], reported["ends"]) == ([], 1)
    assert reported["took_s"] < QUICK_S


def test_many_requests_at_once_keep_apart(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/echo": {"echo": True}})
    ask_until_answered(near, "ask/echo")

    under_way = [(b"%d" % number, near.ask_later("ask/echo", b"%d" % number)) for number in range(200)]

    for payload, reported in under_way:
        assert reported.wait(lambda reported=reported: reported.ends > 0, WAIT_S)
        assert (reported.replies, reported.ends, reported.after_end) == ([payload], 1, 0)


def test_frames_flow_while_a_long_answer_does(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/many": {"count": 5_000}, "ask/ping": {"echo": True}})
    ask_until_answered(near, "ask/ping")
    far.listen(["beside/**"])
    near.wanted(["beside/x"])

    reported = near.ask_later("ask/many", timeout_s=30.0)
    near.send([("beside/x", b"%d" % number) for number in range(500)])

    assert far.received(500) == [b"%d" % number for number in range(500)]
    assert reported.wait(lambda: reported.ends > 0, 30.0)
    assert len(reported.replies) == 5_000
