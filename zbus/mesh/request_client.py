"""Questions and their replies, on any fabric: numbered, counted, and ended by a marker.

A fabric may lose replies or end them early without a word (Zenoh does, when the asker stalls), so each
reply says its number and the last one how many there were: an answer is complete, or an error.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from zbus.errors import EventInvalid, HandlerFailed, NoResponders, RequestTimeout, TransportError, TransportUnsupported
from zbus.ports.fabric import Fabric
from zbus.util.mailbox import Mailbox
from zbus.util.runtime import Runtime
from zbus.wire.envelope import CANCEL

ACCEPTED, DATA, END, FAILED = 0, 1, 2, 3
STREAM_S = 120.0  # the longest that one stream of replies may take
CANCELS = "@zbus/cancel"  # where nodes hear that an asker no longer waits; the asker may not know yet who has taken it
_head = struct.Struct(">BI")  # the kind of a reply, and its number
_failure = msgspec.msgpack.Decoder(tuple[str, str]).decode
_encode = msgspec.msgpack.Encoder().encode


class RequestFrame(msgspec.Struct, array_like=True, frozen=True):
    """A question as it travels: who asks, by what number, and what."""

    id: int
    body: bytes


_decode_request = msgspec.msgpack.Decoder(RequestFrame).decode


def encode_request(request: RequestFrame) -> bytes:
    """The payload of a question."""
    return _encode(request)


def decode_request(payload: bytes) -> RequestFrame:
    """Read a question; raise `EventInvalid` for anything that is none."""
    try:
        return _decode_request(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventInvalid(f"not a question: {error}") from error


def encode_reply(kind: int, number: int, body: bytes = b"") -> bytes:
    """One reply."""
    return _head.pack(kind, number) + body


def encode_failure(error: BaseException) -> bytes:
    """What a handler's error looks like at the far end."""
    return _encode((type(error).__name__, str(error)))


class PendingRequest:
    """The replies to one question, from the fabric's threads to the loop."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._loop = asyncio.get_running_loop()
        self._replies: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._accepted = False
        self.ended = False
        self.on_reply = Mailbox[bytes | None](self._loop, self._take).post  # for the fabric's thread

    def _take(self, replies: list[bytes | None]) -> None:
        self._replies.extend(replies)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def bodies(self) -> AsyncIterator[bytes]:
        """The bodies in order; raises unless every one of them came."""
        count = 0
        while True:
            while not self._replies:
                self._waiter = self._loop.create_future()
                await self._waiter
            data = self._replies.popleft()
            if data is None:
                self.ended = True
                if not self._accepted and not count:
                    raise NoResponders(self.key)
                raise TransportError(f"the answer for {self.key!r} ended early, after {count} replies; ask again")
            kind, number, body = _read_reply(data)
            if kind == ACCEPTED:
                self._accepted = True
            elif kind == DATA and number == count:
                count += 1
                yield body
            elif kind == END and number == count:
                self.ended = True
                return
            elif kind == FAILED:
                self.ended = True
                raise HandlerFailed(self.key, *_read_failure(body))
            else:
                raise TransportError(f"replies for {self.key!r} are missing: {count} came before number {number}")


def _read_reply(data: bytes) -> tuple[int, int, bytes]:
    try:
        kind, number = _head.unpack_from(data)
    except struct.error:
        raise TransportError("a reply that is none; ask again") from None
    return kind, number, data[_head.size :]


def _read_failure(body: bytes) -> tuple[str, str]:
    try:
        return _failure(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "Error", "its reason could not be read"


class _NotSent(TransportError):
    """The question never left: this fabric has no connection now. Another one may have."""


class RequestClient:
    """Asks over the fabrics of a node. Lives on the loop."""

    def __init__(
        self,
        fabrics: Callable[[], Sequence[Fabric]],
        run: Callable[..., asyncio.Future[object]],
        runtime: Runtime,
    ) -> None:
        self._fabrics, self._run, self._randbits = fabrics, run, runtime.randbits

    async def request(
        self, key: str, body: bytes, timeout_s: float, first: Fabric | None = None, stream: bool = False
    ) -> AsyncIterator[bytes]:
        """The replies of one who answers for `key`: each of the fabrics is tried until one knows somebody.

        `timeout_s` is for all of it, or, for a `stream`, for each reply.
        Raises `NoResponders`, `RequestTimeout`, `HandlerFailed`, or `TransportError` where replies are missing. Left
        before its end, or cancelled, the one who answers is told.
        """
        fabrics = [fabric for fabric in self._fabrics() if not fabric.events_only]
        fabrics.sort(key=lambda fabric: fabric is not first)
        if not fabrics:
            names = ", ".join(fabric.name for fabric in self._fabrics()) or "zenoh (embedded)"
            raise TransportUnsupported(names, "asking other nodes")
        for fabric in fabrics:
            last = fabric is fabrics[-1]
            replies = self._request_over(fabric, key, body, timeout_s, stream)
            try:
                async for reply in replies:
                    yield reply
                return
            except (NoResponders, _NotSent):
                if last:
                    raise
            finally:
                await replies.aclose()  # type: ignore[attr-defined]

    async def _request_over(
        self, fabric: Fabric, key: str, body: bytes, timeout_s: float, stream: bool
    ) -> AsyncIterator[bytes]:
        pending = PendingRequest(key)
        frame = RequestFrame(self._randbits(62), body)
        handle = None
        try:
            total_s = STREAM_S if stream else timeout_s
            async with asyncio.timeout(timeout_s) as deadline:
                try:
                    handle = await self._run(
                        fabric.request, key, encode_request(frame), pending.on_reply, total_s + 1.0
                    )
                except TransportError as error:
                    raise _NotSent(str(error)) from error
                async for reply in pending.bodies():
                    yield reply
                    if stream:
                        deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)
        except TimeoutError:
            raise RequestTimeout(key, timeout_s) from None
        finally:
            if not pending.ended and handle is not None:
                self._run(_try_send, fabric, CANCELS, bytes([CANCEL]) + frame.id.to_bytes(8))
            if handle is not None:
                handle.close()  # type: ignore[attr-defined]


def _try_send(fabric: Fabric, key: str, frame: bytes) -> None:
    try:
        fabric.send([(key, frame)])
    except TransportError:
        pass  # it learns of it when its own time is over
