"""What every test shares: a place for a log, and a check that nothing is left running behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

LEFT_BEHIND_S = 5.0  # how long threads and tasks have to end by themselves after a test


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, _no_thread_left: None) -> None:
    """Fail a test after which a thread of zbus, or a task on the test's event loop, is still there."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("_no_task_left")


@pytest.fixture
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    started = [each for each in threading.enumerate() if each.name.startswith("zbus-") and each not in before]
    deadline = time.monotonic() + LEFT_BEHIND_S
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = sorted(thread.name for thread in started if thread.is_alive())
    assert not alive, f"the test left threads behind: {', '.join(alive)}"


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    # Ends before the check of threads: a bus that closes in the background needs its loop to run.
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=LEFT_BEHIND_S)
    assert not left, f"the test left tasks behind: {', '.join(repr(task) for task in left)}"
