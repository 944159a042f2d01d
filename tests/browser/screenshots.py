"""Screenshots of the console of `zbus serve --demo`, for the README.

python tests/browser/screenshots.py docs/images
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from console_support import ENVIRONMENT, Console, chromium
from playwright.sync_api import Browser

FILL_S = 100  # seconds of traffic before the screenshots, to fill the charts
BYTES_MAX = 250_000
PICTURES = (("light", 1360, 850), ("dark", 1360, 850), ("narrow", 390, 844))


def main() -> None:
    """Start the demo, let it run for `FILL_S` seconds, and take the screenshots."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "zbus", "serve", "--demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as serving:
        assert serving.stdout is not None
        url = json.loads(serving.stdout.readline())["url"]
        try:
            with chromium() as browser:
                _take(browser, url, folder)
        finally:
            serving.terminate()


def _take(browser: Browser, url: str, folder: Path) -> None:
    pages = []
    for name, width, height in PICTURES:
        scheme = "dark" if name == "dark" else "light"
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        console = Console(context.new_page())
        console.open(url)
        pages.append((name, console.page))
    pages[0][1].wait_for_timeout(FILL_S * 1000)
    for name, page in pages:
        if name != "narrow":
            page.locator("#rows .row", has_text="shop/orders/created").first.click()
        if name == "dark":
            page.click("#inspector-tabs [data-tab=identity]")
        path = folder / f"console-{name}.png"
        page.screenshot(path=path)
        print(f"{path}: {path.stat().st_size:,} bytes")
        assert path.stat().st_size <= BYTES_MAX, "too large to keep"


if __name__ == "__main__":
    main()
