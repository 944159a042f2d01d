"""JetStream as the peer: a real nats-server on loopback, and nats-py as its documentation uses it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns

import nats
from _harness import PAYLOAD
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

SERVER = Path(sys.executable).with_name("nats-server")
STREAM = "BENCH"
SUBJECTS = 256
IN_FLIGHT = 1000
TIMED_EVERY = 10  # timing a publish needs a callback, which must not slow down the peer
START_S = 15.0
WAIT_S = 120.0


@contextmanager
def nats_server(where: Path, *, sync_always: bool) -> Iterator[str]:
    """Run a server with JetStream on a free loopback port, and yield its URL."""
    where.mkdir()
    sync = "sync_interval: always" if sync_always else ""
    config = where / "server.conf"
    config.write_text(f'listen: "127.0.0.1:-1"\njetstream {{ store_dir: "{where}/store"\n {sync} }}\n')
    with (where / "server.log").open("wb") as output:
        command = [str(SERVER), "-c", str(config), "--ports_file_dir", str(where)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield _url(process, where)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], where: Path) -> str:
    ports = where / f"nats-server_{process.pid}.ports"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return str(json.loads(ports.read_text())["nats"][0])
        except (OSError, ValueError):
            time.sleep(0.02)
    raise RuntimeError(f"nats-server did not start: {(where / 'server.log').read_text()[-2000:]}")


def peer_versions() -> dict[str, str]:
    """Return the versions of the client and the server."""
    printed = subprocess.run([str(SERVER), "--version"], capture_output=True, text=True, timeout=10, check=True)
    found = re.search(r"v([\d.]+)", printed.stdout)
    return {"nats-py": version("nats-py"), "nats-server": found.group(1) if found else printed.stdout.strip()}


@asynccontextmanager
async def fresh_stream(url: str) -> AsyncIterator[JetStreamContext]:
    """Open a connection and create an empty stream on disk; remove it afterwards."""
    client = await nats.connect(url)
    try:
        stream = client.jetstream(publish_async_max_pending=IN_FLIGHT, timeout=WAIT_S)
        await stream.add_stream(
            StreamConfig(
                STREAM, subjects=["bench.>"], storage=StorageType.FILE, retention=RetentionPolicy.LIMITS, num_replicas=1
            )
        )
        try:
            yield stream
        finally:
            await stream.delete_stream(STREAM)
    finally:
        await client.close()


async def publish(stream: JetStreamContext, events: int) -> list[int]:
    """Publish with 1,000 in flight and wait for every acknowledgement. Returns sampled durations."""
    durations: list[int] = []
    for number in range(events):
        begin = perf_counter_ns()
        acknowledged = await stream.publish_async(f"bench.orders.p{number % SUBJECTS}", PAYLOAD)
        if number % TIMED_EVERY == 0:
            acknowledged.add_done_callback(partial(_timed, durations, begin))
    async with asyncio.timeout(WAIT_S):
        await stream.publish_async_completed()
    return durations


async def expect_stored(stream: JetStreamContext, events: int) -> None:
    """Check that every publish was stored: acknowledgements are not checked for errors."""
    stored = (await stream.stream_info(STREAM)).state.messages
    if stored != events:
        raise RuntimeError(f"JetStream stored {stored} of {events}")


def _timed(durations: list[int], begin: int, acknowledged: asyncio.Future[object]) -> None:
    acknowledged.result()
    durations.append(perf_counter_ns() - begin)


async def delivery(stream: JetStreamContext, events: int) -> asyncio.Event:
    """Start an ordered push consumer. The returned event is set once it has received `events` messages."""
    done, seen = asyncio.Event(), 0

    async def received(_: Msg) -> None:
        nonlocal seen
        seen += 1
        if seen == events:
            done.set()

    await stream.subscribe("bench.>", stream=STREAM, cb=received, ordered_consumer=True)
    return done
