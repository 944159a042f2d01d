"""Scopes: namespace, component, endpoint, and publishers and subscribers made from them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

import zbus
from zbus import Bus, EventPublisher, EventSubscriber, KeyInvalid, PayloadInvalid, Scope


class Order(pydantic.BaseModel):
    id: int


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with zbus.open() as bus:
        yield bus


def scope_of(bus: Bus, kind: str) -> Scope:
    component = bus.component("shop", "orders")
    return {"namespace": bus.namespace("shop"), "component": component, "endpoint": component.endpoint("api")}[kind]


KINDS = {"namespace": "shop/created", "component": "shop/orders/created", "endpoint": "shop/orders/api/created"}


async def test_scopes_nest_from_namespace_to_component_to_endpoint(bus: Bus) -> None:
    namespace = bus.namespace("shop")
    component = namespace.component("orders")
    endpoint = component.endpoint("api")

    assert [each.kind for each in (namespace, component, endpoint)] == ["namespace", "component", "endpoint"]
    assert endpoint.segments == ("shop", "orders", "api")
    assert bus.component("shop", "orders").segments == component.segments


@pytest.mark.parametrize(("kind", "key"), KINDS.items())
async def test_an_event_goes_from_the_publisher_to_the_subscriber_of_the_same_scope_and_topic(
    kind: str, key: str, bus: Bus
) -> None:
    scope = scope_of(bus, kind)
    subscriber = await getattr(EventSubscriber, f"for_{kind}")(scope, "created")
    publisher = await getattr(EventPublisher, f"for_{kind}")(scope, "created")

    async with subscriber:
        await publisher.publish(b"x")
        event = await subscriber.next()

    assert (publisher.key, publisher.topic, subscriber.key_exprs) == (key, "created", (key,))
    assert (event.key, event.topic, event.payload) == (key, "created", b"x")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_scope_is_sugar_for_the_first_segments_of_a_key(kind: str, bus: Bus) -> None:
    publisher = await bus.publisher(KINDS[kind])

    async with await getattr(EventSubscriber, f"for_{kind}")(scope_of(bus, kind), "created") as subscriber:
        await publisher.publish(b"x")
        event = await subscriber.next()

    assert event.key == KINDS[kind]


async def test_a_subscriber_of_a_scope_takes_the_options_of_subscribe(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        scope = bus.component("shop", "orders")
        await (await EventPublisher.for_component(scope, "created")).publish({"id": 1})

        subscriber = await EventSubscriber.for_component(scope, "created", start="beginning", schema=Order)
        async with subscriber:
            event = await subscriber.next()

    assert event is not None
    assert event.decode() == Order(id=1)


@pytest.mark.parametrize("end", [EventPublisher, EventSubscriber], ids=["publisher", "subscriber"])
@pytest.mark.parametrize(
    ("wanted", "given"), [(wanted, given) for wanted in KINDS for given in KINDS if wanted != given]
)
async def test_a_scope_of_another_kind_is_refused_by_name(end: Any, wanted: str, given: str, bus: Bus) -> None:
    with pytest.raises(KeyInvalid, match=f"this scope is a {given}, but must be a {wanted}"):
        await getattr(end, f"for_{wanted}")(scope_of(bus, given), "created")


async def test_only_a_namespace_has_components_and_only_a_component_has_endpoints(bus: Bus) -> None:
    with pytest.raises(KeyInvalid, match="only a namespace"):
        bus.component("shop", "orders").component("more")
    with pytest.raises(KeyInvalid, match="only a component"):
        bus.namespace("shop").endpoint("api")
    with pytest.raises(KeyInvalid, match="only a component"):
        scope_of(bus, "endpoint").endpoint("api")


BAD_SEGMENTS = ["", "a/b", "/", "*", "**", "a$*", "$a", "@a", "a b", "a\n", "x" * 2000, None, 5]


@pytest.mark.parametrize("segment", BAD_SEGMENTS, ids=lambda segment: repr(segment)[:10])
async def test_a_part_of_a_scope_is_one_concrete_segment(segment: Any, bus: Bus) -> None:
    component = bus.component("shop", "orders")

    with pytest.raises(KeyInvalid):
        bus.namespace(segment)
    with pytest.raises(KeyInvalid):
        bus.component("shop", segment)
    with pytest.raises(KeyInvalid):
        bus.component(segment, "orders")
    with pytest.raises(KeyInvalid):
        bus.namespace("shop").component(segment)
    with pytest.raises(KeyInvalid):
        component.endpoint(segment)
    with pytest.raises(KeyInvalid):
        await EventPublisher.for_component(component, segment)
    with pytest.raises(KeyInvalid):
        await EventSubscriber.for_component(component, segment)


async def test_a_refused_subscriber_leaves_no_subscription_behind(bus: Bus) -> None:
    with pytest.raises(KeyInvalid):
        await EventSubscriber.for_component(bus.component("shop", "orders"), "a/b")

    assert bus.diagnostics()["subscriptions"] == 0


async def test_a_typed_stream_gives_each_event_with_its_value(bus: Bus) -> None:
    publisher = await bus.publisher("shop/orders/created")
    async with bus.subscribe("shop/**") as sub:
        await publisher.publish_many([Order(id=1), Order(id=2)])
        await sub.aclose()

        seen = [(event.sequence, order) async for event, order in sub.typed(Order)]

    assert seen == [(0, Order(id=1)), (1, Order(id=2))]


async def test_a_typed_stream_says_which_event_does_not_fit(bus: Bus) -> None:
    publisher = await bus.publisher("shop/orders/created")
    async with bus.subscribe("shop/**") as sub:
        await publisher.publish({"id": "x"})

        with pytest.raises(PayloadInvalid) as caught:
            await anext(sub.typed(Order))

    assert caught.value.event is not None
    assert caught.value.event.key == "shop/orders/created"


async def test_next_gives_what_is_queued_and_then_none_for_ever_once_the_subscription_is_closed(bus: Bus) -> None:
    sub = bus.subscribe("**")
    await (await bus.publisher("a")).publish(b"last")
    await sub.aclose()

    event = await sub.next()

    assert event is not None
    assert event.payload == b"last"
    assert await sub.next() is None
    assert await sub.next() is None


async def test_next_gives_none_once_the_bus_is_closed() -> None:
    async with zbus.open() as bus:
        sub = bus.subscribe("**")
        await (await bus.publisher("a")).publish(b"last")

    assert (await sub.next()) is not None
    assert (await sub.next()) is None
