"""Close: always in bounded time, whatever is in progress, and nothing of the fabric is left behind."""

from __future__ import annotations

import threading
import time

import pytest
from contract_node import WAIT_S, zbus_threads
from contract_support import Mesh

from zbus.errors import TransportError

CLOSE_S = 6.0


def test_an_idle_node_closes_in_bounded_time_and_leaves_no_thread(transport: Mesh) -> None:
    before = zbus_threads()
    took_s = []
    for _ in range(3):
        node = transport.open()
        node.listen(["a/**", "b/*"])
        node.answer({"ask/x": {"echo": True}})
        took_s.append(node.close())

    assert max(took_s) < CLOSE_S
    assert zbus_threads() == before


def test_a_node_that_never_did_anything_closes(transport: Mesh) -> None:
    before = zbus_threads()
    assert transport.open().close() < CLOSE_S
    assert zbus_threads() == before


def test_closing_twice_is_closing_once(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    near.listen(["a/**"])
    far.wanted(["a/b"])
    near.close()

    assert near.close() < 1.0


def test_several_threads_may_close_at_once(transport: Mesh) -> None:
    near = transport.open()
    near.listen(["a/**"])
    failed: list[BaseException] = []

    def close() -> None:
        try:
            near.fabric.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CLOSE_S)

    assert not any(thread.is_alive() for thread in threads)
    assert failed == []


@pytest.mark.parametrize("loaded", ["sending", "receiving", "answering", "asking"])
def test_a_node_under_load_closes_in_bounded_time(transport: Mesh, loaded: str) -> None:
    far, near = transport.spawn(), transport.open()
    far.listen(["far/**"])
    near.listen(["near/**"])
    far.answer({"ask/far": {"count": 50_000}})
    near.answer({"ask/near": {"count": 50_000}})
    near.wanted(["far/x"])
    far.wanted(["near/x"])
    if loaded == "sending":
        near.flood("far/x")
        assert far.received(100)
    elif loaded == "receiving":
        far.flood("near/x")
        assert near.received(100)
    elif loaded == "answering":
        assert far.ask_and_leave("ask/near", after_replies=10) < CLOSE_S
    else:
        deadline = time.monotonic() + WAIT_S
        while True:  # the other node may not be known as a server yet: then the replies end at once
            replies = near.ask_later("ask/far", timeout_s=30.0)
            assert replies.wait(lambda each=replies: each.ends or len(each.replies) > 10, CLOSE_S)  # type: ignore[misc]
            if len(replies.replies) > 10:
                break
            assert time.monotonic() < deadline, "no node ever served the key"

    took_s = near.close()

    assert took_s < CLOSE_S
    if loaded == "sending":
        assert near.calm() | {"sent": 0, "errors": 0, "longest_s": 0} == {
            "ended": True, "unexpected": "", "sent": 0, "errors": 0, "longest_s": 0
        }  # fmt: skip
    if loaded == "receiving":
        assert far.calm()["ended"]


def test_a_closed_node_refuses_every_call_with_a_fabric_error(transport: Mesh) -> None:
    node = transport.open()
    node.listen(["a/**"])
    node.close()

    with pytest.raises(TransportError):
        node.fabric.send([("a/b", b"x")])
    with pytest.raises(TransportError):
        node.fabric.listen(["b/**"], lambda frame, acknowledge: None)
    with pytest.raises(TransportError):
        node.fabric.serve(["ask/x"], lambda request: None)
    with pytest.raises(TransportError):
        node.fabric.request("ask/x", b"", lambda data: None, 1.0)


def test_a_request_in_flight_ends_when_its_requester_closes(transport: Mesh) -> None:
    near, far = transport.open(), transport.spawn()
    far.answer({"ask/held": {"hold": True}})
    far.listen(["probe"])
    near.wanted(["probe"])
    reported = near.ask_later("ask/held", timeout_s=30.0)

    assert near.close() < CLOSE_S
    assert reported.wait(lambda: reported.ends > 0, CLOSE_S), "the requester would wait forever"
    assert reported.ends == 1
