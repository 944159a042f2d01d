"""Support for the tests of the console: a server on a thread, `zbus serve` as a process, and the page."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from playwright.sync_api import Browser, Page, expect, sync_playwright

import zbus
from zbus_web import WebSettings, serve

DEADLINE_S = 30.0
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",  # Containers have little shared memory.
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}
T = TypeVar("T")

expect.set_options(timeout=DEADLINE_S * 1000)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Debian's chromium. A missing chromium is a failure; `make browser` installs it."""
    path = shutil.which("chromium")
    assert path, "chromium is not installed: run make browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Server:
    """A bus with its web server on a separate event loop, so that a test without a loop can drive both."""

    def __init__(self, log: Path, *, port: int = 0, **settings: Any) -> None:
        self._log, self._settings = log, {"port": port} | settings
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="console-server")
        self._thread.start()
        self._ready.result(DEADLINE_S)

    async def _run(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with zbus.open(self._log) as self.bus, serve(self.bus, WebSettings(**self._settings)) as running:
                self.url = running.url
                self._ready.set_result(None)
                await self._ended.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def publish(self, key: str, *payloads: object, headers: dict[str, str] | None = None) -> list[int]:
        """Publish events and return their offsets."""

        async def work() -> list[int]:
            publisher = await self.bus.publisher(key)
            return list(await publisher.publish_many(payloads, headers=headers))

        return self.call(work())

    def stop(self) -> None:
        """Stop the server and wait until it has ended."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


class ServeProcess:
    """`zbus serve` as users start it. It can be killed."""

    def __init__(self, log: Path, port: int) -> None:
        command = [sys.executable, "-m", "zbus", "serve", str(log), "--port", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
        assert self._process.stdout is not None
        self.url: str = json.loads(self._process.stdout.readline())["url"]

    def publish(self, key: str, payloads: Sequence[str]) -> list[int]:
        """Publish over HTTP and return the acknowledged offsets."""
        with httpx.Client(base_url=self.url, timeout=DEADLINE_S) as client:
            responses = [client.post(f"/events/{key}", content=payload.encode()) for payload in payloads]
        return [response.raise_for_status().json()["offset"] for response in responses]

    def kill(self) -> None:
        """Kill the process, as a power cut would."""
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)


class Console:
    """The page as an operator sees it, with helpers for frequent steps of the tests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []  # the URL of every request of the page
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: "Policy" in line.text and self.errors.append(line.text))

    def open(self, url: str) -> None:
        """Open the page and wait until it is connected."""
        self.page.goto(f"{url}/")
        self.connected()

    def connected(self) -> None:
        expect(self.page.locator("#connection")).to_have_text("Connected")

    def filter(self, expression: str) -> None:
        self.page.fill("#filter", expression)
        self.page.press("#filter", "Enter")
        self.until(f"zbusConsole.playback.keys.join(' ') === {json.dumps(expression)}")
        self.until("zbusConsole.playback.state === 'live'")

    def offsets(self) -> list[int]:
        """Return the offsets of the events in the stream, oldest first, without marks."""
        found: list[int] = self._rows("offset")
        return found

    def marks(self) -> list[str]:
        """Return the texts of the marks between the events."""
        found: list[str] = self._rows("mark")
        return found

    def _rows(self, field: str) -> Any:
        script = """(field) => {
            const { ring } = zbusConsole;
            return Array.from({ length: ring.size }, (_, index) => ring.at(ring.size - 1 - index)[field]);
        }"""
        return [value for value in self.page.evaluate(script, field) if value is not None]

    def received(self) -> int:
        """Return how many events the stream received since its last start."""
        found: int = self.page.evaluate("zbusConsole.playback.received")
        return found

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. Polls, because the page's policy forbids eval."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"never became true: {condition}"
            self.page.wait_for_timeout(20)

    def row(self, text: str) -> Any:
        """Return the visible row with this text."""
        return self.page.locator("#rows .row", has_text=text).first
