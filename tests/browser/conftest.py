"""One browser per test file and one page per test. No page may send requests to another server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from console_support import Console, Server, chromium
from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for the whole session: its event loop would conflict with tests that have one.
    with chromium() as running:
        yield running


@pytest.fixture
def server(log_path: Path) -> Iterator[Server]:
    running = Server(log_path)
    yield running
    running.stop()


@pytest.fixture
def console(browser: Browser) -> Iterator[Console]:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    shown = Console(context.new_page())
    yield shown
    context.close()
    hosts = {urlsplit(url).netloc for url in shown.requests}
    assert len(hosts) <= 1, f"the page sent requests to other hosts: {hosts}"
    assert not shown.errors
