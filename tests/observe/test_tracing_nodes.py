"""Traces across processes: the context of an event is the same on every transport, from every log, over bridges."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from bridge_support import receiving, router
from free_ports import free_port
from mesh_support import WIRES, Node, Wire, mesh_of, until
from nats_support import NatsServer, nats_server
from tracing_support import Spans, parent_id, provided, span_id, traceparent

import zbus

WAIT_S = 30.0


class TracedNode(Node):
    """A node whose application traces."""

    child = Path(__file__).parents[1] / "support" / "tracing_child.py"

    def spans(self, operation: str) -> list[dict[str, Any]]:
        return [span for span in self.call("spans") if span["name"].partition(" ")[0] == operation]

    def one(self, operation: str, count: int = 1) -> dict[str, Any]:
        """The last of so many spans, once there are so many."""
        until(lambda: len(self.spans(operation)) >= count, WAIT_S, f"span {count} of {operation}")
        return self.spans(operation)[count - 1]

    def child_of(self, span: dict[str, Any]) -> dict[str, Any]:
        """What was handled as a child of a span elsewhere, once it was."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [each for each in self.spans("process") if each["parent"] == span["span"]]
            return bool(found)

        until(there, WAIT_S, f"a child of {span['name']}")
        return found[0]


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_a_trace_goes_from_process_to_process(tmp_path: Path, wire: type[Wire]) -> None:
    with mesh_of(tmp_path, wire) as mesh:
        shop, billing = TracedNode(tmp_path, "shop", mesh.wire), TracedNode(tmp_path, "billing", mesh.wire)
        mesh.nodes += [shop, billing]
        shop.start()
        billing.start()
        billing.call("handle", "shop/**", "billing")
        billing.call("serve", "calc/echo", "echo")

        trace = shop.call("publish_in_span", "shop/orders")
        published = shop.one("publish")
        received, process, work = billing.one("receive"), billing.one("process"), billing.one("work")

        assert {each["trace"] for each in (published, received, process, work)} == {trace}
        assert process["parent"] == published["span"]
        assert work["parent"] == process["span"]
        assert received["links"] == process["links"] == [published["span"]]

        until(lambda: "reply" in shop.call("request", "calc/echo", "there", 2.0), WAIT_S, "the answer")
        (asked,) = [each for each in shop.spans("request") if each["error"] is None]
        assert billing.child_of(asked)["trace"] == asked["trace"]

        billing.kill()  # and so the next event comes from the log of the shop
        shop.call("publish_in_span", "shop/orders")
        billing.start()
        billing.call("handle", "shop/**", "billing")
        assert billing.child_of(shop.one("publish", 2))["links"] == [shop.one("publish", 2)["span"]]


@pytest.fixture
def spans() -> Iterator[Spans]:
    with provided(Spans()) as found:
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as running:
        yield running


@pytest.mark.parametrize("kept", [True, False], ids=["log", "no-log"])
async def test_a_bridge_carries_the_context_and_makes_no_span_of_its_own(
    spans: Spans, server: NatsServer, tmp_path: Path, kept: bool
) -> None:
    port = free_port()
    there = f"zenoh://127.0.0.1:{port}"
    log = str(tmp_path / "bridge.db") if kept else None
    async with router(port), zbus.open(transport=server.url) as left, zbus.open(transport=there) as right:
        async with receiving(right, "shop/**") as at_right, zbus.Bridge((server.url, there), ["shop/**"], log=log):
            await (await left.publisher("shop/orders")).publish(b"x")
            (event,) = await at_right.wait(1)
            with right.span(event):
                pass

    published = spans.one("publish")
    assert event.traceparent == traceparent(published)
    assert parent_id(spans.one("process")) == span_id(published)
    assert sorted(span.name.partition(" ")[0] for span in spans.all()) == ["process", "publish", "receive"]


async def test_programs_on_plain_nats_share_the_trace_by_their_headers(spans: Spans, server: NatsServer) -> None:
    elsewhere = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    plain = await nats.connect(server.url)
    arrived: asyncio.Queue[Any] = asyncio.Queue()

    async def hear(message: Any) -> None:
        arrived.put_nowait(message)

    await plain.subscribe("shop.out", cb=hear)
    await plain.flush()
    async with zbus.open(transport=server.url.replace("nats://", "nats+raw://")) as bus:
        async with bus.subscribe("shop/in") as sub:
            await plain.publish("shop.in", b"x", headers={"Traceparent": elsewhere})
            event = await asyncio.wait_for(sub.next(), WAIT_S)
            assert event is not None
            with bus.span(event):
                await (await bus.publisher("shop/out")).publish(b"y")
            message = await asyncio.wait_for(arrived.get(), WAIT_S)
    await plain.close()

    assert parent_id(spans.one("process")) == 0xB7AD6B7169203331
    assert message.headers["traceparent"] == traceparent(spans.one("publish"))


# What is imported.

USE = """
import asyncio, sys, zbus
async def use(**settings):
    async with zbus.open("memory", **settings) as bus, bus.subscribe("a/**") as sub:
        await (await bus.publisher("a/b")).publish(b"x")
        event = await anext(sub)
        with bus.span(event) as span:
            pass
        return bus._node.tracing, dict(event.headers), span
"""
BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def ran(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_application_that_does_not_trace_imports_nothing_of_opentelemetry() -> None:
    code = f"{USE}\nprint(asyncio.run(use()), [name for name in sys.modules if name.startswith('opentelemetry')])"

    assert ran(code) == "(None, {}, None) []"


def test_an_application_that_has_imported_it_is_traced_by_the_provider_that_it_sets_later() -> None:
    code = f"""{USE}
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from opentelemetry import trace
from tracing_support import Spans
async def late():
    async with zbus.open("memory") as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish(b"nobody traces yet")
        spans = Spans()
        trace.set_tracer_provider(spans.provider)
        await publisher.publish(b"x")
        print([span.name for span in spans.all()])
asyncio.run(late())
"""

    assert ran(code) == "['publish a/b']"


def test_without_the_library_auto_works_and_on_says_how_to_install_it() -> None:
    code = f"""{BLOCKED}{USE}
print(asyncio.run(use(tracing="auto")))
try:
    asyncio.run(use(tracing="on"))
except zbus.ConfigInvalid as error:
    print(error.field, error)
"""

    first, second = ran(code).splitlines()
    assert first == "(None, {}, None)"
    assert second.startswith("tracing ")
    assert "pip install 'zbus-mesh[tracing]'" in second


def test_the_environment_can_ask_for_it_and_forbid_it() -> None:
    code = f"{USE}\nprint(asyncio.run(use())[0] is not None)"

    assert ran(code, ZBUS_TRACING="on") == "True"
    assert ran(f"from opentelemetry import trace\n{code}") == "True"
    assert ran(f"from opentelemetry import trace\n{code}", ZBUS_TRACING="off") == "False"
    with pytest.raises(zbus.ConfigInvalid, match="tracing"):
        zbus.open(tracing="perhaps")
