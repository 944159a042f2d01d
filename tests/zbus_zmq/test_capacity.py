"""Backpressure for senders: the bound on what waits for the I/O thread, and the errors of senders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from zmq_support import until

from zbus.errors import TransportError
from zbus_zmq.carry import capacity as capacity_module
from zbus_zmq.carry.capacity import BYTES_MAX, MESSAGES_MAX, Capacity


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "FULL_S", 0.2)
    monkeypatch.setattr(capacity_module, "LINK_S", 0.1)


def in_thread(step: Callable[[], None]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Run a step on a thread of its own; the list gets its error, or None."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            step()
            ended.append(None)
        except TransportError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


@pytest.mark.parametrize("taken", [(MESSAGES_MAX, 0), (1, BYTES_MAX)])
@pytest.mark.usefixtures("short")
def test_a_full_queue_is_an_error_after_a_while_and_nothing_is_taken(taken: tuple[int, int]) -> None:
    capacity = Capacity()
    capacity.reserve(*taken)

    with pytest.raises(TransportError, match="full"):
        capacity.reserve(1, 1)

    assert (capacity.messages, capacity.bytes) == taken


def test_a_sender_waits_until_enough_has_been_sent() -> None:
    capacity = Capacity()
    capacity.reserve(MESSAGES_MAX, 10)
    thread, ended = in_thread(lambda: capacity.reserve(2, 20))

    capacity.release(1, 4)
    thread.join(0.1)
    assert ended == []
    capacity.release(1, 4)
    thread.join(5)

    assert ended == [None]
    assert (capacity.messages, capacity.bytes) == (MESSAGES_MAX, 22)


def test_a_batch_that_is_larger_than_the_bound_is_accepted_by_an_empty_queue() -> None:
    capacity = Capacity()

    capacity.reserve(MESSAGES_MAX + 1, BYTES_MAX + 1)

    assert capacity.messages == MESSAGES_MAX + 1


@pytest.mark.usefixtures("short")
def test_without_a_link_a_sender_waits_a_moment_and_fails_with_the_reason() -> None:
    capacity = Capacity("no broker is connected at tcp://a:1")
    capacity.set_linked(False)
    started = time.monotonic()

    with pytest.raises(TransportError, match="no broker is connected at tcp://a:1; nothing was sent"):
        capacity.reserve(1, 1)

    assert time.monotonic() - started >= 0.1
    assert capacity.messages == 0


@pytest.mark.parametrize("flag", ["set_linked", "set_settled"])
def test_a_sender_that_waits_continues_when_there_is_something_to_send_to(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity_module, "LINK_S", 60.0)
    capacity = Capacity()
    getattr(capacity, flag)(False)
    thread, ended = in_thread(lambda: capacity.reserve(1, 1))
    thread.join(0.1)
    assert ended == []

    getattr(capacity, flag)(True)
    thread.join(5)

    assert ended == [None]


def test_closing_lets_senders_fail_at_once_including_those_that_wait() -> None:
    capacity = Capacity()
    capacity.reserve(MESSAGES_MAX, 0)
    thread, ended = in_thread(lambda: capacity.reserve(1, 1))

    capacity.close()
    thread.join(5)

    assert "closed" in str(ended[0])
    with pytest.raises(TransportError, match="closed"):
        capacity.reserve(1, 1)


def test_waiting_until_everything_is_sent_ends_with_the_last_message_or_in_time() -> None:
    capacity = Capacity()
    assert capacity.wait_empty(0.0)
    capacity.reserve(2, 2)
    assert not capacity.wait_empty(0.05)
    waited: list[bool] = []
    thread = threading.Thread(target=lambda: waited.append(capacity.wait_empty(20)))
    thread.start()

    capacity.release(1, 1)
    assert waited == []
    capacity.release(1, 1)

    assert until(lambda: waited == [True])
    thread.join(5)
