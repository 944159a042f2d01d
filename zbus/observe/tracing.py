"""Tracing: spans for publishing, receiving and handling, with their context in the headers of the event.

This is the only module that imports OpenTelemetry, and it imports only the API. The application's SDK keeps
and exports spans; without an SDK, no spans are made and nothing is added to an event. The
context is always written as W3C Trace Context and Baggage, whatever propagator the process uses, because an event
outlives the process. Neither a span that fails nor the content of a header can make a publish or a delivery fail.
Names and attributes follow OpenTelemetry's semantic conventions for messaging, version 1.30.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from zbus.event import Event
from zbus.headers import (
    BAGGAGE,
    CORRELATION_ID,
    HEADERS_BYTES_MAX,
    TRACEPARENT,
    TRACESTATE,
    SpanHeaders,
    encode_headers,
)

from .records import record

Handler = Callable[[Event], Awaitable[Any]]

TRACING_FAILED = "TRACING_FAILED"
LINKS_MAX = 128  # per span; the default limit of the SDK
# Limits for headers, which any program may have written. Larger ones stay in the event and are not parsed.
READ_CHARS_MAX = {TRACEPARENT: 512, TRACESTATE: 512, BAGGAGE: 8192}
MEMBERS_MAX = 64

_w3c, _baggage = TraceContextTextMapPropagator(), W3CBaggagePropagator()


class Sending:
    """A span around one call that sends. Its events carry `context`; `headers` are the given headers with it."""

    __slots__ = ("_span", "context", "headers")

    def __init__(self, span: Span, headers: Mapping[str, str] | None) -> None:
        self._span, self.context = span, dict[str, str]()
        if span.get_span_context().is_valid:
            where = trace.set_span_in_context(span)
            _w3c.inject(self.context, where)
            _baggage.inject(self.context, where)
        self.headers = self.onto(headers)

    def onto(self, headers: Mapping[str, str] | None) -> SpanHeaders:
        """Return the headers with the context, or without it if they already have one or would become too large."""
        given = headers and (TRACEPARENT in headers or not _fits(headers, self.context))
        return SpanHeaders({} if given else self.context, headers)

    def __enter__(self) -> Sending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.headers.sent is not None:
            publisher_id, sequence, size = self.headers.sent
            self._span.set_attributes(
                {"messaging.message.id": f"{publisher_id}:{sequence}", "messaging.message.body.size": size}
            )
        _end(self._span, error)

    def note(self, name: str, value: str | int) -> None:
        """Set an attribute of the span."""
        self._span.set_attribute(name, value)


class Handling:
    """A span that is current in a `with` block, as a child of the event's context."""

    __slots__ = ("_context", "_span", "_token")

    def __init__(self, span: Span, context: Context) -> None:
        self._span, self._context = span, trace.set_span_in_context(span, context)

    def __enter__(self) -> Span:
        self._token = contexts.attach(self._context)
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        _end(self._span, error)


class Tracing:
    """Makes the spans of one bus, with the tracer provider that the application has set or sets later."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("zbus")

    # Sending.

    def sending(
        self, operation: str, key: str, headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> Sending:
        """Start a span for a call that sends to one key.

        Raises `EventInvalid` before the span is started if `headers` is not a mapping.
        """
        if headers is not None and not isinstance(headers, Mapping):
            encode_headers(headers, None, None)
        given = None if headers is None else _creation(headers)
        span = self._start(operation, "send", key, SpanKind.PRODUCER if given is None else SpanKind.CLIENT, _to(given))
        if correlation_id is None and headers:
            correlation_id = headers.get(CORRELATION_ID)
        if correlation_id is not None:
            span.set_attribute("messaging.message.conversation_id", correlation_id)
        return Sending(span, headers)

    def putting(self, events: Sequence[Event]) -> Sending:
        """Start a span for events that have an identity. Those that have a context keep it."""
        given = [context for event in events[:LINKS_MAX] if (context := _creation(event.headers)) is not None]
        kind = SpanKind.CLIENT if len(given) == len(events) else SpanKind.PRODUCER
        keys = {event.key for event in events}
        span = self._start("put", "send", keys.pop() if len(keys) == 1 else "", kind, _to(*given))
        if len(events) == 1:
            _describe(span, events[0])
        else:
            span.set_attribute("messaging.batch.message_count", len(events))
        return Sending(span, None)

    # Receiving.

    def received(self, event: Event, durable: str | None) -> None:
        """Make a short span for an event that a subscriber received, linked to the event's context. Without a
        context, make none.

        Its parent is the current span or, if there is none, the event's context.
        """
        if TRACEPARENT not in event.headers or (creation := _creation(event.headers)) is None:
            return
        ambient = trace.get_current_span().get_span_context().is_valid
        parent = None if ambient else trace.set_span_in_context(trace.NonRecordingSpan(creation))
        span = self._start("receive", "receive", event.key, SpanKind.CLIENT, _to(creation), parent)
        _describe(span, event, durable)
        _end(span, None)

    def handling(self, event: Event, operation: str = "process", durable: str | None = None) -> Handling:
        """Start a span for handling an event: a child of the event's context, linked to the current span if any."""
        context, creation, ambient = contexts.get_current(), None, trace.get_current_span().get_span_context()
        if TRACEPARENT in event.headers and (creation := _creation(event.headers)) is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(creation), context)
        if BAGGAGE in event.headers:
            context = _baggage.extract(_readable(event.headers, BAGGAGE), context)
        links = _to(creation, ambient if creation is not None and ambient.is_valid else None)
        span = self._start(operation, "process", event.key, SpanKind.CONSUMER, links, context)
        _describe(span, event, durable)
        return Handling(span, context)

    def handler(self, handler: Handler, durable: str | None = None) -> Handler:
        """Return a handler that runs `handler` for each event in a span."""

        async def handle(event: Event) -> Any:
            with self.handling(event, "process", durable):
                return await handler(event)

        return handle

    def service(self, handler: Handler, durable: str | None) -> tuple[Handler, contextvars.Context]:
        """Return the traced handler of `@bus.on`, and a context for its task without the caller's current span."""
        apart = contextvars.copy_context()
        apart.run(contexts.attach, Context())
        return self.handler(handler, durable), apart

    def _start(
        self,
        operation: str,
        type_: str,
        key: str,
        kind: SpanKind,
        links: Sequence[Link],
        context: Context | None = None,
    ) -> Span:
        attributes = {
            "messaging.system": "zbus",
            "messaging.operation.name": operation,
            "messaging.operation.type": type_,
        }
        if key:
            attributes["messaging.destination.name"] = key
        try:
            return self._tracer.start_span(f"{operation} {key}".rstrip(), context, kind, attributes, links)
        except (
            Exception
        ) as error:  # raised by a sampler or a processor of the application; the event must not be affected
            record(TRACING_FAILED, logging.ERROR, error, span=f"{operation} {key}")
            return trace.INVALID_SPAN


def _describe(span: Span, event: Event, durable: str | None = None) -> None:
    """Set the attributes that identify the event."""
    if not span.is_recording():
        return
    attributes: dict[str, str | int] = {
        "messaging.message.id": f"{event.publisher_id}:{event.sequence}",
        "messaging.message.body.size": len(event.payload),
    }
    if event.correlation_id is not None:
        attributes["messaging.message.conversation_id"] = event.correlation_id
    if durable is not None:
        attributes["messaging.destination.subscription.name"] = durable
    span.set_attributes(attributes)


def _end(span: Span, error: BaseException | None) -> None:
    """End a span. An exception is recorded as an error; a cancellation is not."""
    if isinstance(error, Exception) and span.is_recording():
        span.record_exception(error)
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
    try:
        span.end()
    except Exception as failed:  # raised by a processor of the application
        record(TRACING_FAILED, logging.ERROR, failed)


def _creation(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the context that an event was published in, or None if it is missing or malformed."""
    if not headers or not isinstance(headers, Mapping) or TRACEPARENT not in headers:
        return None
    found = _w3c.extract(_readable(headers, TRACEPARENT, TRACESTATE), Context())
    context = trace.get_current_span(found).get_span_context()
    return context if context.is_valid else None


def _readable(headers: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return those headers that can be parsed quickly; any program may have written them."""
    found = {}
    for name in names:
        value = headers.get(name, "")
        if value.isascii() and 0 < len(value) <= READ_CHARS_MAX[name] and value.count(",") < MEMBERS_MAX:
            # The time that the parser of baggage needs for a run of blanks grows with the square of its length.
            found[name] = " ".join(value.split()) if name == BAGGAGE else value
    return found


def _fits(headers: Mapping[str, str], context: Mapping[str, str]) -> bool:
    """Return whether headers with a context stay within the limit. Headers that are not text are rejected later."""
    try:
        size = sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())
    except (AttributeError, UnicodeEncodeError):
        return False
    return size + sum(map(len, context.values())) + 8 * len(headers) < HEADERS_BYTES_MAX - 512


def _to(*contexts: SpanContext | None) -> list[Link]:
    return [Link(each) for each in contexts if each is not None]
