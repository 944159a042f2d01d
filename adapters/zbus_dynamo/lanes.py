"""The publishers of this process as other processes see them, and the sockets that they share.

All publishers share one socket as far as the wire allows. Two publishers of the same topic cannot: a message names its
topic but not its scope, and a subscriber of Dynamo attributes every message of the topic on a socket to the one
publisher whose record led there. So a second publisher of a topic gets a second socket, called a *lane*.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus_zmq.address.options import ZmqOptions
from zbus_zmq.carry.capacity import Capacity
from zbus_zmq.carry.publishing import ZmqPublishing
from zbus_zmq.io.failures import zmq_errors
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.sockets import bind, make_socket

from .frames import split
from .records import Channel
from .scopes import place_of_key

# The first events of a new publisher wait until subscribers have read its record and connected: HOLD_S in any case, and
# up to HOLD_MAX_S while there is no subscriber.
HOLD_S, HOLD_MAX_S = 0.3, 2.0


class Lane:
    """One listening socket, with at most one publisher of each topic. `publishing` sends what is queued on it."""

    def __init__(
        self, io: IoThread, counts: Counters, options: ZmqOptions, capacity: Capacity, subscribed: Callable[[], None]
    ) -> None:
        """`subscribed` is called on the I/O thread after subscriptions have changed."""
        self.publishers: dict[str, LanePublisher] = {}  # by topic
        with zmq_errors("make a socket"):
            socket = make_socket(io.context, zmq.XPUB, options, None, server=True)
        try:
            self.endpoint = bind(socket, options.bind, options)
        except TransportError:
            socket.close(0)
            raise
        self.publishing = ZmqPublishing(
            io, socket, "", options, counts, topic_of=_topic_of, shape=split, capacity=capacity
        )

        def on_readable() -> None:
            self.publishing.on_readable()
            subscribed()

        io.on_readable(socket, on_readable)


class LanePublisher:
    """One publisher of this process, as other processes see it."""

    def __init__(self, channel: Channel, lane: Lane) -> None:
        self.channel, self.lane = channel, lane
        self.registered_at: float | None = None
        self.held: list[tuple[str, bytes]] | None = []  # None once its events no longer wait

    def is_found(self, now: float, hurry: bool) -> bool:
        """Return whether the subscribers of this publisher have had enough time to connect."""
        if self.registered_at is None:
            return False
        subscribed = self.lane.publishing.wants(self.channel.place.key)
        return now >= self.registered_at + (HOLD_S if hurry or subscribed else HOLD_MAX_S)


def _topic_of(key: str) -> bytes:
    return place_of_key(key).topic.encode()
