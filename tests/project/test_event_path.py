"""The path of one event, from `publish` through the log to a subscriber of the same bus, has a bounded length.

A profile hook notes every function of this project that runs meanwhile, on any thread. Other threads of the bus may
have work of their own at that moment, so the shortest of some runs counts.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import zbus

ROOT = Path(__file__).parents[2]
SOURCES = tuple(f"{ROOT / folder}/" for folder in ("zbus", "adapters", "store"))
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")  # no function calls from Python 3.12 on
FUNCTIONS_MAX, FILES_MAX = 36, 15
RUNS = 7

Call = tuple[str, str]  # the file and the function


class Walk:
    """Notes the functions that are called while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.calls: dict[Call, None] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(SOURCES) and code.co_name not in COMPREHENSIONS:
            self.calls[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] = None

    @contextmanager
    def noting(self) -> Iterator[dict[Call, None]]:
        self.calls, self.on = {}, True
        try:
            yield self.calls
        finally:
            self.on = False


@contextmanager
def profiled() -> Iterator[Walk]:
    """Profile this thread, and every thread that starts meanwhile."""
    walk, before = Walk(), sys.getprofile()
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(before)
        threading.setprofile(before)  # type: ignore[arg-type]


async def shortest(path: Path) -> dict[Call, None]:
    """The functions that one event passes, in the order of their first call, in the shortest of some runs."""
    found: list[dict[Call, None]] = []
    with profiled() as walk:
        async with zbus.open(path, tracing="off") as bus, bus.subscribe("shop/*") as subscription:
            publisher = await bus.publisher("shop/orders")
            for run in range(RUNS):
                for _ in range(3 if run == 0 else 1):  # the first events fill what is remembered about keys
                    await publisher.publish(b"warm")
                    await subscription.next()
                reading = asyncio.create_task(subscription.next())
                await asyncio.sleep(0.02)
                with walk.noting() as calls:
                    await publisher.publish(b"x")
                    assert await reading is not None
                found.append(calls)
    return min(found, key=len)


async def test_an_event_passes_few_functions_and_files_between_publisher_and_subscriber(log_path: Path) -> None:
    calls = await shortest(log_path)

    files = dict.fromkeys(file for file, _ in calls)
    path = "\n".join(f"{file}: {function}" for file, function in calls)
    assert ("zbus/publish/publisher.py", "EventPublisher.publish") in calls, path
    assert any(file.startswith("store/zbus_log/write/") for file in files), path
    assert any(file.startswith("zbus/deliver/") for file in files), path
    assert len(calls) <= FUNCTIONS_MAX, path
    assert len(files) <= FILES_MAX, f"{len(files)} files:\n{path}"
