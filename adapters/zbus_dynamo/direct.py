"""Direct mode: publishers listen, and subscribers find them through discovery.

A publisher registers itself with its first event. Its record goes when the fabric closes, or when there are so many
that the one silent longest has to make room.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from zbus.errors import FabricError
from zbus.keys import KeySet
from zbus.observe.counters import Counts
from zbus.observe.records import EVENT_DROPPED
from zbus.ports.fabric import Receive

from .filestore import FileStore
from .frames import pack
from .lanes import Lane, Publisher
from .records import Channel
from .registry import Registry
from .scopes import Place
from .settings import ZmqSettings
from .sources import Sources
from .translate import Outgoing
from .zmq_loop import ZmqLoop

AGAIN_S = 0.002  # when a subscriber is full
RETRY_S = 1.0  # when no socket could be had
LANES_MAX = 256
PUBLISHERS_MAX = 1000
RETIRED = "FABRIC_PUBLISHER_RETIRED"


class Direct:
    """A `Side` of the loop: lanes for what is sent, sources for what is received."""

    connected = True  # there is nobody in between

    def __init__(self, loop: ZmqLoop, counts: Counts, settings: ZmqSettings, payload_bytes_max: int) -> None:
        self._loop, self._counts, self._settings = loop, counts, settings
        self._sources = Sources(loop, counts, payload_bytes_max)
        self.lanes: list[Lane] = []
        self.publishers: dict[tuple[Place, int], Publisher] = {}  # the longest unused one first
        self._waiting: set[Publisher] = set()
        self._refused: tuple[float, FabricError] | None = None  # no new socket until then, and why
        self._given_up: list[int] = []  # the sizes of events that will never leave
        self._registry = Registry(FileStore(settings.store), counts, self._found)

    def take(self, events: Sequence[Outgoing]) -> None:
        """Queue events with their publishers, which register themselves at their first one."""
        for place, publisher_id, sequence, body in events:
            try:
                publisher = self.publishers.pop((place, publisher_id), None) or self._join(place, publisher_id)
            except FabricError as error:  # as when the process has too many files open
                self._counts.tell(EVENT_DROPPED, "dropped_no_socket", place.key, detail=str(error)[:500])
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
            return self._new_lane()
        oldest = next(known for known in self.publishers if known[0].topic == topic)
        lane = self.publishers[oldest].lane
        self._retire(oldest)
        return lane

    def _new_lane(self) -> Lane:
        if self._refused is not None and time.monotonic() < self._refused[0]:
            raise self._refused[1]
        try:
            self.lanes.append(Lane(self._loop, self._counts, self._settings))
        except FabricError as error:
            self._refused = time.monotonic() + RETRY_S, error
            raise
        return self.lanes[-1]

    def _retire(self, known: tuple[Place, int]) -> None:
        """Forget the publisher that was silent longest. It registers again when it is not."""
        publisher = self.publishers.pop(known)
        self._release(publisher)
        del publisher.lane.publishers[publisher.channel.place.topic]
        self._registry.unregister(publisher.channel)
        self._counts.tell(RETIRED, "publishers_retired", known[0].key, detail="too many publishers in this process")

    def _release(self, publisher: Publisher) -> None:
        self._waiting.discard(publisher)
        if publisher.held is not None:
            publisher.lane.sender.queue.extend(publisher.held)
            publisher.held = None
