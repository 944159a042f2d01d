"""What every test shares: a place for a log, and a check that nothing is left running behind it."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from vocabulary import Coded
from xdist.scheduler import LoadFileScheduling

# The tests in this folder, without those below it, share one Spark session, and so do some of the documents' blocks.
SPARK = "zbus_spark"
SPARK_TEST = "in_a_document_about_spark"
# A file with few and long tests that begins last is waited for by all: these folders come before the others.
LONG = ("faults", "mesh", "browser", "bridge", "cli", "contract", "project", "zbus_web", "zbus_log")
# A machine that is busy with other tests says nothing about what is tested.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
LEFT_BEHIND_S = 5.0  # how long threads and tasks have to end by themselves after a test


def pytest_configure() -> None:
    """A run in the background (`make test &`) ignores SIGINT, and every child would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Scheduling(LoadFileScheduling):
    """Each file in one process, and all that need Spark in the same one: it takes seconds and half a gigabyte."""

    def _split_scope(self, nodeid: str) -> str:
        return SPARK if needs_spark(nodeid) else nodeid.partition("::")[0]


def needs_spark(nodeid: str) -> bool:
    file, _, test = nodeid.partition("::")
    return Path(file).parent.name == SPARK or SPARK_TEST in test


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first; the files of a folder, and the tests of a file, stay in their order."""
    items.sort(key=lambda item: (not needs_spark(item.nodeid), item.path.parent.name not in LONG))


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, _no_thread_left: None) -> None:
    """Fail a test after which a thread of zbus, or a task on the test's event loop, is still there."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("_no_task_left")


@pytest.fixture(autouse=True)
def every_reason_has_a_code() -> Iterator[None]:
    """Fail a test in which a log record has a reason without a code."""
    coded, logger = Coded(), logging.getLogger("zbus")
    logger.addFilter(coded)
    yield
    logger.removeFilter(coded)
    assert coded.without == []


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
