"""The log in the console: the timeline, the tree of keys with rates, cursors and problems."""

from __future__ import annotations

import logging

from console_support import Console, Server
from inside import node_of
from playwright.sync_api import expect

from zbus.observe import records


def test_the_scrubber_replays_from_any_point_and_comes_back_to_live(server: Server, console: Console) -> None:
    server.publish("shop/orders", *[f"order {number}" for number in range(1, 1201)])
    console.open(server.url)
    page = console.page
    expect(page.locator("#timeline-where")).to_have_text("Live: at the head, 1,200")
    page.select_option("#speed", "max")

    page.focus("#scrubber")
    page.press("#scrubber", "Home")

    console.until("zbusConsole.playback.position === 1200 && zbusConsole.playback.mode === 'live'")
    assert console.offsets() == list(range(1, 1201))
    server.publish("shop/orders", "after the replay")
    expect(console.row("after the replay")).to_be_visible()
    assert console.offsets() == list(range(1, 1202))


def test_a_replay_shows_its_position_and_can_be_paused_and_left(server: Server, console: Console) -> None:
    server.publish("shop/orders", *[f"order {number}" for number in range(1, 1201)])
    console.open(server.url)
    page = console.page
    # Pause after the first page, so that the test does not depend on speed.
    page.evaluate("zbusConsole.playback.addEventListener('rows', () => zbusConsole.playback.pause(), {once: true})")

    page.fill("#go-to-where", "101")
    page.press("#go-to-where", "Enter")

    expect(page.locator("#waiting")).to_be_visible()
    assert console.offsets()[0] == 101
    expect(page.locator("#doing")).to_have_text("Paused")
    expect(page.locator("#timeline-where")).to_contain_text("of 1,200")
    expect(page.locator("#timeline-where")).to_contain_text("Replaying: at ")
    page.click("#back-to-live")
    expect(page.locator("#timeline-where")).to_have_text("Live: at the head, 1,200")
    console.until("zbusConsole.playback.position === 1200")
    server.publish("shop/orders", "now")
    expect(console.row("now")).to_be_visible()


def test_a_replay_keeps_to_the_filter(server: Server, console: Console) -> None:
    wanted = []
    for number in range(20):
        server.publish("noise/a", *["noise"] * 50)
        wanted += server.publish("shop/orders", f"order {number}")
    console.open(server.url)
    console.filter("shop/**")
    console.page.select_option("#speed", "max")

    console.page.fill("#go-to-where", str(wanted[5]))
    console.page.press("#go-to-where", "Enter")

    console.until(f"zbusConsole.playback.position === {wanted[-1]} && zbusConsole.playback.mode === 'live'")
    assert console.offsets() == wanted[5:]


def test_the_tree_shows_rates_and_a_click_filters(server: Server, console: Console) -> None:
    console.open(server.url)
    page = console.page
    rate = "() => [...document.querySelectorAll('#tree .rate')].some((each) => parseFloat(each.textContent) > 0)"
    tries = 0
    while not page.evaluate(rate):
        server.publish("shop/orders/created", "order")
        server.publish("fleet/truck-1/fuel", "fuel")
        page.wait_for_timeout(100)
        tries += 1
        assert tries < 300, "no rate was ever shown"
    names = [name.inner_text() for name in page.locator("#tree [role=treeitem]:visible .name").all()]
    assert names == ["fleet", "truck-1", "fuel", "shop", "orders", "created"]

    page.click("#tree [role=treeitem] .name >> text=shop")

    expect(page.locator("#filter")).to_have_value("shop/**")
    console.until("zbusConsole.playback.state === 'live'")
    server.publish("fleet/truck-1/fuel", "not here")
    server.publish("shop/orders/created", "but this")
    expect(console.row("but this")).to_be_visible()
    assert "fleet" not in page.inner_text("#rows")


def test_the_reset_of_a_cursor_asks_first_and_shows_its_effect(server: Server, console: Console) -> None:
    server.publish("shop/orders", *["order"] * 10)
    server.call(_read(server, "billing", 10))
    console.open(server.url)
    page = console.page
    page.click("#tab-cursors")
    row = page.locator("#cursor-table tbody tr", has_text="billing")
    expect(row.locator("td").nth(2)).to_have_text("10")

    row.get_by_role("button", name="Reset").click()

    expect(page.locator("#reset")).to_be_visible()
    expect(page.locator("#reset-effect")).to_have_text("Up to 10 events will be delivered again.")
    page.click("#reset-cancel")
    expect(page.locator("#reset")).to_be_hidden()
    assert server.call(_offset(server, "billing")) == 10
    row.get_by_role("button", name="Reset").click()
    page.fill("#reset-offset", "4")
    expect(page.locator("#reset-effect")).to_have_text("Up to 6 events will be delivered again.")
    page.click("#reset-confirm")
    expect(page.locator("#reset")).to_be_hidden()
    expect(row.locator("td").nth(2)).to_have_text("4")
    assert server.call(_offset(server, "billing")) == 4


def test_a_rejected_reset_shows_the_error_and_changes_nothing(server: Server, console: Console) -> None:
    server.publish("shop/orders", *["order"] * 10)
    server.call(_read(server, "billing", 10))
    console.open(server.url)
    page = console.page
    page.click("#tab-cursors")
    page.locator("#cursor-table tbody tr", has_text="billing").get_by_role("button", name="Reset").click()
    page.fill("#reset-offset", "11")
    expect(page.locator("#reset-confirm")).to_be_disabled()
    page.fill("#reset-offset", "4")
    server.call(_delete(server, "billing"))

    page.click("#reset-confirm")

    expect(page.locator("#reset-error")).to_contain_text("does not exist")
    expect(page.locator("#reset")).to_be_visible()


def test_subscriptions_publishers_and_this_node_are_listed(server: Server, console: Console) -> None:
    server.publish("shop/orders", *["order"] * 3)
    console.open(server.url)
    page = console.page

    page.click("#tab-participants")

    expect(page.locator("#publishers tbody tr", has_text="shop/orders")).to_be_visible()
    expect(page.locator("#subscriptions tbody tr").first).to_be_visible()
    expect(page.locator("#nodes tbody tr", has_text="this node")).to_be_visible()


def test_problems_are_counted_on_the_tab_and_listed_in_the_panel(server: Server, console: Console) -> None:
    console.open(server.url)
    page = console.page
    expect(page.locator("#metric-head")).to_have_text("0")  # The live stream is connected: later records are new.

    records.record_reason(
        records.EVENT_GAP,
        logging.WARNING,
        code="gap_trimmed",
        reason="<b>retention</b>",
        origin="ab12",
        first=3,
        last=9,
    )

    expect(page.locator("#problems-badge")).to_be_visible()
    page.click("#tab-problems")
    expect(page.locator("#records .record")).to_contain_text(["EVENT_GAP"])
    expect(page.locator("#records .record")).to_contain_text(["<b>retention</b>"])
    expect(page.locator("#problems-badge")).to_be_hidden()


async def _read(server: Server, name: str, events: int) -> None:
    """Read and acknowledge `events` events under a durable name."""
    async with server.bus.subscribe("shop/**", durable=name, start="beginning") as reader:
        for _ in range(events):
            event = await anext(reader)
            await event.ack()


async def _delete(server: Server, name: str) -> None:
    await node_of(server.bus).run(node_of(server.bus).need_log("a test").cursors.delete, name)


async def _offset(server: Server, name: str) -> int:
    log = node_of(server.bus).need_log("a test")
    found: int = {cursor.name: cursor.offset for cursor in await node_of(server.bus).run(log.cursors.list)}[name]
    return found
