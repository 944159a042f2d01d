"""The client side of request/reply on any fabric, and the encoding that both sides share.

A fabric may lose replies or end them early without an error (Zenoh does if the requester stalls). Each reply therefore
carries its number, and the last one the total, so that replies are complete or an error is raised.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import msgspec

from zbus.errors import (
    EventInvalid,
    HandlerFailed,
    NoResponders,
    RequestTimeout,
    TransportError,
    TransportUnsupported,
    ZbusError,
)
from zbus.ports.fabric import Fabric
from zbus.util.mailbox import Mailbox
from zbus.util.malformed import MALFORMED
from zbus.util.runtime import Runtime
from zbus.wire.envelope import CANCEL

ACCEPTED, DATA, END, FAILED = 0, 1, 2, 3
STREAM_S = 120.0  # the longest duration of one stream of replies
CANCELS = "@zbus/cancel"  # the key of cancellations; all nodes get them, as the requester may not know the server
_head = struct.Struct(">BI")  # the kind of a reply, and its number
_failure = msgspec.msgpack.Decoder(tuple[str, str]).decode
_encode = msgspec.msgpack.Encoder().encode


class RequestFrame(msgspec.Struct, array_like=True, frozen=True):
    """A request as it is encoded: an id, by which it can be cancelled, and the body."""

    id: int
    body: bytes


_decode_request = msgspec.msgpack.Decoder(RequestFrame).decode


def encode_request(request: RequestFrame) -> bytes:
    """Encode a request as the payload for a fabric."""
    return _encode(request)


def decode_request(payload: bytes) -> RequestFrame:
    """Decode a request. Raises `EventInvalid` if it is malformed."""
    try:
        return _decode_request(payload)
    except MALFORMED as error:
        raise EventInvalid(f"malformed request: {error}") from error


def encode_reply(kind: int, number: int, body: bytes = b"") -> bytes:
    """Encode one reply."""
    return _head.pack(kind, number) + body


def encode_failure(error: BaseException) -> bytes:
    """Encode an exception of a handler for the requester, whatever its text is."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    return _encode((type(error).__name__, text.encode(errors="backslashreplace").decode()))


class PendingRequest:
    """The replies to one request, from the fabric's threads to the loop."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._loop = asyncio.get_running_loop()
        self._replies: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._accepted = False
        self.ended = False
        self.on_reply = Mailbox[bytes | None](self._loop, self._take).post  # called on the fabric's threads

    def _take(self, replies: list[bytes | None]) -> None:
        self._replies.extend(replies)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def bodies(self) -> AsyncIterator[bytes]:
        """Return the bodies of the replies in order. Raises an error unless all of them arrive."""
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
                raise TransportError(f"the replies for {self.key!r} ended early, after {count}; retry the request")
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
        raise TransportError("malformed reply; retry the request") from None
    return kind, number, data[_head.size :]


def _read_failure(body: bytes) -> tuple[str, str]:
    try:
        return _failure(body)
    except MALFORMED:
        return "Error", "the reason could not be decoded"


class _NotSent(TransportError):
    """The request was not sent because this fabric is not connected. Another one may be."""


class RequestClient:
    """Sends requests over the fabrics of a node. Lives on the loop."""

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
        """Send a request and return the replies. Tries each fabric, `first` before the others, until one has a server.

        `timeout_s` applies to all replies together, or to each reply of a `stream`, all of which must arrive within
        `STREAM_S`. Raises `NoResponders`,
        `RequestTimeout`, `HandlerFailed`, or `TransportError` if replies are missing. If the caller stops early or is
        cancelled, the server stops as well.
        """
        fabrics = [fabric for fabric in self._fabrics() if not fabric.events_only]
        fabrics.sort(key=lambda fabric: fabric is not first)
        if not fabrics:
            names = ", ".join(fabric.name for fabric in self._fabrics()) or "zenoh (embedded)"
            raise TransportUnsupported(names, "requests to other nodes")
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
            latest = asyncio.get_running_loop().time() + total_s
            async with asyncio.timeout(timeout_s) as deadline:
                try:
                    handle = await self._run(
                        fabric.request, key, encode_request(frame), pending.on_reply, total_s + 1.0
                    )
                except TransportError as error:
                    raise _NotSent(str(error)) from error
                except (ZbusError, TimeoutError):
                    raise
                except Exception as error:  # the transport is faulty: another one may not be
                    raise _NotSent(f"{type(error).__name__}: {error}") from error
                async for reply in pending.bodies():
                    yield reply
                    if stream:
                        deadline.reschedule(min(asyncio.get_running_loop().time() + timeout_s, latest))
        except TimeoutError:
            raise RequestTimeout(key, timeout_s) from None
        finally:
            if not pending.ended and handle is not None:
                cancelling = self._run(_try_send, fabric, CANCELS, bytes([CANCEL]) + frame.id.to_bytes(8))
                cancelling.add_done_callback(lambda done: done.cancelled() or done.exception())  # the node is closing
            if handle is not None:
                with suppress(Exception):  # a faulty transport: the replies are ignored anyway
                    handle.close()  # type: ignore[attr-defined]


def _try_send(fabric: Fabric, key: str, frame: bytes) -> None:
    with suppress(Exception):  # the server ends by its own timeout
        fabric.send([(key, frame)])
