"""Traces: publish, deliver and handle are spans, and their context travels in the headers of the event.

The one place that imports OpenTelemetry, and only its API: which spans are kept, and where they go, is the
application's business, and without its SDK nothing is made and nothing is added to an event. The context is
written as W3C Trace Context and Baggage whatever the process is set to, because an event outlives the process.
No span that fails, and nothing that a header holds, makes a publish or a delivery fail. Spans are named and
described by OpenTelemetry's conventions for messaging, as of version 1.30.
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
LINKS_MAX = 128  # what the SDK keeps of one span, unless told otherwise
# What is read of a header that anybody may have written. Larger ones stay in the event and are not looked at.
READ_CHARS_MAX = {TRACEPARENT: 512, TRACESTATE: 512, BAGGAGE: 8192}
MEMBERS_MAX = 64

_w3c, _baggage = TraceContextTextMapPropagator(), W3CBaggagePropagator()


class Sending:
    """A span around one call that sends. `context` is what its events carry, `headers` that and those given."""

    __slots__ = ("_span", "context", "headers")

    def __init__(self, span: Span, headers: Mapping[str, str] | None) -> None:
        self._span, self.context = span, dict[str, str]()
        if span.get_span_context().is_valid:
            where = trace.set_span_in_context(span)
            _w3c.inject(self.context, where)
            _baggage.inject(self.context, where)
        self.headers = self.onto(headers)

    def onto(self, headers: Mapping[str, str] | None) -> SpanHeaders:
        """Headers with the context; without it where they have one already, or no room for it."""
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
        """Add an attribute."""
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
    """What makes the spans of one bus, by the provider that the application has set, or sets later."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("zbus")

    # Sending.

    def sending(
        self, operation: str, key: str, headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> Sending:
        """A span for a call that sends to one key. Headers that are none are refused before there is one."""
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
        """A span for events that have an identity, and perhaps a context, which they keep."""
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
        """Note that a reader has an event: a short span that links to its context, if it has one.

        It belongs to what the reader does at the time, and to the event's own trace where that is nothing.
        """
        if TRACEPARENT not in event.headers or (creation := _creation(event.headers)) is None:
            return
        ambient = trace.get_current_span().get_span_context().is_valid
        parent = None if ambient else trace.set_span_in_context(trace.NonRecordingSpan(creation))
        span = self._start("receive", "receive", event.key, SpanKind.CLIENT, _to(creation), parent)
        _describe(span, event, durable)
        _end(span, None)

    def handling(self, event: Event, operation: str = "process", durable: str | None = None) -> Handling:
        """A span for handling an event: a child of its context, with a link to what was current before, if any."""
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
        """The same handler, each event in a span."""

        async def handle(event: Event) -> Any:
            with self.handling(event, "process", durable):
                return await handler(event)

        return handle

    def service(self, handler: Handler, durable: str | None) -> tuple[Handler, contextvars.Context]:
        """The handler of `@bus.on`, and where its task runs: not in the span of whoever registered it."""
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
        except Exception as error:  # of a sampler or a processor of the application: the event goes on
            record(TRACING_FAILED, logging.ERROR, error, span=f"{operation} {key}")
            return trace.INVALID_SPAN


def _describe(span: Span, event: Event, durable: str | None = None) -> None:
    """Say which event a span is about."""
    if not span.is_recording():
        return
    said: dict[str, str | int] = {
        "messaging.message.id": f"{event.publisher_id}:{event.sequence}",
        "messaging.message.body.size": len(event.payload),
    }
    if event.correlation_id is not None:
        said["messaging.message.conversation_id"] = event.correlation_id
    if durable is not None:
        said["messaging.destination.subscription.name"] = durable
    span.set_attributes(said)


def _end(span: Span, error: BaseException | None) -> None:
    """End a span; an error is recorded, a cancellation is none."""
    if isinstance(error, Exception) and span.is_recording():
        span.record_exception(error)
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
    try:
        span.end()
    except Exception as failed:  # of a processor of the application
        record(TRACING_FAILED, logging.ERROR, failed)


def _creation(headers: Mapping[str, str]) -> SpanContext | None:
    """The context that an event was published in; None where there is none that can be read."""
    if not headers or TRACEPARENT not in headers:
        return None
    found = _w3c.extract(_readable(headers, TRACEPARENT, TRACESTATE), Context())
    context = trace.get_current_span(found).get_span_context()
    return context if context.is_valid else None


def _readable(headers: Mapping[str, str], *names: str) -> dict[str, str]:
    """Of some headers, those that can be parsed in little time, whoever wrote them."""
    found = {}
    for name in names:
        value = headers.get(name, "")
        if value.isascii() and 0 < len(value) <= READ_CHARS_MAX[name] and value.count(",") < MEMBERS_MAX:
            # Over a run of blanks the parser of baggage takes the square of its length.
            found[name] = " ".join(value.split()) if name == BAGGAGE else value
    return found


def _fits(headers: Mapping[str, str], context: Mapping[str, str]) -> bool:
    """Whether headers have room for a context; those that are not text are refused later, for that."""
    try:
        size = sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())
    except (AttributeError, UnicodeEncodeError):
        return False
    return size + sum(map(len, context.values())) + 8 * len(headers) < HEADERS_BYTES_MAX - 512


def _to(*contexts: SpanContext | None) -> list[Link]:
    return [Link(each) for each in contexts if each is not None]
