"""Direct mode: publishers listen, and subscribers find them through discovery.

All publishers of this process share one socket as far as the wire allows. It does not allow two of the same
topic: a message names its topic but not its scope, and Dynamo's subscribers take everything of the topic
that a socket offers for events of the one publisher whose record led there. So a second publisher of a topic gets
a second socket, a *lane*.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from zbus.errors import FabricError
from zbus.keys import KeySet
from zbus.ports import Receive
from zbus.records import EVENT_DROPPED

from .filestore import FileStore
from .frames import pack
from .records import Channel
from .registry import Registry
from .scopes import Place
from .sender import Sender
from .settings import ZmqSettings
from .sockets import zmq_errors
from .sources import Sources
from .tally import Tally
from .translate import Outgoing
from .zmq_loop import ZmqLoop

# A new publisher's first events wait for subscribers to see its record and to connect: so long in any case, and
# so long where nobody does.
HOLD_S, HOLD_MAX_S = 0.3, 2.0
AGAIN_S = 0.002  # when a subscriber is full
LANES_MAX = 256
PUBLISHERS_MAX = 1000
RETIRED = "FABRIC_PUBLISHER_RETIRED"


class Lane:
    """One listening socket, with at most one publisher of each topic."""

    def __init__(self, loop: ZmqLoop, tally: Tally, settings: ZmqSettings) -> None:
        with zmq_errors("make a socket"):
            self.sender = Sender(loop, tally, "zmq")
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


class Direct:
    """A `Side` of the loop: lanes for what is sent, sources for what is received."""

    connected = True  # there is nobody in between

    def __init__(self, loop: ZmqLoop, tally: Tally, settings: ZmqSettings, payload_bytes_max: int) -> None:
        self._loop, self._tally, self._settings = loop, tally, settings
        self._sources = Sources(loop, tally, payload_bytes_max)
        self.lanes: list[Lane] = []
        self.publishers: dict[tuple[Place, int], Publisher] = {}  # the longest unused one first
        self._waiting: set[Publisher] = set()
        self._given_up: list[int] = []  # the sizes of events that will never leave
        self._registry = Registry(FileStore(settings.store), tally, self._found)

    def take(self, events: Sequence[Outgoing]) -> None:
        """Queue events with their publishers, which register themselves at their first one."""
        for place, publisher_id, sequence, body in events:
            try:
                publisher = self.publishers.pop((place, publisher_id), None) or self._join(place, publisher_id)
            except FabricError as error:  # as when the process has too many files open
                self._tally.add("dropped_no_socket", place.key, str(error), EVENT_DROPPED)
                self._given_up.append(len(body))
                continue
            self.publishers[place, publisher_id] = publisher
            message = (pack(publisher.topic, publisher_id, sequence, body), len(body))
            if publisher.held is not None:
                publisher.held.append(message)
            else:
                publisher.lane.sender.queue.append(message)

    def flush(self, now: float) -> tuple[int, int, float]:
        """Let go of what waited for its publisher to be found, and send."""
        events, size = len(self._given_up), sum(self._given_up)
        self._given_up.clear()
        again_at = now + 60.0
        for publisher in list(self._waiting):
            found_at = publisher.found_at(now, self._loop.ending)
            if found_at <= now:
                self._release(publisher)
            again_at = min(again_at, max(found_at, now))
        for lane in self.lanes:
            sent = lane.sender.flush(now)
            events, size = events + sent[0], size + sent[1]
            if lane.sender.queue:
                again_at = min(again_at, now + AGAIN_S)
        return events, size, min(again_at, self._sources.tidy(now))

    def wanted(self, place: Place) -> bool:
        """Whether somebody listens to a publisher of this place; True while there is none to listen to."""
        found = [each for (at, _), each in list(self.publishers.items()) if at == place]
        return not found or any(each.lane.sender.wanted(each.topic) for each in found)

    @property
    def linked(self) -> bool:
        """Whether all publishers that we listen to are connected."""
        return self._sources.linked

    def listen(self, wanted: KeySet | None, receive: Receive) -> None:
        """Receive these keys from now on."""
        self._sources.listen(wanted, receive)

    def diagnostics(self) -> dict[str, Any]:
        """Who we are to others, and whom we listen to."""
        return {
            "listening": [lane.endpoint for lane in list(self.lanes)],
            "publishers": len(self.publishers),
            "connections": self._sources.connections(),
            **self._registry.diagnostics(),
        }

    def close(self) -> None:
        """Close every socket."""
        for lane in self.lanes:
            lane.sender.close()
        self._sources.close()

    def closed(self) -> None:
        """Take our records back: not earlier, or subscribers would leave before they have everything."""
        self._registry.close()

    def _found(self, channels: dict[str, Channel]) -> None:  # on the registry's thread
        self._loop.post(lambda: self._sources.found(channels))

    def _join(self, place: Place, publisher_id: int) -> Publisher:
        if len(self.publishers) >= PUBLISHERS_MAX:
            self._retire(next(iter(self.publishers)))
        lane = self._lane_without(place.topic)
        publisher = Publisher(Channel(place, publisher_id, lane.endpoint), lane)
        lane.publishers[place.topic] = publisher
        self._waiting.add(publisher)

        def registered() -> None:  # on the registry's thread
            publisher.registered_at = time.monotonic()
            self._loop.post(lambda: None)

        self._registry.register(publisher.channel, registered)
        return publisher

    def _lane_without(self, topic: str) -> Lane:
        for lane in self.lanes:
            if topic not in lane.publishers:
                return lane
        if len(self.lanes) < LANES_MAX:
            self.lanes.append(Lane(self._loop, self._tally, self._settings))
            return self.lanes[-1]
        oldest = next(known for known in self.publishers if known[0].topic == topic)
        lane = self.publishers[oldest].lane
        self._retire(oldest)
        return lane

    def _retire(self, known: tuple[Place, int]) -> None:
        """Forget the publisher that was silent longest. It registers again when it is not."""
        publisher = self.publishers.pop(known)
        self._release(publisher)
        del publisher.lane.publishers[publisher.channel.place.topic]
        self._registry.unregister(publisher.channel)
        self._tally.add("publishers_retired", known[0].key, "too many publishers in this process", RETIRED)

    def _release(self, publisher: Publisher) -> None:
        self._waiting.discard(publisher)
        if publisher.held is not None:
            publisher.lane.sender.queue.extend(publisher.held)
            publisher.held = None
