"""Direct mode: publishers listen, and subscribers find them through discovery.

A publisher registers itself with its first event. Its record is removed when the fabric closes, or when there are too
many publishers and this one has been silent longest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from zbus.errors import KeyInvalid, TransportError
from zbus.keys import KeySet
from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED
from zbus.observe.throttle import Throttle
from zbus.ports.fabric import Receive
from zbus.util.memo import Memo
from zbus_zmq.address.options import ZmqOptions
from zbus_zmq.carry.capacity import Capacity
from zbus_zmq.io.io_thread import IoThread

from .filestore import FileStore
from .frames import pack
from .lanes import HOLD_MAX_S, HOLD_S, Lane, LanePublisher
from .records import Channel, file_name
from .registry import DynamoRegistry
from .scopes import Scoped
from .settings import ZmqSettings
from .sources import PublisherSources
from .translate import DynamoOutgoing

RETRY_S = 1.0  # after a socket could not be made
LANES_MAX = 256
PUBLISHERS_MAX = 1000
FILE_NAME_MAX = 255
RETIRED = "TRANSPORT_PUBLISHER_RETIRED"
_LONGEST_ID = "f" * 16


class Direct:
    """Lanes for outgoing events, sources for incoming ones. On the I/O thread, except where a method says otherwise."""

    def __init__(
        self, io: IoThread, counts: Counters, settings: ZmqSettings, payload_bytes_max: int, capacity: Capacity
    ) -> None:
        self._io, self._counts, self._capacity = io, counts, capacity
        self._options: ZmqOptions = settings.socket_options(payload_bytes_max)
        self._sources = PublisherSources(io, counts, self._options, payload_bytes_max)
        self.lanes: list[Lane] = []
        self.publishers = Memo[tuple[Scoped, int], LanePublisher](PUBLISHERS_MAX, self._join, self._retired)
        self._waiting: set[LanePublisher] = set()
        self._refused: TransportError | None = None  # why the last socket could not be made
        self._retries = Throttle(RETRY_S)
        self._closing = False
        self._registry = DynamoRegistry(FileStore(settings.store), counts, self._found)

    def send(self, events: Sequence[DynamoOutgoing]) -> None:
        """Hand events to their publishers; wait for capacity. Any thread."""
        fitting = [event for event in events if self._fits(event)]
        packed = [(event, pack(event.publisher_id, event.sequence, event.body)) for event in fitting]
        self._capacity.reserve(len(packed), sum(len(frame) for _, frame in packed))
        self._io.post(lambda: self._take(packed))

    def wanted(self, place: Scoped) -> bool:
        """Return whether a publisher of this place has a subscriber; True if it has no publisher yet. Any thread."""
        found = [each for (at, _), each in list(self.publishers.items()) if at == place]
        return not found or any(each.lane.publishing.wants(place.key) for each in found)

    @property
    def linked(self) -> bool:
        """Whether all publishers that are listened to are connected. Any thread."""
        return self._sources.linked

    def listen(self, wanted: KeySet | None, receive: Receive) -> None:
        """Receive these keys from now on."""
        self._sources.listen(wanted, receive)

    def diagnostics(self) -> dict[str, Any]:
        """Return this process's endpoints and publishers, and those that it listens to. Any thread."""
        return {
            "listening": [lane.endpoint for lane in list(self.lanes)],
            "publishers": len(self.publishers),
            "connections": self._sources.connections(),
            **self._registry.diagnostics(),
        }

    def hurry(self) -> None:
        """Hold events no longer than necessary, because the fabric closes."""
        self._closing = True
        self._release_found()

    def closed(self) -> None:
        """Remove this process's records, now that its sockets are closed. Any thread.

        Not earlier, or subscribers would disconnect before they have received everything.
        """
        self._registry.close()

    def _take(self, events: Sequence[tuple[DynamoOutgoing, bytes]]) -> None:
        ready: dict[Lane, list[tuple[str, bytes]]] = {}
        for event, packed in events:
            try:
                publisher = self.publishers.use((event.place, event.publisher_id))
            except TransportError as error:  # for example, too many open files
                self._counts.report(EVENT_DROPPED, "dropped_no_socket", event.place.key, detail=str(error)[:500])
                self._capacity.release(1, len(packed))
                continue
            batch = publisher.held if publisher.held is not None else ready.setdefault(publisher.lane, [])
            batch.append((event.place.key, packed))
        for lane, batch in ready.items():
            lane.publishing.queue(batch)

    def _found(self, channels: dict[str, Channel]) -> None:  # on the registry's thread
        self._io.post(lambda: self._sources.found(channels))

    def _join(self, known: tuple[Scoped, int]) -> LanePublisher:
        place, publisher_id = known
        lane = self._lane_without(place.topic)
        publisher = LanePublisher(Channel(place, publisher_id, lane.endpoint), lane)
        lane.publishers[place.topic] = publisher
        self._waiting.add(publisher)
        self._registry.register(publisher.channel, lambda: self._io.post(lambda: self._registered(publisher)))
        return publisher

    def _registered(self, publisher: LanePublisher) -> None:
        publisher.registered_at = time.monotonic()
        self._io.later(HOLD_S, self._release_found)
        self._io.later(HOLD_MAX_S, self._release_found)

    def _release_found(self) -> None:
        now = time.monotonic()
        for publisher in [each for each in self._waiting if each.is_found(now, self._closing)]:
            self._release(publisher)

    def _release(self, publisher: LanePublisher) -> None:
        self._waiting.discard(publisher)
        held, publisher.held = publisher.held, None
        if held:
            publisher.lane.publishing.queue(held)

    def _lane_without(self, topic: str) -> Lane:
        for lane in self.lanes:
            if topic not in lane.publishers:
                return lane
        if len(self.lanes) < LANES_MAX:
            return self._new_lane()
        oldest = next(known for known in self.publishers if known[0].topic == topic)
        publisher = self.publishers.pop(oldest)
        self._retired(oldest, publisher)
        return publisher.lane

    def _new_lane(self) -> Lane:
        if self._refused is not None and not self._retries.due():
            raise self._refused
        try:
            self.lanes.append(Lane(self._io, self._counts, self._options, self._capacity, self._release_found))
        except TransportError as error:
            self._refused = error
            self._retries.due()  # the first retry waits too
            raise
        self._refused = None
        return self.lanes[-1]

    def _retired(self, known: tuple[Scoped, int], publisher: LanePublisher) -> None:
        """Withdraw the publisher that was idle longest. It registers again with its next event."""
        self._release(publisher)
        del publisher.lane.publishers[publisher.channel.place.topic]
        self._registry.unregister(publisher.channel)
        self._counts.report(RETIRED, "publishers_retired", known[0].key, detail="too many publishers in this process")

    def _fits(self, event: DynamoOutgoing) -> bool:
        if _record_fits(event.place):
            return True
        reason = str(KeyInvalid(event.place.key, "its discovery record would have a file name over 255 bytes"))
        self._counts.report(EVENT_DROPPED, "key_rejected", event.place.key, detail=reason[:500])
        return False


@lru_cache(maxsize=16_384)
def _record_fits(place: Scoped) -> bool:
    return len(file_name(f"{place.path}/{_LONGEST_ID}")) <= FILE_NAME_MAX
