"""Traces on one bus: which spans there are, what they say, and what belongs to what."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import messaging_attributes as conventions
from opentelemetry.trace import SpanKind, StatusCode
from tracing_support import Spans, linked_ids, parent_id, provided, span_id, trace_id, traceparent

import zbus
from zbus.headers import HEADERS_BYTES_MAX

WAIT_S = 20.0
ELSEWHERE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with provided(Spans()) as found:
        yield found


async def handled(bus: zbus.Bus, key: str, then: Any = None) -> asyncio.Event:
    """A handler for a key; the event is set when it ran."""
    ran = asyncio.Event()

    @bus.on(key)
    async def handle(event: zbus.Event) -> None:
        try:
            if then is not None:
                await then(event)
        finally:
            ran.set()

    return ran


async def settled(ran: asyncio.Event) -> None:
    """Until a handler ran, and what runs after it did."""
    await asyncio.wait_for(ran.wait(), WAIT_S)
    await asyncio.sleep(0)


# Publishing.


@pytest.mark.parametrize("log", [None, "memory"])
async def test_a_publish_is_a_producer_span_that_says_which_event_it_made(spans: Spans, log: str | None) -> None:
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("shop/orders/created")
        await publisher.publish(b"first")
        with spans.tracer.start_as_current_span("checkout") as checkout:
            await publisher.publish({"id": 1}, correlation_id="c-7")

    first, second = spans.all("publish shop/orders/created")
    assert (first.kind, second.kind) == (SpanKind.PRODUCER, SpanKind.PRODUCER)
    assert (parent_id(first), parent_id(second)) == (None, checkout.get_span_context().span_id)
    assert dict(second.attributes or {}) == {
        conventions.MESSAGING_SYSTEM: "zbus",
        conventions.MESSAGING_OPERATION_NAME: "publish",
        conventions.MESSAGING_OPERATION_TYPE: conventions.MessagingOperationTypeValues.SEND.value,
        conventions.MESSAGING_DESTINATION_NAME: "shop/orders/created",
        conventions.MESSAGING_MESSAGE_ID: f"{publisher.publisher_id}:1",
        conventions.MESSAGING_MESSAGE_BODY_SIZE: len(b'{"id":1}'),
        conventions.MESSAGING_MESSAGE_CONVERSATION_ID: "c-7",
    }
    assert conventions.MESSAGING_MESSAGE_CONVERSATION_ID not in (first.attributes or {})
    assert second.status.status_code is StatusCode.UNSET


async def test_the_event_carries_the_context_of_its_span_beside_the_headers_given(spans: Spans) -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
        token = context.attach(baggage.set_baggage("tenant", "größe x"))
        await (await bus.publisher("a/b")).publish({"id": 1}, headers={"n": "1"}, correlation_id="c")
        context.detach(token)
        event = await anext(sub)

    assert event.headers == {
        "content-type": "application/json",
        "correlation-id": "c",
        "n": "1",
        "traceparent": traceparent(spans.one("publish")),
        "baggage": "tenant=gr%C3%B6%C3%9Fe+x",
    }


async def test_baggage_that_the_caller_gives_wins_over_that_of_the_moment(spans: Spans) -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
        token = context.attach(baggage.set_baggage("tenant", "x"))
        await (await bus.publisher("a/b")).publish(b"x", headers={"baggage": "tenant=mine"})
        context.detach(token)
        event = await anext(sub)

    assert event.headers == {"baggage": "tenant=mine", "traceparent": traceparent(spans.one("publish"))}


async def test_many_events_of_one_call_share_one_span_that_counts_them(spans: Spans) -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/**", queue_events=3000) as sub:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"x", {"id": 1}, "text"] * 800, headers={"n": "1"})
        events = [await anext(sub) for _ in range(2400)]

    span = spans.one("publish a/b")
    assert (span.attributes or {})[conventions.MESSAGING_BATCH_MESSAGE_COUNT] == 2400
    assert conventions.MESSAGING_MESSAGE_ID not in (span.attributes or {})
    assert {event.traceparent for event in events} == {traceparent(span)}
    assert [event.content_type for event in events[:3]] == [None, "application/json", "text/plain"]
    assert {event.headers["n"] for event in events} == {"1"}


async def test_a_context_that_the_caller_gives_is_kept_and_linked(spans: Spans) -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
        publisher = await bus.publisher("a/b")
        token = context.attach(baggage.set_baggage("of", "another trace"))
        await publisher.publish(b"x", headers={"traceparent": ELSEWHERE})
        context.detach(token)
        await publisher.publish_many([b"y"], headers={"traceparent": ELSEWHERE, "tracestate": "a=1"})
        events = [await anext(sub) for _ in range(2)]

    assert [dict(event.headers) for event in events] == [
        {"traceparent": ELSEWHERE},
        {"traceparent": ELSEWHERE, "tracestate": "a=1"},
    ]
    for span in spans.all("publish"):
        assert linked_ids(span) == [0xB7AD6B7169203331]
        assert span.kind is SpanKind.CLIENT  # so say the conventions where the context is not the span's own


async def test_put_is_one_span_and_events_keep_the_context_that_they_have(spans: Spans) -> None:
    had = zbus.Event(7, 0, 5, "a/b", b"x", {"traceparent": ELSEWHERE})
    had_none = zbus.Event(7, 1, 5, "a/c", b"y", {"n": "1"})
    async with zbus.open("memory") as bus:
        assert await bus.put() == []
        await bus.put(had, had_none)
        await bus.put(zbus.Event(7, 2, 5, "a/c", b"zz"))
        first, second, third = [event async for event in bus.replay("a/**")]

    both, one = spans.all("put")
    assert (both.name, one.name) == ("put", "put a/c")
    assert (both.attributes or {})[conventions.MESSAGING_BATCH_MESSAGE_COUNT] == 2
    assert (one.attributes or {})[conventions.MESSAGING_MESSAGE_ID] == "7:2"
    assert linked_ids(both) == [0xB7AD6B7169203331]
    assert first.headers == had.headers
    assert second.headers == {"n": "1", "traceparent": traceparent(both)}
    assert third.traceparent == traceparent(one)


async def test_a_publish_that_fails_says_so_on_its_span(spans: Spans) -> None:
    async with zbus.open(payload_bytes_max=10) as bus:
        publisher = await bus.publisher("a/b")
        for call in (publisher.publish(b"x" * 11), publisher.publish_many([b"x" * 11])):
            with pytest.raises(zbus.EventTooLarge):
                await call
    with pytest.raises(zbus.BusClosed):
        await publisher.publish(b"x")

    assert [(span.attributes or {})["error.type"] for span in spans.all("publish")] == [
        "EventTooLarge",
        "EventTooLarge",
        "BusClosed",
    ]
    assert {span.status.status_code for span in spans.all("publish")} == {StatusCode.ERROR}
    assert [event.name for event in spans.all("publish")[0].events] == ["exception"]


@pytest.mark.parametrize("headers", [[("a", "b")], "ab", {"A": "x"}, {"a": 1}, {"a": "\ud800"}, {"a": "\n"}, {1: "a"}])
async def test_headers_that_are_refused_are_refused_with_tracing_too(spans: Spans, headers: Any) -> None:
    async with zbus.open("memory") as bus:
        publisher = await bus.publisher("a/b")
        with pytest.raises(zbus.EventInvalid):
            await publisher.publish(b"x", headers=headers)
        with pytest.raises(zbus.EventInvalid):
            await publisher.publish_many([b"x"], headers=headers)
        assert await bus.head() == 0


async def test_headers_that_just_fit_still_fit_with_tracing(spans: Spans) -> None:
    largest = {"v": "x" * (HEADERS_BYTES_MAX - 6)}
    async with zbus.open("memory") as bus:
        await (await bus.publisher("a/b")).publish(b"x", headers=largest)
        await bus.put(zbus.Event(7, 0, 5, "a/b", b"x", largest))
        events = [event async for event in bus.replay()]

    assert [dict(event.headers) for event in events] == [largest, largest]


async def test_what_is_not_sampled_says_so_to_those_who_follow() -> None:
    with provided(Spans(ALWAYS_OFF)) as none:
        async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
            ran = await handled(bus, "a/**")
            await (await bus.publisher("a/b")).publish(b"x")
            event = await anext(sub)
            await settled(ran)

    assert event.traceparent is not None
    assert int(event.traceparent[-2:], 16) & trace.TraceFlags.SAMPLED == 0
    assert none.all() == []


async def test_without_a_provider_nothing_is_made_and_nothing_is_added() -> None:
    assert trace._TRACER_PROVIDER is None
    async with zbus.open("memory", tracing="on") as bus, bus.subscribe("a/**") as sub:
        assert node_of(bus).tracing is not None
        ran = await handled(bus, "a/**")
        await (await bus.publisher("a/b")).publish(b"x")
        await (await bus.publisher("a/b")).publish_many([b"x"])
        events = [await anext(sub) for _ in range(2)]
        with bus.span(events[0]) as span:
            assert not span.is_recording()
        await settled(ran)

    assert [dict(event.headers) for event in events] == [{}, {}]


async def test_off_is_off(spans: Spans) -> None:
    async with zbus.open("memory", tracing="off") as bus, bus.subscribe("a/**") as sub:
        assert node_of(bus).tracing is None
        await (await bus.publisher("a/b")).publish(b"x")
        event = await anext(sub)
        with bus.span(event) as span:
            assert span is None

    assert spans.all() == []
    assert event.headers == {}


# Delivering.


async def test_a_delivery_links_to_the_publish_and_belongs_to_what_the_reader_does(
    spans: Spans, log_path: Path
) -> None:
    async with zbus.open(log_path) as bus, bus.subscribe("a/**", durable="billing") as sub:
        publisher = await bus.publisher("a/b")
        await publisher.publish(b"one", correlation_id="c")
        await publisher.publish(b"two")
        await anext(sub)
        with spans.tracer.start_as_current_span("batch") as batch:
            await anext(sub)

    published, deliveries = spans.all("publish"), spans.all("receive a/b")
    assert [linked_ids(each) for each in deliveries] == [[span_id(each)] for each in published]
    # With nothing around it, it is of the event's own trace rather than alone in one.
    assert parent_id(deliveries[0]) == span_id(published[0])
    assert parent_id(deliveries[1]) == batch.get_span_context().span_id
    assert deliveries[0].kind is SpanKind.CLIENT
    assert dict(deliveries[0].attributes or {}) == {
        conventions.MESSAGING_SYSTEM: "zbus",
        conventions.MESSAGING_OPERATION_NAME: "receive",
        conventions.MESSAGING_OPERATION_TYPE: conventions.MessagingOperationTypeValues.RECEIVE.value,
        conventions.MESSAGING_DESTINATION_NAME: "a/b",
        conventions.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: "billing",
        conventions.MESSAGING_MESSAGE_ID: (published[0].attributes or {})[conventions.MESSAGING_MESSAGE_ID],
        conventions.MESSAGING_MESSAGE_BODY_SIZE: 3,
        conventions.MESSAGING_MESSAGE_CONVERSATION_ID: "c",
    }


@pytest.mark.parametrize("options", [{}, {"overflow": "block"}, {"schema": bytes}, {"start": "beginning"}], ids=str)
async def test_every_kind_of_subscription_notes_its_deliveries_once(spans: Spans, options: dict[str, Any]) -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/**", **options) as sub:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"1", b"2", b"3"])
        assert [(await anext(sub)).payload for _ in range(3)] == [b"1", b"2", b"3"]

    assert len(spans.all("receive")) == 3


async def test_an_event_without_a_context_is_delivered_without_a_span(spans: Spans) -> None:
    async with zbus.open("memory", tracing="off") as untraced, zbus.open("memory") as bus:
        async with untraced.subscribe("a/**") as far, bus.subscribe("a/**") as sub:
            await (await untraced.publisher("a/b")).publish(b"x")
            event = await anext(far)
            node_of(bus).dispatcher.unstored([event])
            assert (await anext(sub)).headers == {}

    assert spans.all("receive") == []


async def test_a_stored_event_has_its_context_after_a_restart(spans: Spans, log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/b")).publish(b"x")

    async with zbus.open(log_path) as bus:
        replayed = [event async for event in bus.replay("a/**")]
        async with bus.subscribe("a/**", start="beginning") as sub:
            with bus.span(await anext(sub), "handle"):
                pass

    published = spans.one("publish")
    assert [event.traceparent for event in replayed] == [traceparent(published)]
    assert linked_ids(spans.one("receive")) == [span_id(published)]
    assert parent_id(spans.one("handle a/b")) == span_id(published)


# Handling.


async def test_a_handler_runs_in_a_span_of_the_events_trace_and_so_does_what_it_makes(spans: Spans) -> None:
    async with zbus.open("memory") as bus:
        follow_up = await bus.publisher("b/c")

        async def work(event: zbus.Event) -> None:
            assert baggage.get_baggage("tenant") == "x"
            with spans.tracer.start_as_current_span("work"):
                await follow_up.publish(b"y")

        ran = await handled(bus, "a/**", work)
        token = context.attach(baggage.set_baggage("tenant", "x"))
        await (await bus.publisher("a/b")).publish(b"x", correlation_id="c")
        context.detach(token)
        await settled(ran)

    first, process, work_span, second = (spans.one(each) for each in ("publish a/b", "process", "work", "publish b/c"))
    assert [parent_id(each) for each in (process, work_span, second)] == [
        span_id(first),
        span_id(process),
        span_id(work_span),
    ]
    assert {trace_id(each) for each in spans.all()} == {trace_id(first)}
    assert process.kind is SpanKind.CONSUMER
    assert linked_ids(process) == [span_id(first)]
    assert dict(process.attributes or {}) == {
        conventions.MESSAGING_SYSTEM: "zbus",
        conventions.MESSAGING_OPERATION_NAME: "process",
        conventions.MESSAGING_OPERATION_TYPE: conventions.MessagingOperationTypeValues.PROCESS.value,
        conventions.MESSAGING_DESTINATION_NAME: "a/b",
        conventions.MESSAGING_MESSAGE_ID: (first.attributes or {})[conventions.MESSAGING_MESSAGE_ID],
        conventions.MESSAGING_MESSAGE_BODY_SIZE: 1,
        conventions.MESSAGING_MESSAGE_CONVERSATION_ID: "c",
    }


async def test_a_handler_is_not_in_the_span_of_whoever_registered_it(spans: Spans) -> None:
    seen: list[bool] = []

    async def look(event: zbus.Event) -> None:
        seen.append(trace.get_current_span().get_span_context().is_valid)

    with spans.tracer.start_as_current_span("start of the application") as start:
        async with zbus.open("memory") as bus:
            ran = await handled(bus, "a/**", look)
            node_of(bus).dispatcher.unstored([zbus.Event(7, 0, 5, "a/b", b"x")])
            await settled(ran)

    assert seen == [True]
    assert spans.one("process").parent is None
    assert trace_id(spans.one("process")) != start.get_span_context().trace_id


async def test_a_handler_that_raises_leaves_the_error_on_its_span_each_time(spans: Spans, log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        tried, done = 0, asyncio.Event()

        @bus.on("a/**", durable="billing")
        async def bill(event: zbus.Event) -> None:
            nonlocal tried
            tried += 1
            if tried == 1:
                raise LookupError("no such order")
            done.set()

        await (await bus.publisher("a/b")).publish(b"x")
        await settled(done)

    failed, succeeded = spans.all("process")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "LookupError: no such order"
    assert (failed.attributes or {})["error.type"] == "LookupError"
    assert (failed.attributes or {})[conventions.MESSAGING_DESTINATION_SUBSCRIPTION_NAME] == "billing"
    assert [event.name for event in failed.events] == ["exception"]
    assert succeeded.status.status_code is StatusCode.UNSET
    assert parent_id(failed) == parent_id(succeeded) == span_id(spans.one("publish"))


async def test_a_handler_that_is_cancelled_has_not_failed(spans: Spans) -> None:
    began = asyncio.Event()

    async def wait(event: zbus.Event) -> None:
        began.set()
        await asyncio.sleep(3600)

    async with zbus.open("memory", close_timeout_s=0.2) as bus:
        await handled(bus, "a/**", wait)
        await (await bus.publisher("a/b")).publish(b"x")
        await began.wait()

    assert spans.one("process").status.status_code is StatusCode.UNSET


async def test_a_reader_makes_a_span_by_hand(spans: Spans) -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
        await (await bus.publisher("a/b")).publish(b"x")
        event = await anext(sub)
        with spans.tracer.start_as_current_span("request") as request, pytest.raises(ZeroDivisionError):
            with bus.span(event, "bill") as span:
                assert trace.get_current_span() is span
                span.set_attribute("order", 7)
                raise ZeroDivisionError
        assert not trace.get_current_span().get_span_context().is_valid

    bill = spans.one("bill a/b")
    assert (bill.attributes or {})["order"] == 7
    assert (bill.attributes or {})["error.type"] == "ZeroDivisionError"
    assert parent_id(bill) == span_id(spans.one("publish"))
    assert linked_ids(bill) == [span_id(spans.one("publish")), request.get_span_context().span_id]


async def test_a_request_and_its_handler_are_one_trace(spans: Spans) -> None:
    async with zbus.open() as bus:

        @bus.serve("prices/quote")
        async def quote(request: zbus.Event) -> bytes:
            if request.payload == b"bad":
                raise KeyError("sku")
            return b"12"

        with spans.tracer.start_as_current_span("checkout") as checkout:
            assert (await bus.request("prices/quote", b"sku", correlation_id="c")).payload == b"12"
            with pytest.raises(zbus.HandlerFailed):
                await bus.request("prices/quote", b"bad")
        with pytest.raises(zbus.NoResponders):
            await bus.request("prices/none")
        with pytest.raises(zbus.KeyInvalid):
            await bus.request("prices/*")

    asked, asked_badly = spans.all("request prices/quote")
    answered, failed = spans.all("process prices/quote")
    assert (asked.kind, answered.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert parent_id(asked) == checkout.get_span_context().span_id
    assert [parent_id(answered), parent_id(failed)] == [span_id(asked), span_id(asked_badly)]
    assert (asked.attributes or {})[conventions.MESSAGING_MESSAGE_CONVERSATION_ID] == "c"
    assert [(each.attributes or {}).get("error.type") for each in (answered, failed, asked_badly)] == [
        None,
        "KeyError",
        "HandlerFailed",
    ]
    assert (spans.one("request prices/none").attributes or {})["error.type"] == "NoResponders"


def test_code_without_an_event_loop_is_traced_too(spans: Spans) -> None:
    with zbus.blocking.open("memory") as bus, bus.subscribe("a/**") as sub:
        publisher = bus.publisher("a/b")
        with spans.tracer.start_as_current_span("checkout") as checkout:
            publisher.publish(b"x")
        event = sub.next(WAIT_S)
        assert event is not None
        with bus.span(event):
            publisher.publish_many([b"y"])

    first, second = spans.all("publish")
    assert parent_id(first) == checkout.get_span_context().span_id
    assert parent_id(spans.one("process")) == span_id(first)
    assert parent_id(second) == span_id(spans.one("process"))


# What others write into headers.

HOSTILE = {
    "nothing": "",
    "garbage": "drop table spans",
    "almost": ELSEWHERE + "-x",
    "zeros": f"00-{'0' * 32}-{'0' * 16}-01",
    "capitals": ELSEWHERE.upper(),
    "a version that is none": "ff" + ELSEWHERE[2:],
    "not ascii": ELSEWHERE.replace("0", "０"),
    "huge": "00-" + "0af7651916cd43dd" * 3_000,
    "huge and blank": " " * 50_000 + ELSEWHERE,
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_context_that_is_none_is_left_as_it_is_and_does_no_harm(
    spans: Spans, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
        ran = await handled(bus, "a/**")
        await (await bus.publisher("a/b")).publish(b"x", headers={"traceparent": value})
        await bus.put(zbus.Event(7, 0, 5, "a/c", b"y", {"traceparent": value}))
        events = [await anext(sub) for _ in range(2)]
        await settled(ran)

    assert [event.headers for event in events] == [{"traceparent": value}] * 2
    assert spans.all("receive") == []
    assert {span.parent for span in spans.all("process")} == {None}
    assert sum(map(len, caplog.messages)) < 1000


@pytest.mark.parametrize(
    "more",
    [
        {"tracestate": "a=1," * 16_000},
        {"tracestate": " " * 60_000},
        {"tracestate": "=,;\\" * 100},
        {"baggage": " " * 8_000 + "a=b"},
        {"baggage": ("a" + " " * 4_000 + "b") * 2},
        {"baggage": "a=b," * 15_000},
        {"baggage": "%" * 60_000},
        {"baggage": "ü" * 8_000},
        {"baggage": "=,=,;;;=%zz"},
    ],
    ids=lambda more: f"{next(iter(more.items()))[:2]}"[:40],
)
async def test_what_comes_beside_a_context_costs_little_whatever_it_is(
    spans: Spans, more: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"traceparent": ELSEWHERE, **more}
    async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
        ran = await handled(bus, "a/**")
        await (await bus.publisher("a/b")).publish(b"x", headers=headers)
        event = await anext(sub)
        await settled(ran)
        began = time.process_time()
        for _ in range(20):
            with bus.span(event):
                pass
        took_s = (time.process_time() - began) / 20

    assert event.headers == headers
    assert {parent_id(span) for span in spans.all("process")} == {0xB7AD6B7169203331}
    assert took_s < 0.005
    assert sum(map(len, caplog.messages)) < 20_000


async def test_a_sampler_that_raises_costs_the_span_and_not_the_event(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Spans):
        def __init__(self) -> None:
            super().__init__()
            self.provider.sampler = self  # type: ignore[assignment]

        def should_sample(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no decision")

    with provided(Broken()), caplog.at_level(logging.ERROR, "zbus"):
        async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
            assert await (await bus.publisher("a/b")).publish(b"x", headers={"traceparent": ELSEWHERE}) == 1
            event = await anext(sub)

    assert event.payload == b"x"
    assert any("TRACING_FAILED" in each for each in caplog.messages)
