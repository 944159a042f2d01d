"""How fast is a backup compared with `cp` and fsync of the same file, and how long does a publisher wait meanwhile?

Both sides of the first row copy the log while one process publishes durably at a steady rate. For the second row, the
p99 of that publisher is measured while another process makes one full backup after the other, and without one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter_ns

from _harness import PAYLOAD, Measurement, Row, Sizes, alternate, compare, folder, percentile_us, run_one, zbus_versions

import zbus
from zbus_log.backup.make import make_backup
from zbus_log.cli.backup import NICE

TARGET_RATE, TARGET_P99 = 0.5, 2.0
EVERY_S = 0.002
BATCH = 2000
PUBLISH = "import sys; sys.path[:0] = [sys.argv[2]]; import backup; backup.publish_until_killed(sys.argv[1])"
BACK_UP = "import sys; sys.path[:0] = [sys.argv[2]]; import backup; backup.back_up_until_killed(sys.argv[1])"


def rows(sizes: Sizes) -> list[Row]:
    """Measure both rows on one log."""
    events, rounds = sizes.of(1_000_000, 20_000), sizes.of(5, 1)
    publishes = sizes.of(1500, 100)
    with folder() as where:
        log = where / "log.db"
        asyncio.run(fill(log, events))
        with _process(PUBLISH, log):
            rates = alternate(rounds, lambda: back_up(log), lambda: copy(log))
        waits = alternate(
            rounds,
            lambda: while_backed_up(log, publishes),
            lambda: asyncio.run(publish(log, publishes)),
        )
    versions = {"zbus": zbus_versions(), "peer": zbus_versions()}
    return [
        compare(
            "backup",
            "full backup vs. cp and fsync, beside a publisher",
            unit="MB/s",
            peer_name="cp + fsync",
            rounds=rates,
            target=TARGET_RATE,
            versions=versions,
            events=events,
        ),
        compare(
            "backup",
            "publisher's p99 during backups vs. alone",
            unit="µs",
            peer_name="alone",
            rounds=waits,
            target=TARGET_P99,
            target_is="ratio at most",
            versions=versions,
            events=events,
        ),
    ]


async def fill(log: Path, events: int) -> None:
    """Create a log."""
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("bench/orders/created")
        for _ in range(0, events, BATCH):
            await publisher.publish_many([PAYLOAD] * BATCH)


def back_up(log: Path) -> Measurement:
    """Measure a full backup."""
    target = log.with_name("backup.zbus")
    size, begin = log.stat().st_size, perf_counter_ns()
    make_backup(str(log), str(target))
    took = perf_counter_ns() - begin
    target.unlink()
    return Measurement(size / took * 1000)


def copy(log: Path) -> Measurement:
    """Measure what `cp` and an fsync take."""
    target = log.with_name("copy")
    size, begin = log.stat().st_size, perf_counter_ns()
    shutil.copyfile(log, target)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    took = perf_counter_ns() - begin
    target.unlink()
    return Measurement(size / took * 1000)


async def publish(log: Path, publishes: int) -> Measurement:
    """Measure the p99 of single durable publishes at a steady rate."""
    durations: list[int] = []
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("bench/orders/live")
        for _ in range(publishes):
            begin = perf_counter_ns()
            await publisher.publish(PAYLOAD)
            durations.append(perf_counter_ns() - begin)
            await asyncio.sleep(EVERY_S)
    return Measurement(percentile_us(durations, 99) or 0.0, durations)


def while_backed_up(log: Path, publishes: int) -> Measurement:
    """Measure the p99 while another process makes backups. They are removed later: that takes the disk a while."""
    try:
        with _process(BACK_UP, log):
            return asyncio.run(publish(log, publishes))
    finally:
        for made in log.parent.glob("*.zbus"):
            made.unlink()


def publish_until_killed(log: str) -> None:
    """Publish at a steady rate, in a process of its own."""
    threading.Timer(0.5, lambda: print("started", flush=True)).start()
    asyncio.run(publish(Path(log), 1 << 40))


def back_up_until_killed(log: str) -> None:
    """Make full backups, in a process of its own, with the priority that `zbus log backup` has."""
    os.nice(NICE)
    print("started", flush=True)
    for number in count():
        make_backup(log, f"{log}.{number}.zbus")


@contextmanager
def _process(program: str, log: Path) -> Iterator[None]:
    command = [sys.executable, "-c", program, str(log), str(Path(__file__).parent)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        if running.stdout.readline() != "started\n":
            raise RuntimeError("the other process did not start")
        yield
        if running.poll() is not None:
            raise RuntimeError("the other process ended too early")
    finally:
        running.kill()
        running.communicate()


if __name__ == "__main__":
    run_one(rows)
