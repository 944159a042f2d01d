"""The stream of the console in a real browser: filter, pause, inspect, and payloads that try to run as code."""

from __future__ import annotations

import json

from console_support import Console, Server
from playwright.sync_api import expect

HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 2</script>'
HOSTILE_KEY = "hostile/<img/src=x/onerror=window.hacked=3>"


def test_events_from_before_and_after_the_page_opened_are_shown_once(server: Server, console: Console) -> None:
    before = server.publish("shop/orders", *[f"before {number}" for number in range(5)])
    console.open(server.url)

    after = server.publish("shop/orders", *[f"after {number}" for number in range(5)])

    expect(console.row("after 4")).to_be_visible()
    assert console.offsets() == before + after
    expect(console.page.locator("#filter-count")).to_have_text("10 events")


def test_a_filter_shows_matching_past_and_new_events(server: Server, console: Console) -> None:
    wanted = server.publish("shop/orders/created", "old order")
    server.publish("audit/login", "old login")
    console.open(server.url)
    expect(console.row("old login")).to_be_visible()

    console.filter("shop/** nothing/*")
    server.publish("audit/login", "new login")
    wanted += server.publish("shop/orders/paid", "new order")

    expect(console.row("new order")).to_be_visible()
    assert console.offsets() == wanted
    assert "login" not in console.page.inner_text("#rows")


def test_an_invalid_filter_shows_the_error_and_a_valid_one_recovers(server: Server, console: Console) -> None:
    console.open(server.url)

    console.page.fill("#filter", "shop//orders")
    console.page.press("#filter", "Enter")

    expect(console.page.locator("#rejected")).to_contain_text("shop//orders")
    expect(console.page.locator("#connection")).to_have_text("Rejected")
    console.filter("shop/**")
    console.connected()
    server.publish("shop/orders", "here")
    expect(console.row("here")).to_be_visible()


def test_a_pause_shows_no_events_and_loses_none(server: Server, console: Console) -> None:
    console.open(server.url)
    shown = server.publish("a/b", "before the pause")
    expect(console.row("before the pause")).to_be_visible()

    console.page.click("#pause")
    held = server.publish("a/b", *[f"held {number}" for number in range(30)])
    expect(console.page.locator("#waiting")).to_have_text("30 waiting")
    assert console.offsets() == shown

    console.page.click("#pause")
    after = server.publish("a/b", "after the pause")
    expect(console.row("after the pause")).to_be_visible()
    assert console.offsets() == shown + held + after


def test_a_long_pause_is_bounded_in_memory_and_resumes_from_the_log(server: Server, console: Console) -> None:
    console.open(server.url)
    console.page.click("#pause")
    server.publish("a/b", *[f"{number}" for number in range(8000)])
    expect(console.page.locator("#waiting")).to_have_text("5,000+ waiting")
    assert console.page.evaluate("zbusConsole.playback.waiting.length") == 5000

    console.page.click("#pause")

    console.until("zbusConsole.playback.position === 8000")
    assert console.received() == 8000
    assert console.offsets() == list(range(3001, 8001))


def test_an_event_is_inspected_in_every_form(server: Server, console: Console) -> None:
    payload = '{"id":18446744073709551615,"price":1.10,"tags":["new",null]}'
    server.publish("shop/orders", payload, headers={"region": "eu"})
    console.open(server.url)

    console.row("18446744073709551615").click()

    page = console.page
    # Every digit is kept: a JavaScript number would have lost some.
    expect(page.locator("#inspector-body pre")).to_have_text(
        '{\n  "id": 18446744073709551615,\n  "price": 1.10,\n  "tags": [\n    "new",\n    null\n  ]\n}'
    )
    page.click("#inspector-tabs [data-tab=raw]")
    expect(page.locator("#inspector-body pre")).to_have_text(payload)
    page.click("#inspector-tabs [data-tab=hex]")
    expect(page.locator("#inspector-body pre")).to_contain_text("000000  7b 22 69 64 22 3a 31 38  34 34 36")
    page.click("#inspector-tabs [data-tab=headers]")
    expect(page.locator("#inspector-body dl")).to_contain_text("region")
    page.click("#inspector-tabs [data-tab=identity]")
    identity = page.inner_text("#inspector-body")
    assert "publisher_id" in identity
    assert "published_ns" in identity


def test_copy_copies_the_form_that_is_shown(server: Server, console: Console) -> None:
    server.publish("shop/orders", '{"id":1}')
    console.open(server.url)
    console.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    console.row('{"id":1}').click()

    console.page.click("#inspector-copy")

    expect(console.page.locator("#inspector-copy")).to_have_text("Copied")
    assert console.page.evaluate("navigator.clipboard.readText()") == '{\n  "id": 1\n}'


def test_a_binary_payload_is_shown_in_hex(server: Server, console: Console) -> None:
    server.publish("camera/1", b"\xff\xd8\xff\x00binary")
    console.open(server.url)

    console.row("camera/1").click()

    expect(console.page.locator("#inspector-body pre")).to_contain_text("ff d8 ff 00 62")


def test_keys_headers_and_payloads_are_never_run(server: Server, console: Console) -> None:
    server.publish(HOSTILE_KEY, HOSTILE, headers={"note": HOSTILE})
    server.publish("hostile/json", json.dumps({HOSTILE: HOSTILE}))
    console.open(server.url)
    page = console.page
    expect(console.row("hostile/json")).to_be_visible()

    for row in ("hostile/json", "hostile/<img"):
        console.row(row).click()
        for tab in ("pretty", "raw", "hex", "headers", "identity"):
            page.click(f"#inspector-tabs [data-tab={tab}]")
    expect(page.locator("#tree [role=treeitem]", has_text="<img")).to_be_visible()
    page.click("#tab-participants")
    expect(page.locator("#publishers td", has_text="<img").first).to_be_visible()

    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img[onerror], main script').length") == 0


def test_the_browser_itself_rejects_text_as_markup(server: Server, console: Console) -> None:
    console.open(server.url)

    outcome = console.page.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'written' } catch (e) { e.name }")

    assert outcome == "TypeError"
    console.errors.clear()  # The browser reports the violation, as intended.
