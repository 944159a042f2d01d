"""What a node does on the loop before it closes: its send queues drain, and other nodes ask for what they miss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zbus.mesh.network import LINGER_S, Network
from zbus.util.mailbox import Calls


class FakeQueue:
    """Ends on a thread of its own, as a send queue does, or never."""

    def __init__(self, stuck: bool = False, has_sent: bool = True) -> None:
        self.has_sent, self.ended, self._stuck = has_sent, False, stuck

    def end(self, on_end: Callable[[], None]) -> None:
        self.ended = True
        if not self._stuck:
            threading.Thread(target=on_end).start()


class FakeRequestServer:
    def __init__(self, queues: list[FakeQueue]) -> None:
        self.finished: list[tuple[float, float]] = []
        self._queues = queues

    async def finish(self, quiet_s: float, timeout_s: float) -> None:
        assert all(queue.ended for queue in self._queues)
        self.finished.append((quiet_s, timeout_s))


async def linger(queues: list[FakeQueue], timeout_s: float, log: object | None) -> list[tuple[float, float]]:
    server = FakeRequestServer(queues)
    links = [SimpleNamespace(send_queue=queue) for queue in queues]
    network: Any = SimpleNamespace(
        links=links, request_server=server, _log=log, _calls=Calls(asyncio.get_running_loop())
    )
    await Network.linger(network, timeout_s)
    return server.finished


async def test_a_closing_node_waits_for_its_send_queues_and_then_answers_other_nodes() -> None:
    async with asyncio.timeout(10):
        assert await linger([FakeQueue(has_sent=False), FakeQueue()], 60.0, log="log") == [(LINGER_S, 1.0)]


@pytest.mark.parametrize(("log", "has_sent"), [(None, True), ("log", False)], ids=["no-log", "nothing-sent"])
async def test_a_node_that_no_other_node_can_ask_does_not_wait_for_requests(log: str | None, has_sent: bool) -> None:
    async with asyncio.timeout(10):
        assert await linger([FakeQueue(has_sent=has_sent)], 60.0, log) == []
        assert await linger([], 60.0, log) == []


async def test_a_send_queue_that_is_stuck_delays_closing_no_longer_than_its_timeout() -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    assert await linger([FakeQueue(), FakeQueue(stuck=True)], 0.05, log="log") == [(LINGER_S, 0.05)]
    assert 0.05 <= loop.time() - begun < 1.0
