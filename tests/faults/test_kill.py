"""kill -9 at random moments: nothing acknowledged is lost, nothing is stored twice, order is kept.

A publishing process is killed again and again, and so is a durable reader in another process. Each
writes its progress to a file; at the end the log is compared with these files, identity by identity.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

import zbus
from zbus_log import verify

CHILD = Path(__file__).with_name("killed_child.py")


def start(role: str, log: Path, out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, CHILD, role, log, out], stderr=subprocess.PIPE)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill(child: subprocess.Popen[bytes], out: Path) -> None:
    child.send_signal(signal.SIGKILL)
    _, stderr = child.communicate(timeout=10)
    assert child.returncode == -signal.SIGKILL, f"the child ended without being killed: {stderr.decode()}"
    # A write that crosses a page can be cut there, and the next child would continue within that line.
    os.truncate(out, out.read_bytes().rfind(b"\n") + 1)


def wait_for_growth(path: Path, than: int, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while size(path) <= than:
        assert child.poll() is None, f"the child ended without being killed: {child.communicate()[1].decode()}"
        assert time.monotonic() < deadline, f"{path.name} does not grow"
        time.sleep(0.001)


def kill_at_random_moments(log: Path, acknowledged: Path, seen: Path, times: int, seed: int) -> None:
    moments = random.Random(seed)
    reader = None
    for turn in range(times):
        before = size(acknowledged)
        publisher = start("publish", log, acknowledged)
        wait_for_growth(acknowledged, before, publisher)
        if reader is None:
            before = size(seen)
            reader = start("read", log, seen)
            wait_for_growth(seen, before + len("start\n"), reader)
        time.sleep(moments.random() * 0.15)  # the random moment
        kill(publisher, acknowledged)
        if turn % 2 == 0:
            kill(reader, seen)
            reader = None
    if reader is not None:
        kill(reader, seen)


async def check(log: Path, acknowledged: Path, seen: Path) -> None:
    async with zbus.open(log) as bus:
        stored = [event async for event in bus.replay()]
        # Let the reader finish what is left, in this process, under its durable name.
        rest = []
        head = await bus.head()
        async with bus.subscribe("kill/**", durable="reader") as subscription:
            while not rest or rest[-1].offset < head:
                rest.append(await anext(subscription))

    by_identity = {event.identity: event for event in stored}
    assert len(by_identity) == len(stored), "an identity is stored twice"
    lines = [tuple(map(int, line.split())) for line in acknowledged.read_text().splitlines()]
    assert lines
    for publisher_id, sequence, offset in lines:
        event = by_identity[publisher_id, sequence]  # a KeyError here is an acknowledged event that was lost
        assert event.offset == offset
        assert event.payload == b"%d" % sequence

    sequences = defaultdict(list)
    for event in stored:
        sequences[event.publisher_id].append(event.sequence)
    assert all(order == list(range(len(order))) for order in sequences.values()), "order per publisher"

    _check_reader(seen.read_text().splitlines(), {event.offset for event in stored}, [event.offset for event in rest])


def _check_reader(lines: list[str], stored: set[int], rest: list[int]) -> None:
    seen, acked, last = set(), 0, 0
    for line in lines:
        kind, *fields = line.split()
        if kind == "start":
            last = acked
        elif kind == "seen":
            offset = int(fields[2])
            assert offset > acked, f"offset {offset} came again after {acked} was acknowledged"
            assert offset > last, f"offset {offset} came after {last}"
            last = offset
            seen.add(offset)
        else:
            acked = int(fields[0])
    assert acked > 0
    assert all(offset > acked for offset in rest), "an event came again after its acknowledgement"
    assert stored <= seen | set(rest), "the durable reader missed an event"


async def run(tmp_path: Path, times: int, seed: int) -> None:
    log, acknowledged, seen = tmp_path / "app.db", tmp_path / "acknowledged", tmp_path / "seen"
    kill_at_random_moments(log, acknowledged, seen, times, seed)
    await check(log, acknowledged, seen)
    assert verify(str(log)).problems == []


@pytest.mark.timeout(240)
async def test_10_kills_of_a_publishing_process_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    await run(tmp_path, 10, seed=random.SystemRandom().randrange(1 << 32))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_200_kills_of_a_publishing_process_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    await run(tmp_path, 200, seed=random.SystemRandom().randrange(1 << 32))
