"""The server side of request/reply: passes requests from the fabrics' threads to handlers, and sends their replies.

Handlers of users run on the loop. Pages of the log are read and sent on separate threads, so that a long replay does
not slow down the loop. Malformed requests are counted, logged at most once per minute and link, and never reach a
handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from zbus.errors import EventInvalid, TransportError, ZbusError
from zbus.observe.records import EVENT_INVALID, record, record_reason
from zbus.observe.throttle import Throttle
from zbus.ports.fabric import IncomingRequest
from zbus.util.mailbox import Calls
from zbus.util.runtime import Runtime
from zbus.util.window import Window

from .request_client import ACCEPTED, DATA, END, FAILED, decode_request, encode_failure, encode_reply

THREADS = 4
CANCELLED_KEPT = 100
REASON_CHARACTERS_MAX = 500
Handler = Callable[[Any], Awaitable[bytes]]
Source = Callable[[bytes, str], Iterable[bytes]]  # called with the body of the request and the link that it arrived on


class _Handler(NamedTuple):
    handler: Handler
    read: Callable[[bytes], Any]  # decodes the body for the handler; raises `EventInvalid` if it is malformed

    def respond(self, request: bytes) -> Awaitable[bytes]:
        return self.handler(self.read(request))


class RequestServer:
    """The handlers of a node, by key. Lives on the loop; only `on_request` may be called on any thread."""

    def __init__(self, count: Callable[[str, int], None], runtime: Runtime) -> None:
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._calls = Calls(self._loop)
        self._handlers: dict[str, _Handler] = {}
        self._sources: dict[str, Source] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled = Window[int](CANCELLED_KEPT, monotonic=runtime.monotonic)
        self._threads = runtime.executor(THREADS, "zbus-request")
        self._last_request_at = 0.0  # on the loop's clock
        self._throttle = Throttle(monotonic=runtime.monotonic)

    @property
    def keys(self) -> list[str]:
        """The keys that this node serves."""
        return [*self._handlers, *self._sources]

    @property
    def serves(self) -> bool:
        """Whether any handlers of users are registered."""
        return bool(self._handlers)

    def handle(self, key: str, handler: Handler, read: Callable[[bytes], Any] = bytes) -> None:
        """Serve a key with a coroutine that returns one reply. `read` decodes the request or raises `EventInvalid`."""
        self._handlers[key] = _Handler(handler, read)

    def serve(self, key: str, source: Source) -> None:
        """Serve a key with a function that returns any number of replies. It runs on a thread."""
        self._sources[key] = source

    def withdraw(self, key: str) -> None:
        """Serve a key no longer. Requests that have arrived are still answered."""
        self._sources.pop(key, None)

    def handler(self, key: str) -> Callable[[bytes], Awaitable[bytes]] | None:
        """Return the handler of a key on this node, or None."""
        served = self._handlers.get(key)
        return served.respond if served is not None else None

    def on_request(self, request: IncomingRequest, link: str = "") -> None:
        """Queue a request for its handler. Called on the fabrics' threads; does not block."""
        source = self._sources.get(request.key)
        if source is None:
            self._calls.soon(self._begin, request, link)
            return
        self._last_request_at = self._loop.time()
        with suppress(RuntimeError):  # closing: the requester gets no reply, and retries
            self._threads.submit(self._serve_from, request, source, link)

    def cancel(self, request_id: int) -> None:
        """Cancel a request whose requester no longer waits, even if the request has not arrived yet."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()
        else:
            self._cancelled.add(request_id)

    async def finish(self, quiet_s: float, timeout_s: float) -> None:
        """Keep serving the log until no request arrived for `quiet_s`, or at most for `timeout_s`."""
        self._last_request_at = now = self._loop.time()
        deadline = now + timeout_s
        while (left_s := min(deadline, self._last_request_at + quiet_s) - now) > 0:
            await asyncio.sleep(left_s)
            now = self._loop.time()

    def close(self) -> None:
        """Stop the threads and drop queued requests. Close the fabrics first, so that no reply can block."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def cancel_all(self) -> list[asyncio.Task[None]]:
        """Remove and cancel all handlers. Requests that arrive later are not served. Return the tasks to wait for."""
        self._handlers = {}
        tasks = list(self._tasks.values())  # in the order of their start
        for task in tasks:
            task.cancel()
        return tasks

    def _serve_from(self, request: IncomingRequest, source: Source, link: str) -> None:
        try:
            frame = decode_request(request.payload)
            request.reply(encode_reply(ACCEPTED, 0))
            number = 0
            for body in source(frame.body, link):
                request.reply(encode_reply(DATA, number, body))
                number += 1
            request.reply(encode_reply(END, number))
        except TransportError as error:
            _report_unsent(request, error)
        except EventInvalid as error:
            self._calls.soon(self._invalid, request.key, link, error)
            self._fail(request, error)
        except ZbusError as error:
            self._fail(request, error)
        except Exception as error:
            record("REPLY_FAILED", logging.ERROR, error, key=request.key)
            self._fail(request, error)
        finally:
            _close(request)

    def _invalid(self, key: str, link: str, error: EventInvalid) -> None:
        """Count a malformed request, and log it at most once per minute and link."""
        self._count("invalid_received", 1)
        self._count("invalid_request", 1)
        if self._throttle.due(link):
            reason = str(error)[:REASON_CHARACTERS_MAX]
            record_reason(EVENT_INVALID, logging.WARNING, code="invalid_request", reason=reason, link=link, key=key)

    def _fail(self, request: IncomingRequest, error: BaseException) -> None:
        try:
            request.reply(encode_reply(FAILED, 0, encode_failure(error)))
        except Exception as failed:
            _report_unsent(request, failed)

    def _begin(self, request: IncomingRequest, link: str) -> None:
        served = self._handlers.get(request.key)
        frame, body = None, None
        try:
            frame = decode_request(request.payload)
            if served is not None and frame.id not in self._cancelled:
                body = served.read(frame.body)
        except EventInvalid as error:
            self._invalid(request.key, link, error)
            self._end(request, error if frame is not None else None)
            return
        if served is None or frame.id in self._cancelled:
            self._end(request)
            return
        if frame.id in self._tasks:  # only a faulty requester repeats an id
            repeated = EventInvalid(f"request {frame.id} is already being handled")
            self._invalid(request.key, link, repeated)
            self._end(request, repeated)
            return
        task = self._loop.create_task(self._respond(request, body, served.handler))
        self._tasks[frame.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(frame.id, None))

    async def _respond(self, request: IncomingRequest, body: Any, handler: Handler) -> None:
        replies: list[bytes] = []
        await self._send(request, [encode_reply(ACCEPTED, 0)], last=False)
        try:
            replies = [encode_reply(DATA, 0, await handler(body)), encode_reply(END, 1)]
        except (SystemExit, KeyboardInterrupt):
            self._end(request)
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelling():
                self._end(request)
                raise
            self._count("handler_errors", 1)
            record("HANDLER_FAILED", logging.ERROR, error, key=request.key)
            replies = [encode_reply(FAILED, 0, encode_failure(error))]
        await self._send(request, replies, last=True)

    def _end(self, request: IncomingRequest, error: EventInvalid | None = None) -> None:
        """End a request without a reply, or with an error. Once the threads have ended, the fabric has done so."""

        def end() -> None:
            try:
                if error is not None:
                    self._fail(request, error)
            finally:
                _close(request)

        with suppress(RuntimeError):
            self._threads.submit(end)

    async def _send(self, request: IncomingRequest, replies: list[bytes], last: bool) -> None:
        def send() -> None:
            try:
                for reply in replies:
                    request.reply(reply)
            except Exception as error:
                _report_unsent(request, error)
            finally:
                if last:
                    _close(request)

        await self._loop.run_in_executor(self._threads, send)


def is_cancelling() -> bool:
    """Return whether the current task was cancelled. If not, a `CancelledError` is the failure of what it called."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _close(request: IncomingRequest) -> None:
    try:
        request.close()
    except Exception as error:
        _report_unsent(request, error)


def _report_unsent(request: IncomingRequest, error: Exception) -> None:
    unexpected = None if isinstance(error, TransportError) else error
    reason = str(error) or type(error).__name__
    record_reason("REPLY_FAILED", logging.WARNING, unexpected, code="reply_failed", reason=reason, key=request.key)
