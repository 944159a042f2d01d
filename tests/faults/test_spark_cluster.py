"""A real cluster on loopback: a master and two workers, each a process, reading a log through its node."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
import pytest
from cold_support import offload
from mesh_support import reserved_port
from spark_support import write_log

import zbus
from zbus_log import Rules, prune

HOME = Path(pyspark.__file__).parent
CHILD = Path(__file__).parents[1] / "support" / "cluster_child.py"
EVENTS, PARTITIONS = 60_000, 24
DEADLINE_S = 100.0

pytestmark = [pytest.mark.timeout(240), pytest.mark.nightly]


def until(true: object, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} took too long"
        time.sleep(0.05)


@contextmanager
def started(folder: Path, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Spark's, with what it says in a file; it ends with the test."""
    environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(HOME)}
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(
            [str(HOME / "bin" / "spark-class"), *command], stdout=out, stderr=out, env=environment, cwd=folder
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def served(log: Path) -> Iterator[str]:
    """A node that owns the log and answers for it, on a thread of its own."""
    kept, ready, over = reserved_port(), threading.Event(), threading.Event()
    port = kept.getsockname()[1]

    async def serve() -> None:
        async with zbus.open(log, mode="router", listen=[f"tcp/127.0.0.1:{port}"]):
            ready.set()
            await asyncio.to_thread(over.wait)

    node = threading.Thread(target=lambda: asyncio.run(serve()))
    node.start()
    try:
        assert ready.wait(30)
        yield f"zenoh://127.0.0.1:{port}"
    finally:
        over.set()
        node.join()
        kept.close()


def began_at(said: Path) -> str:
    """The URL of a master: it takes a port that is free."""
    found = re.search(r"Starting Spark master at (spark://[\d.:]+)", said.read_text())
    return found[1] if found else ""


@pytest.mark.parametrize("tier", [False, True], ids=["log", "log-and-tier"])
def test_a_worker_killed_in_mid_job_costs_no_event(tmp_path: Path, tier: bool) -> None:
    log, cold = tmp_path / "app.db", tmp_path / "elsewhere"
    write_log(log, [(f"shop/orders/p{number % 7}", b"x" * 100) for number in range(EVENTS)])
    if tier:
        offload(log, EVENTS // 4, EVENTS // 2)
        Path(f"{log}-cold").rename(cold)  # a folder that the node does not read: only it has the trimmed events
        prune(log, Rules(until=EVENTS // 3))
    with ExitStack() as stack:
        place = "--host", "127.0.0.1", "--webui-port", "0"
        stack.enter_context(started(tmp_path, "master", "org.apache.spark.deploy.master.Master", "--port", "0", *place))
        until(lambda: began_at(tmp_path / "master.out"), "the master")
        master = began_at(tmp_path / "master.out")
        workers = [
            stack.enter_context(
                started(
                    tmp_path,
                    f"worker{number}",
                    "org.apache.spark.deploy.worker.Worker",
                    *("-c", "1", "-m", "1g", "--work-dir", str(tmp_path / f"work{number}"), *place, master),
                )
            )
            for number in range(2)
        ]
        until(lambda: (tmp_path / "master.out").read_bytes().count(b"Registering worker") == 2, "the workers")
        url = stack.enter_context(served(log))
        driver = subprocess.Popen(
            [sys.executable, str(CHILD), master, url, str(EVENTS), str(PARTITIONS), *([str(cold)] if tier else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"},
        )
        stack.callback(driver.communicate)
        stack.callback(driver.kill)
        assert driver.stdout is not None

        line = driver.stdout.readline()
        assert line.startswith("under way"), (line, driver.communicate()[1][-2000:])
        workers[0].send_signal(signal.SIGKILL)
        rest, reported = driver.communicate(timeout=DEADLINE_S)

    assert driver.returncode == 0, reported[-2000:]
    found = json.loads(rest)
    assert (found["events"], found["offsets"], found["total"]) == (EVENTS, EVENTS, EVENTS * (EVENTS + 1) // 2)
    assert (found["bytes"], found["keys"]) == (100 * EVENTS, 7)
    assert found["lost"] >= 1  # and done again by the other
    lost = (tmp_path / "master.out").read_text()
    assert "Removing worker" in lost or "got disassociated" in lost
