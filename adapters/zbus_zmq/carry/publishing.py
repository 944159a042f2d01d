"""Publishing: one queue and one XPUB socket, however many publishers the process has.

`send` appends and wakes the I/O thread once per burst; it waits for capacity, but never forever. The socket receives
subscriptions, so `wants` knows them, and the first messages wait a moment for the subscriptions of nodes that already
run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import zmq

from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED
from zbus.util.memo import Memo
from zbus_zmq.address.options import ZmqOptions
from zbus_zmq.address.topics import topic_of
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.pacing import LAST, MORE, PacedSender, quick_send
from zbus_zmq.io.stamps import stamps_of

from .capacity import Capacity
from .subscribers import Subscribers

BURST_FRAMES = 1000  # sent before other sockets get their turn
RETRY_S = 0.002
TOPICS_MAX = 100_000

Batch = Sequence[tuple[str, bytes]]
Shape = Callable[[bytes, bytes], Sequence[bytes]]  # the parts of a message, from its topic and its frame


def stamped(node: str) -> Shape:
    """Return a function that makes messages for brokers: topic, stamp, frame."""
    stamp = stamps_of(node)
    return lambda topic, frame: (topic, stamp(), frame)


class ZmqPublishing:
    """Sends events. `send`, `queue`, `wants` and `diagnostics` run on any thread, the rest on the I/O thread."""

    def __init__(
        self,
        io: IoThread,
        socket: zmq.Socket[bytes],
        node: str,
        options: ZmqOptions,
        counts: Counters,
        *,
        topic_of: Callable[[str], bytes] = topic_of,
        shape: Shape | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        """`capacity` may be shared by several sockets."""
        self._topic_of, self._shape = topic_of, shape
        self._capacity = capacity if capacity is not None else Capacity()
        self._io, self._counts = io, counts
        self._frame_bytes_max = options.max_message_bytes
        self._send = quick_send(socket)
        self._subscribers = Subscribers(socket, node, counts)
        self._pacer = PacedSender(io, socket, options.stall_s, counts, node.encode(), self._subscribers.marks)
        self._subscribers.seen = self._pacer.released
        self._lock = threading.Lock()
        self._queue: deque[Batch] = deque()
        self._taken: deque[Batch] = deque()  # out of the queue by the I/O thread, not all sent yet
        self._at = 0
        self._posted = self._held = False
        self._expected: frozenset[str] = frozenset()
        self._round = 0
        self._topics: Memo[str, bytes] = Memo(TOPICS_MAX, topic_of)

    # any thread

    def send(self, frames: Batch) -> None:
        """Queue frames in order, all of them or none. Waits for capacity."""
        self._capacity.reserve(len(frames), sum(len(frame) for _, frame in frames))
        self.queue(frames)

    def queue(self, frames: Batch) -> None:
        """Queue frames whose capacity is already reserved. Never waits."""
        with self._lock:
            self._queue.append(frames)
            if self._posted:
                return
            self._posted = True
        self._io.post(self._flush)

    def wants(self, key: str) -> bool:
        """Return whether a subscription may match this key."""
        return self._capacity.linked and self._subscribers.wants(self._topic_of(key))

    @property
    def subscribed(self) -> bool:
        """Whether there is any subscription."""
        return bool(self._subscribers.wanted)

    def close(self) -> None:
        """Let every `send` fail from now on, including those that wait."""
        self._capacity.close()

    def diagnostics(self) -> dict[str, int]:
        """Return the size of the queue, and the subscribers."""
        return {
            "queued_frames": self._capacity.messages,
            "queued_bytes": self._capacity.bytes,
            "subscriptions": len(self._subscribers.wanted),
            "nodes_connected": len(self._subscribers.nodes),
            "nodes_stuck": len(self._pacer.stuck),
        }

    # the I/O thread

    def expect(self, nodes: Iterable[str], within_s: float) -> None:
        """Let sends wait until these nodes have subscribed to us, or for a while."""
        self._round += 1
        turn = self._round
        self._expected = frozenset(nodes)
        self._capacity.set_settled(False)
        self._io.later(within_s, lambda: self._settle(turn))
        self._check_settled()

    def set_linked(self, linked: bool) -> None:
        """Say whether there is something to send to, such as a broker. If not, sends wait a moment, then fail."""
        self._capacity.set_linked(linked)
        self._check_settled()

    def on_readable(self) -> None:
        """Receive subscriptions."""
        self._subscribers.on_readable()
        self._check_settled()

    def drain(self, timeout_s: float) -> None:
        """Send queued messages until the time is over. The remaining ones are counted."""
        deadline = time.monotonic() + timeout_s
        while (self._queue or self._taken) and time.monotonic() < deadline:
            self._flush()
            if self._held:
                time.sleep(RETRY_S)  # the thread has nothing else left to do
        if self._capacity.messages:
            self._counts.report(EVENT_DROPPED, "closed_before_sent", "publishing", self._capacity.messages)

    def _flush(self) -> None:
        with self._lock:
            self._posted = False
            self._taken.extend(self._queue)
            self._queue.clear()
        done = size = 0
        while self._taken and done < BURST_FRAMES:
            batch = self._taken[0]
            at = self._send_batch(batch, self._at)
            if at > self._at:
                self._held = False
                self._pacer.moved(at - self._at)
            if at < len(batch):
                self._at, self._held = at, True
                break
            self._taken.popleft()
            self._at = 0
            done += len(batch)
            size += sum(len(frame) for _, frame in batch)
        if done:
            self._capacity.release(done, size)
        if self._taken:
            self._again(RETRY_S if self._held else 0.0)

    def _again(self, delay_s: float) -> None:
        with self._lock:
            if self._posted:
                return
            self._posted = True
        self._io.later(delay_s, self._flush)

    def _send_batch(self, batch: Batch, at: int) -> int:
        """Send from the index `at` on. Return the index at which the socket refused a message."""
        send, topics, shape = self._send, self._topics, self._shape
        for index in range(at, len(batch)):
            key, frame = batch[index]
            topic = topics[key]
            if len(frame) > self._frame_bytes_max:
                self._counts.report(EVENT_DROPPED, "frame_too_large", key)
                continue
            parts = (topic, frame) if shape is None else shape(topic, frame)
            try:
                # libzmq counts whole messages, so it can refuse only the first part.
                for part in parts[:-1]:
                    send(part, MORE)
                send(parts[-1], LAST)
            except zmq.Again:
                if not self._pacer.refused(parts):
                    return index
        return len(batch)

    def _check_settled(self) -> None:
        if not self._capacity.settled and self._capacity.linked and self._expected <= self._subscribers.nodes:
            self._settle(self._round)

    def _settle(self, turn: int) -> None:
        if turn == self._round:
            self._capacity.set_settled(True)
