"""The console through a restart of its server, and under heavy load."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from console_support import Console, ServeProcess, Server
from free_ports import free_port
from inside import node_of
from playwright.sync_api import expect

from zbus_log.retention import Rules

EVENTS, BURST = 3000, 50
FRAME_MS_MAX = 3000  # Clearly frozen, even on a machine busy with other tests; the benchmark has the exact number.

WATCH = """() => {
    window.longest = 0;
    let last = performance.now();
    const frame = () => {
        const now = performance.now();
        window.longest = Math.max(window.longest, now - last);
        last = now;
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
}"""


def test_after_a_restart_of_the_server_no_event_is_lost_or_repeated(log_path: Path, console: Console) -> None:
    port = free_port()
    server = ServeProcess(log_path, port)
    try:
        console.open(server.url)
        published = server.publish("shop/orders", [f"first {number}" for number in range(10)])
        console.until("zbusConsole.playback.received === 10")
        server.kill()
        expect(console.page.locator("#connection")).to_have_text("Reconnecting")

        server = ServeProcess(log_path, port)
        published += server.publish("shop/orders", [f"second {number}" for number in range(10)])
        console.connected()
        published += server.publish("shop/orders", [f"third {number}" for number in range(10)])

        console.until(f"zbusConsole.playback.position === {published[-1]}")
        assert console.offsets() == published
        assert console.marks() == [f"Reconnected, continuing after {published[9]}"]
    finally:
        server.kill()


def test_a_pause_during_a_restart_loses_no_event(log_path: Path, console: Console) -> None:
    port = free_port()
    server = Server(log_path, port=port)
    console.open(server.url)
    published = server.publish("a/b", "one")
    console.until("zbusConsole.playback.received === 1")
    console.page.click("#pause")
    server.stop()
    expect(console.page.locator("#connection")).to_have_text("Reconnecting")

    server = Server(log_path, port=port)
    try:
        published += server.publish("a/b", "two", "three")
        console.connected()
        expect(console.page.locator("#waiting")).to_have_text("2 waiting")
        console.page.click("#pause")
        console.until(f"zbusConsole.playback.position === {published[-1]}")
        assert console.offsets() == published
    finally:
        server.stop()


def test_events_removed_by_retention_during_an_outage_are_shown_as_a_gap(log_path: Path, console: Console) -> None:
    port = free_port()
    server = Server(log_path, port=port)
    console.open(server.url)
    shown = server.publish("a/b", *["before"] * 20)
    console.until("zbusConsole.playback.received === 20")
    server.stop()
    elsewhere = Server(log_path)  # on another port, which the page does not know
    elsewhere.publish("a/b", *["later"] * 80)
    elsewhere.call(_prune(elsewhere, after=60))
    elsewhere.stop()

    server = Server(log_path, port=port)
    try:
        console.until("zbusConsole.playback.position === 100")
        assert console.offsets() == shown + list(range(61, 101))
        assert any(
            mark.startswith("Gap: the events after 20 up to 60 are no longer available") for mark in console.marks()
        )
    finally:
        server.stop()


def test_a_thousand_events_a_second_do_not_freeze_it(server: Server, console: Console) -> None:
    console.open(server.url)
    console.page.evaluate(WATCH)

    async def load() -> None:
        publisher = await server.bus.publisher("load/test")
        begin = time.monotonic()
        for sent in range(0, EVENTS, BURST):
            await publisher.publish_many([{"number": sent + each, "text": "x" * 80} for each in range(BURST)])
            await asyncio.sleep(max(0.0, begin + (sent + BURST) / 1000 - time.monotonic()))

    server.call(load())

    console.until(f"zbusConsole.playback.received === {EVENTS}")
    assert console.offsets() == list(range(1, EVENTS + 1))
    expect(console.page.locator("#filter-count")).to_have_text("3,000 events")
    # Only visible rows are in the page.
    assert console.page.evaluate("document.querySelectorAll('#rows .row').length") < 200
    assert console.page.evaluate("window.longest") < FRAME_MS_MAX


async def _prune(server: Server, *, after: int) -> None:
    await node_of(server.bus).run(node_of(server.bus).need_log("a test").prune, Rules(until=after))
