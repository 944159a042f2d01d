"""A node of the mesh tests in an application that traces: it keeps its spans, and tells them."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import mesh_child
from opentelemetry import trace
from tracing_support import Spans, as_json

import zbus

spans = Spans()


class Program(mesh_child.Program):
    """Calls that publish, ask and handle in spans."""

    async def publish_in_span(self, key: str) -> int:
        """Publish one event inside a span of the application; returns that span's trace."""
        publisher = await self.bus.publisher(key)
        with spans.tracer.start_as_current_span("checkout") as checkout:
            await publisher.publish(b"x")
        return checkout.get_span_context().trace_id

    async def handle(self, key: str, durable: str | None = None) -> None:
        @self.bus.on(key, durable=durable)
        async def handler(event: zbus.Event) -> None:
            with spans.tracer.start_as_current_span("work"):
                pass

    async def spans(self) -> list[dict[str, Any]]:
        return [as_json(span) for span in spans.all()]


if __name__ == "__main__":
    trace.set_tracer_provider(spans.provider)
    mesh_child.Program = Program  # type: ignore[misc]
    mesh_child.facts = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    asyncio.run(mesh_child.main())
