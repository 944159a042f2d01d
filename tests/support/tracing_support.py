"""Spans for tests: a provider of the real SDK that keeps what was made, and ways to find it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler


class Spans:
    """What was made so far."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        # Not closed at the exit of the interpreter: nothing is left to send.
        self.provider = TracerProvider(sampler=sampler or ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("application")

    def all(self, name: str = "") -> list[ReadableSpan]:
        """Those that have ended, in that order; those of one name, or of one operation."""
        ended = self.exporter.get_finished_spans()
        return [span for span in ended if not name or span.name == name or span.name.partition(" ")[0] == name]

    def one(self, name: str) -> ReadableSpan:
        found = self.all(name)
        assert len(found) == 1, f"{len(found)} spans are {name!r}: {[span.name for span in self.all()]}"
        return found[0]


@contextmanager
def provided(spans: Spans) -> Iterator[Spans]:
    """Let this be the provider of the process for a while. OpenTelemetry itself lets it be set only once."""
    before, trace._TRACER_PROVIDER = trace._TRACER_PROVIDER, spans.provider
    try:
        yield spans
    finally:
        trace._TRACER_PROVIDER = before


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def linked_ids(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def traceparent(span: ReadableSpan) -> str:
    """The header that an event published in this span carries."""
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def as_json(span: ReadableSpan) -> dict[str, Any]:
    """What a test in another process looks at."""
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": trace_id(span),
        "span": span_id(span),
        "parent": parent_id(span),
        "links": linked_ids(span),
        "error": span.attributes.get("error.type") if span.attributes else None,
    }
