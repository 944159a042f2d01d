"""Whether a socket that connects is connected: ZMQ tries for ever and says so only to a monitor."""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from .zmq_loop import ZmqLoop


class Link:
    """Whether a connecting socket is connected, from ZMQ's own events. On the loop's thread, but for `up`."""

    def __init__(self, loop: ZmqLoop, socket_: Any) -> None:
        self.up = 0  # to how many
        self.since: float | None = None
        self._loop = loop
        self._socket = socket_
        self._monitor = socket_.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        loop.watch(self._monitor, self._changed)

    def close(self) -> None:
        """Stop watching."""
        self._loop.unwatch(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(0)  # it would keep the context alive

    def _changed(self) -> None:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.up += 1
            else:
                self.up = max(0, self.up - 1)
        self.since = None if not self.up else self.since or time.monotonic()
