"""The discovery thread: it reports the publishers of other processes and keeps our own records alive.

Only this thread reads and writes the files, so that a slow disk or a lock never blocks events. A failure is counted
and tried again forever: a watch that ended at its first error would silence a subscriber permanently.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from zbus.errors import EventInvalid, TransportError
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_DISCOVERY_FAILED, TRANSPORT_INPUT_REJECTED
from zbus.util.backoff import Backoff
from zbus.util.run_id import inherit

from .filestore import ENTRIES_MAX, TOUCH_S, FileStore
from .records import Channel, read, record_key, write

POLL_S = 0.05
RETRY_MAX_S = 2.0

Changed = Callable[[dict[str, Channel]], None]


class DynamoRegistry:
    """Calls `changed` with all channels of other processes, by file name, whenever one is added or removed."""

    def __init__(self, store: FileStore, counts: Counters, changed: Changed) -> None:
        self._store, self._counts, self._changed = store, counts, changed
        self._orders: deque[tuple[Channel, Callable[[], None] | None]] = deque()
        self._files: dict[str, int] = {}
        self._channels: dict[str, Channel] = {}
        self._touch_at = time.monotonic() + TOUCH_S
        self._wake = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=inherit(self._run), name="zbus-dynamo-registry", daemon=True)
        self._thread.start()

    def register(self, channel: Channel, done: Callable[[], None]) -> None:
        """Queue a record to be published. `done` is called on the registry's thread once it is written."""
        self._order(channel, done)

    def unregister(self, channel: Channel) -> None:
        """Queue the removal of a record."""
        self._order(channel, None)

    def close(self) -> None:
        """Stop the thread and delete our records."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._thread.join(5.0)
        try:
            self._store.close()
        except TransportError as error:  # the records expire later
            self._counts.report(TRANSPORT_DISCOVERY_FAILED, "registry_failed", "close", detail=str(error)[:500])

    def diagnostics(self) -> dict[str, int]:
        """Return the number of records in the store, and of our own."""
        return {
            "records_seen": len(self._channels),
            "records_own": len(self._store.owned),
            "records_unreadable": self._store.unreadable,
        }

    def _order(self, channel: Channel, done: Callable[[], None] | None) -> None:
        with self._wake:
            self._orders.append((channel, done))
            self._wake.notify()

    def _run(self) -> None:
        backoff = Backoff(2 * POLL_S, RETRY_MAX_S)
        while not self._ended:
            retry_s = None
            try:
                self._write_ordered()
                self._look()
                if time.monotonic() >= self._touch_at:
                    self._touch_at = time.monotonic() + TOUCH_S
                    self._keep_alive()
                backoff.reset()
            except Exception as error:  # no content of the store may end the watch
                self._counts.report(TRANSPORT_DISCOVERY_FAILED, "registry_failed", "store", detail=str(error)[:500])
                retry_s = backoff.next()
            with self._wake:
                if not self._ended and (retry_s is not None or not self._orders):
                    self._wake.wait(retry_s or POLL_S)

    def _write_ordered(self) -> None:
        while self._orders:
            channel, done = self._orders[0]
            if done is None:
                self._store.delete(record_key(channel))
            else:
                self._store.put(record_key(channel), write(channel))
                done()
            self._orders.popleft()

    def _keep_alive(self) -> None:
        for name in self._store.touch():
            self._counts.report(
                TRANSPORT_DISCOVERY_FAILED, "record_written_again", name, detail="another process removed it"
            )
        self._store.reap()

    def _look(self) -> None:
        found, owned = self._store.files(), self._store.owned
        if found == self._files:
            return
        if len(found) >= ENTRIES_MAX:
            self._counts.report(
                TRANSPORT_DISCOVERY_FAILED,
                "records_over_limit",
                "store",
                detail=f"only {ENTRIES_MAX:,} records are looked at",
            )
        channels = {}
        for name, inode in found.items():
            if name in owned:
                continue
            known = self._channels.get(name) if self._files.get(name) == inode else self._read(name)
            if known is not None:
                channels[name] = known
        self._files, changed = found, channels != self._channels
        self._channels = channels
        if changed:
            self._changed(dict(channels))

    def _read(self, name: str) -> Channel | None:
        unreadable = self._store.unreadable
        value = self._store.read(name)
        if value is None:
            if self._store.unreadable != unreadable:
                self._counts.report(TRANSPORT_INPUT_REJECTED, "record_invalid", name, detail="not a readable file")
            return None
        try:
            return read(value)
        except EventInvalid as error:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "record_invalid", name, detail=str(error)[:500])
            return None
