"""The console as a page: light and dark, narrow, keyboard only, with a token, and without internet access."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from console_support import Console, Server
from playwright.sync_api import Browser, Route, expect

TOKEN = "a-token-of-many-characters"
PANELS = ("stream", "keys", "charts", "participants", "cursors", "problems")


def test_the_page_loads_everything_from_its_own_server(server: Server, console: Console) -> None:
    server.publish("shop/orders", "order")
    console.open(server.url)
    expect(console.row("order")).to_be_visible()
    for panel in ("participants", "cursors", "problems", "stream"):
        console.page.click(f"#tab-{panel}")

    assert {urlsplit(url).netloc for url in console.requests} == {urlsplit(server.url).netloc}
    assert len(console.requests) > 20, "the requests were not recorded"
    written = "".join(path.read_text() for path in _assets())
    assert "http://" not in written.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in written


def test_the_theme_follows_the_system_until_the_operator_chooses_one(server: Server, browser: Browser) -> None:
    with browser.new_context(color_scheme="dark") as context:
        console = Console(context.new_page())
        console.open(server.url)
        dark = _brightness(console)
        console.page.emulate_media(color_scheme="light")
        light = _brightness(console)
        console.page.click("#theme")
        console.page.click("#theme")
        expect(console.page.locator("#theme")).to_have_text("Theme: dark")

        assert (dark < 60, light > 200, _brightness(console)) == (True, True, dark)
        console.page.reload()
        console.connected()
        assert _brightness(console) == dark


def test_on_a_narrow_screen_every_panel_fits(server: Server, console: Console) -> None:
    server.publish(f"shop/{'orders-' * 20}/{'x' * 60}", '{"text": "' + "long " * 200 + '"}')
    server.call(_durable(server))
    page = console.page
    for width in (320, 390, 800):
        page.set_viewport_size({"width": width, "height": 844})
        console.open(server.url)
        expect(page.locator("#tree [role=treeitem]").first).to_be_attached()
        for panel in PANELS:
            page.click(f"#tab-{panel}")
            expect(page.locator(f"#panel-{panel}")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, panel
        page.click("#tab-stream")
        console.row("long").click()
        expect(page.locator("#inspector")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_can_be_done_by_keyboard(server: Server, console: Console) -> None:
    server.publish("shop/orders", '{"id":1}')
    server.publish("shop/orders", '{"id":2}')
    server.publish("fleet/fuel", "fuel")
    console.open(server.url)
    page = console.page
    expect(console.row('{"id":2}')).to_be_visible()
    expect(page.locator("#tree [role=treeitem]:visible")).to_have_count(4)
    key = page.keyboard.press

    key("?")
    expect(page.locator("#help")).to_be_visible()
    key("Escape")
    expect(page.locator("#help")).to_be_hidden()
    key("j")  # the newest
    key("j")
    expect(page.locator("#rows .row[aria-selected=true]")).to_contain_text('{"id":2}')
    key("Enter")
    expect(page.locator("#inspector-body pre")).to_contain_text('"id": 2')
    key("ArrowDown")
    expect(page.locator("#inspector-body pre")).to_contain_text('"id": 1')
    key("Escape")
    expect(page.locator("#inspector")).to_be_hidden()
    key("p")
    expect(page.locator("#doing")).to_have_text("Paused")
    key("p")
    expect(page.locator("#doing")).to_have_text("Live")
    key("3")
    expect(page.locator("#panel-cursors")).to_be_visible()
    key("ArrowRight")
    expect(page.locator("#panel-problems")).to_be_visible()
    key("Home")
    expect(page.locator("#panel-stream")).to_be_visible()


def test_the_tree_is_walked_and_a_key_chosen_by_keyboard(server: Server, console: Console) -> None:
    server.publish("shop/orders/created", "order")
    server.publish("fleet/fuel", "fuel")
    console.open(server.url)
    page = console.page
    items = page.locator("#tree [role=treeitem]:visible")
    expect(items).to_have_count(5)
    key = page.keyboard.press

    key("5")
    key("ArrowLeft")  # closes fleet
    expect(items).to_have_count(4)
    key("ArrowRight")
    expect(items).to_have_count(5)
    key("End")
    key("ArrowLeft")  # to the parent
    key("Enter")

    expect(page.locator("#filter")).to_have_value("shop/orders/**")
    expect(page.locator("#tree [aria-selected=true] .name")).to_have_text("orders")
    key("/")
    expect(page.locator("#filter")).to_be_focused()
    page.keyboard.type("fleet/**")
    key("Enter")
    expect(console.row("fuel")).to_be_visible()
    assert console.offsets() == [2]


def test_the_focus_is_visible_and_every_control_has_a_name(server: Server, console: Console) -> None:
    console.open(server.url)
    page = console.page
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, canvas[tabindex]')]
            .filter((each) => !(each.textContent.trim() || each.ariaLabel || each.labels?.length))
            .map((each) => each.id)"""
    )
    assert unnamed == ["inspector-key"]  # The event that is shown names it.

    stops = []
    for _ in range(12):
        page.keyboard.press("Tab")
        stops.append(
            page.evaluate("[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]")
        )
    assert {style for _, style in stops} == {"solid"}
    assert {"theme", "help-open", "tab-stream", "filter", "pause"} <= {name for name, _ in stops}


def test_a_token_is_requested_and_kept_only_for_the_tab(log_path: Path, browser: Browser) -> None:
    server = Server(log_path, tokens=[{"name": "ops", "token": TOKEN, "operate": True}])
    try:
        server.publish("shop/orders", "order")
        with browser.new_context() as context:
            console = Console(context.new_page())
            page = console.page
            page.goto(f"{server.url}/")
            expect(page.locator("#token")).to_be_visible()
            page.fill("#token-value", "not-the-token-of-this-one")
            page.press("#token-value", "Enter")
            expect(page.locator("#token-wrong")).to_be_visible()
            page.fill("#token-value", TOKEN)
            page.press("#token-value", "Enter")

            console.connected()
            expect(console.row("order")).to_be_visible()
            expect(page.locator("#token")).to_be_hidden()
            assert not any(TOKEN in url for url in console.requests)
            assert page.evaluate("JSON.stringify({...localStorage})").find(TOKEN) < 0
            page.reload()
            console.connected()
    finally:
        server.stop()


def test_a_late_401_from_before_the_token_does_not_open_the_dialog_again(log_path: Path, browser: Browser) -> None:
    server = Server(log_path, tokens=[{"name": "ops", "token": TOKEN, "operate": True}])
    try:
        server.publish("shop/orders", "order")
        with browser.new_context() as context:
            console = Console(context.new_page())
            page, held = console.page, list[Route]()
            page.route("**/api/live", lambda route: route.continue_() if held else held.append(route))
            page.goto(f"{server.url}/")
            page.fill("#token-value", TOKEN)
            page.press("#token-value", "Enter")
            expect(console.row("order")).to_be_visible()

            held[0].continue_()  # without a token: it was sent before

            expect(page.locator("#metric-head")).to_have_text("1")
            expect(page.locator("#token")).to_be_hidden()
    finally:
        server.stop()


def _assets() -> list[Path]:
    import zbus_web

    return sorted((Path(zbus_web.__file__).parent / "console").iterdir())


def _brightness(console: Console) -> int:
    """Return the brightness of the page's background, 0 to 255."""
    colour: str = console.page.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return (red + green + blue) // 3


async def _durable(server: Server) -> None:
    async with server.bus.subscribe("shop/**", durable="billing-" + "x" * 40, start="beginning") as reader:
        await (await anext(reader)).ack()
