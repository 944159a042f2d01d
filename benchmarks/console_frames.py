"""How long is the longest frame of the console in a browser with 1,000 events per second?

Measured in the page itself, from one animation frame to the next, in Debian's chromium without a graphics card. The
peer is the same page over the same server without events: the cost of the browser and the machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from _harness import Measurement, Row, Sizes, compare, folder, zbus_versions
from playwright.sync_api import Page, sync_playwright

SERVER = Path(__file__).with_name("_console_server.py")
EVENTS_PER_S = 1000
TARGET_MS = 100.0
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WATCH = """() => {
    const found = { frames: [], tasks: [] };
    let last = performance.now();
    const frame = () => {
        const now = performance.now();
        found.frames.push(now - last);
        last = now;
        if (window.frames_found === found) requestAnimationFrame(frame);
    };
    window.frames_found = found;
    requestAnimationFrame(frame);
    new PerformanceObserver((list) => list.getEntries().forEach((each) => found.tasks.push(each.duration)))
        .observe({ type: "longtask" });
}"""
TAKE = "() => { const found = window.frames_found; window.frames_found = null; return found; }"


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row."""
    seconds = sizes.of(20, 2)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        found = [
            _round(browser.new_page(viewport={"width": 1440, "height": 900}), seconds) for _ in range(sizes.of(3, 1))
        ]
        chromium = browser.version
        browser.close()
    lost = sum(published - received for _, _, published, received in found)
    return [
        compare(
            "console_frames",
            "the console with 1,000 events/s: longest frame",
            unit="ms",
            peer_name="the same page, no events",
            rounds=[(busy, idle) for busy, idle, _, _ in found],
            target=TARGET_MS,
            target_is="zbus at most",
            versions={"zbus": zbus_versions(), "peer": {"chromium": chromium}},
            broken=f"{lost} events did not reach the page" if lost else "",
            events_per_s=[round(received / seconds) for _, _, _, received in found],
        )
    ]


def _round(page: Page, seconds: int) -> tuple[Measurement, Measurement, int, int]:
    """Measure the page under load and at rest. Also returns the published events and those that reached the page."""
    with folder() as where:
        command = [sys.executable, str(SERVER), str(Path(where) / "app.db"), str(EVENTS_PER_S)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            page.goto(server.stdout.readline().strip())
            page.wait_for_selector("#connection[data-state=live]")
            page.wait_for_timeout(1000)
            idle = _watch(page, seconds)
            print("begin", file=server.stdin, flush=True)
            page.wait_for_selector("#rows .row")
            busy = _watch(page, seconds)
            print("end", file=server.stdin, flush=True)
            published = int(server.stdout.readline())
            received = _received(page, published)
            page.close()
            server.stdin.close()
    return busy, idle, published, received


def _received(page: Page, published: int) -> int:
    """Return the number of events that reached the page, once all have or after a timeout."""
    received = 0
    for _ in range(200):
        received = int(page.evaluate("zbusConsole.playback.received"))
        if received >= published:
            break
        page.wait_for_timeout(50)
    return received


def _watch(page: Page, seconds: int) -> Measurement:
    page.evaluate(WATCH)
    page.wait_for_timeout(seconds * 1000)
    found: dict[str, Any] = page.evaluate(TAKE)
    frames = sorted(found["frames"])
    extra = {"frames_per_s": len(frames) / seconds, "longest_task_ms": max(found["tasks"], default=0.0)}
    return Measurement(frames[-1], [int(each * 1e6) for each in frames], extra)
