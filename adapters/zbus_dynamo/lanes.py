"""The publishers of this process as others see them, and the sockets that they share.

All of them share one socket as far as the wire allows. It does not allow two of the same topic: a message names its
topic but not its scope, and Dynamo's subscribers take everything of the topic that a socket offers for events of the
one publisher whose record led there. So a second publisher of a topic gets a second socket, a *lane*.
"""

from __future__ import annotations

from collections import deque

import zmq

from zbus.observe.counters import Counts

from .records import Channel
from .sender import Sender
from .settings import ZmqSettings
from .sockets import zmq_errors
from .zmq_loop import ZmqLoop

# A new publisher's first events wait for subscribers to see its record and to connect: so long in any case, and
# so long where nobody does.
HOLD_S, HOLD_MAX_S = 0.3, 2.0


class Lane:
    """One listening socket, with at most one publisher of each topic."""

    def __init__(self, loop: ZmqLoop, counts: Counts, settings: ZmqSettings) -> None:
        with zmq_errors("make a socket"):
            self.sender = Sender(loop, counts, "zmq")
        self.publishers: dict[str, Publisher] = {}  # by topic
        with zmq_errors(f"listen on {settings.host}"):
            try:
                self.sender.socket.bind(f"tcp://{settings.host}:0")
            except zmq.ZMQError:
                self.sender.close()
                raise
        port = self.sender.socket.last_endpoint.decode().rpartition(":")[2]
        self.endpoint = f"tcp://{settings.advertise}:{port}"


class Publisher:
    """One publisher of this process, as others see it."""

    def __init__(self, channel: Channel, lane: Lane) -> None:
        self.channel, self.lane = channel, lane
        self.topic = channel.place.topic.encode()
        self.registered_at: float | None = None
        self.held: deque[tuple[list[bytes], int]] | None = deque()

    def found_at(self, now: float, hurry: bool) -> float:
        """When its events need to wait no longer, as far as can be said now."""
        if self.registered_at is None:
            return now + 60.0
        return self.registered_at + (HOLD_S if hurry or self.lane.sender.wanted(self.topic) else HOLD_MAX_S)
