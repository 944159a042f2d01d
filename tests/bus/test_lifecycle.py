"""Opening and closing: nothing is left behind, nothing waits for ever, and embedded means no socket."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy
from inside import node_of

import zbus


def descriptors() -> dict[str, str]:
    return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def _is_open(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return False
    return True


async def settle(condition: object, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_started_and_stopped_are_recorded_with_diagnostics(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zbus")
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/b")).publish(b"")

    records = {record.zbus["record"]: record.zbus for record in caplog.records}  # type: ignore[attr-defined]
    assert records["BUS_STARTED"]["log"] == str(log_path)
    assert records["BUS_STARTED"]["fabric"] == "zenoh"
    assert records["BUS_STOPPED"]["delivered"] == 1


async def test_a_closed_bus_leaves_no_thread_and_no_descriptor_behind(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:  # whatever the libraries open once for the process
        await (await bus.publisher("a/b")).publish(b"")
        async with bus.subscribe("**", durable="x", start="beginning") as subscription:
            await anext(subscription)
    threads, files = threading.active_count(), descriptors()

    for _ in range(5):
        async with zbus.open(log_path) as bus:
            await (await bus.publisher("a/b")).publish(b"")
            async with bus.subscribe("**", durable="x", start="beginning") as subscription:
                await anext(subscription)
            assert [event async for event in bus.replay()]

    await settle(lambda: threading.active_count() <= threads and len(descriptors()) <= len(files))


async def test_closing_stores_what_was_published_and_flushes_what_is_queued(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        subscription = bus.subscribe("**")
        publisher = await bus.publisher("a/b")
        publishing = [asyncio.create_task(publisher.publish(b"")) for _ in range(500)]
        await asyncio.sleep(0)

    assert [await task for task in publishing] == list(range(1, 501))
    assert [event.offset async for event in subscription] == list(range(1, 501))


async def test_closing_ends_the_wait_of_a_publisher_for_a_full_reader(log_path: Path) -> None:
    bus = zbus.open(log_path)
    await bus.start()
    full = bus.subscribe("**", queue_events=2, overflow="block")
    publisher = await bus.publisher("a/b")
    await publisher.publish_many([b"1", b"2"])
    waiting = asyncio.create_task(publisher.publish(b"3"))
    await asyncio.sleep(0)
    assert node_of(bus).backpressure.blocked

    await bus.aclose()

    async with asyncio.timeout(10):
        with pytest.raises(zbus.BusClosed):
            await waiting
    assert [event.offset async for event in full] == [1, 2]


async def test_closing_twice_and_closing_what_never_opened_are_harmless(log_path: Path) -> None:
    never = zbus.open(log_path)
    await never.aclose()
    bus = zbus.open(log_path)
    await bus.start()
    await asyncio.gather(bus.aclose(), bus.aclose())
    await bus.aclose()
    assert not node_of(bus).is_open


async def test_closing_that_is_cancelled_still_closes(log_path: Path) -> None:
    bus = zbus.open(log_path)
    await bus.start()
    closing = asyncio.create_task(bus.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await bus.aclose()

    async with zbus.open(log_path):  # the owner is gone
        pass


async def test_a_bus_inside_a_cancelled_task_is_closed(log_path: Path) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        async with zbus.open(log_path) as bus:
            entered.set()
            async for _ in bus.subscribe("**"):
                pass

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with zbus.open(log_path):
        pass


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.005, 0.02, 0.05])
async def test_an_opening_that_is_cancelled_leaves_nothing_open(log_path: Path, delay_s: float) -> None:
    bus = zbus.open(log_path)
    opening = asyncio.create_task(bus.start())
    await asyncio.sleep(delay_s)
    if opening.done():  # it was faster than we were
        await bus.aclose()
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)

    async def can_be_opened() -> bool:
        try:
            async with zbus.open(log_path):
                return True
        except zbus.LogLocked:
            return False

    async with asyncio.timeout(10):
        while not await can_be_opened():
            await asyncio.sleep(0.01)
    assert not node_of(bus).is_open


def test_a_bus_that_is_open_when_the_loop_closes_does_not_keep_the_process(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio, sys, zbus
        async def main():
            bus = zbus.open(sys.argv[1])
            await bus.start()
            publisher = await bus.publisher("a/b")
            asyncio.ensure_future(publisher.publish(b"x"))
            bus.subscribe("**", durable="d")
            await asyncio.sleep(0)
        asyncio.run(main())
        print("ended")
    """)
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "app.db")], capture_output=True, text=True, timeout=30
    )
    assert (result.stdout, result.returncode) == ("ended\n", 0), result.stderr
    assert time.monotonic() - began < 15


async def test_closing_takes_no_longer_than_its_timeout_whatever_a_handler_does(log_path: Path) -> None:
    bus = zbus.open(log_path, close_timeout_s=1.0)
    await bus.start()
    started = asyncio.Event()

    @bus.on("**")
    async def stuck(event: zbus.Event) -> None:
        started.set()
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                pass  # what a handler must never do

    released = asyncio.Event()
    await (await bus.publisher("a/b")).publish(b"")
    await started.wait()
    began = time.monotonic()
    await bus.aclose()
    took_s = time.monotonic() - began
    released.set()

    assert took_s < 2.5
    assert not node_of(bus).is_open


def test_the_embedded_bus_opens_no_socket(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio, os, sys, zbus
        def sockets():
            links = []
            for fd in os.listdir("/proc/self/fd"):
                try:
                    links.append(os.readlink(f"/proc/self/fd/{fd}"))
                except FileNotFoundError:
                    pass
            return sorted(link for link in links if link.startswith("socket:"))
        async def main():
            before = sockets()  # asyncio's own pair
            async with zbus.open(sys.argv[1]) as bus:
                assert bus.zenoh is not None and not bus.zenoh.is_closed()
                publisher = await bus.publisher("a/b")
                async with bus.subscribe("**") as subscription:
                    await publisher.publish(b"x")
                    await anext(subscription)
                    print(len(before), sockets() == before)
        asyncio.run(main())
    """)
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "app.db")], capture_output=True, text=True, timeout=30
    )
    assert re.fullmatch(r"\d+ True\n", result.stdout), result.stderr


@pytest.mark.parametrize("mode", ["peer", "client", "router"])
def test_a_networked_zenoh_bus_opens_the_configured_sockets_and_no_multicast(mode: str) -> None:
    """One that listens on a loopback port, and the link to the node that was named: nothing else, and no datagrams."""
    script = textwrap.dedent("""
        import asyncio, os, re, socket, sys, zbus
        def own():
            links = []
            for fd in os.listdir("/proc/self/fd"):
                try:
                    links.append(os.readlink(f"/proc/self/fd/{fd}"))
                except FileNotFoundError:
                    pass
            return {found[1] for link in links if (found := re.fullmatch(r"socket:\\[(\\d+)\\]", link))}
        def sockets():
            inodes, found = own(), []
            for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
                for line in open(f"/proc/self/net/{kind}").readlines()[1:]:
                    fields = line.split()
                    if fields[9] in inodes:
                        found.append((kind, fields[1], "listening" if fields[3] == "0A" else ""))
            return found
        def free():
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                return taken.getsockname()[1]
        async def main():
            mode, there, here = sys.argv[1], free(), free()
            listen = [f"tcp/127.0.0.1:{here}"] if mode != "client" else []
            far = await asyncio.create_subprocess_exec(
                sys.executable, "-c",
                "import asyncio, sys, zbus\\n"
                "async def main():\\n"
                f"    async with zbus.open(mode='router', listen=['tcp/127.0.0.1:{there}']):\\n"
                "        print('open', flush=True); sys.stdin.read()\\n"
                "asyncio.run(main())",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )
            await far.stdout.readline()
            async with zbus.open(mode=mode, listen=listen, connect=[f"tcp/127.0.0.1:{there}"]) as bus:
                async with asyncio.timeout(20):
                    while not bus.diagnostics()["links"][0]["linked"]:
                        await asyncio.sleep(0.01)
                found = sockets()
                listening = [address for _, address, kind in found if kind == "listening"]
                assert listening == [f"0100007F:{here:04X}"] * len(listen), found
                assert len(found) > len(listening), found
                assert {kind for kind, _, _ in found} == {"tcp"}, found
                assert all(address.startswith("0100007F:") for _, address, _ in found), found
            far.stdin.close()
            await far.wait()
            print("as asked")
        asyncio.run(main())
    """)
    result = subprocess.run([sys.executable, "-c", script, mode], capture_output=True, text=True, timeout=60)
    assert result.stdout == "as asked\n", result.stderr


async def test_the_loop_is_never_blocked_while_much_is_published_replayed_and_closed(log_path: Path) -> None:
    """No statement runs on the loop's thread, and a heartbeat there never pauses for long.

    The first is exact; the second has a wide margin, because the machine may be busy with other things.
    """
    longest, beating, on_the_loop = 0.0, True, []
    loop_thread = threading.get_ident()

    def watch(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if threading.get_ident() == loop_thread:
            on_the_loop.append(statement)

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", watch)

    async def heartbeat() -> None:
        nonlocal longest
        while beating:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - before)

    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        beat = asyncio.create_task(heartbeat())
        for _ in range(10):
            await publisher.publish_many([b"x" * 200] * 5000)
        seen = [event.offset async for event in bus.replay()]
        async with bus.subscribe("**", start="beginning", durable="d") as subscription:
            for _ in range(5000):
                await anext(subscription)
    beating = False
    await beat
    sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", watch)

    assert len(seen) == 50_000
    assert on_the_loop == []
    assert longest < 1.0, f"the loop stood still for {longest * 1000:.0f} ms"
