"""`zbus bridge` and `zbus router` as processes: ready lines, reports, ends, and what a kill -9 leaves whole."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import nats
import pytest
from bridge_support import command, receiving, router, until
from free_ports import free_port
from nats_support import NatsServer, nats_server

import zbus
from zbus_log.file import sqlite_driver


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as running:
        yield running


async def test_the_command_bridges_reports_and_ends_on_a_signal(server: NatsServer) -> None:
    port = free_port()
    url = f"zenoh://127.0.0.1:{port}"
    arguments = ["bridge", "--between", server.url, url, "--keys", "shop/**", "--keys", "audit/*", "--name", "b"]
    async with router(port), zbus.open(transport=server.url) as left, zbus.open(transport=url) as right:
        async with receiving(right, "**") as at_right:
            with command(*arguments, "--json", "--report-interval", "0.2") as running:
                ready = await asyncio.to_thread(running.line)
                assert ready == {
                    "ready": True,
                    "bridges": [{"bridge": "b", "durable": False, "keys": ["shop/**", "audit/*"]}],
                }
                await (await left.publisher("shop/orders")).publish_many([b"%d" % n for n in range(10)])
                await (await left.publisher("audit/log")).publish(b"x")
                await at_right.only(11)
                report = await asyncio.to_thread(running.line)
                while report["forward"]["forwarded"] < 11:
                    report = await asyncio.to_thread(running.line)
                assert await asyncio.to_thread(running.end) == 0
    assert report["bridge"] == "b"
    assert report["forward"] | {"lag_ms": 0} == {
        "from": server.url,
        "to": url,
        "connected": True,
        "forwarded": 11,
        "lag_ms": 0,
        "pending_events": 0,
    }
    assert report["reverse"]["forwarded"] == 0
    assert report["loops_prevented"] == 0
    assert any("there is no log" in line for line in running.errors)
    assert not any("Traceback" in line for line in running.errors)


async def test_prose_goes_to_stderr_and_ctrl_c_is_no_error(server: NatsServer, tmp_path: Path) -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    arguments = ["bridge", "--between", server.url, "zenoh://", "--keys", "shop/**", "--listen", endpoint]
    with command(*arguments, "--log", tmp_path / "b.db", "--report-interval", "0.1") as running:
        assert (await asyncio.to_thread(running.line))["ready"] is True
        async with zbus.open(mode="client", connect=[endpoint]) as right, receiving(right, "**") as at_right:
            async with zbus.open(transport=server.url) as left:
                await (await left.publisher("shop/orders")).publish(b"x")
                await at_right.only(1)
                await until(lambda: any("forward 1 forwarded" in line for line in running.errors))
        assert await asyncio.to_thread(running.end, signal.SIGINT) == 0
    assert running.lines.empty()
    assert any("kept in the log" in line for line in running.errors)


@pytest.mark.parametrize("side", ["nats", "zenoh"])
async def test_a_bridge_that_is_killed_goes_on_where_it_was_and_nothing_is_lost(
    server: NatsServer, tmp_path: Path, side: str
) -> None:
    port = free_port()
    urls = {"nats": server.url, "zenoh": f"zenoh://127.0.0.1:{port}"}
    near, far = urls.pop(side), next(iter(urls.values()))
    arguments = ["bridge", "--between", near, far, "--keys", "shop/**", "--log", tmp_path / "b.db", "--json"]
    arguments += ["--report-interval", "0.1"]
    async with router(port), zbus.open(tmp_path / "near.db", transport=near) as here, zbus.open(transport=far) as there:
        publisher = await here.publisher("shop/orders")
        async with receiving(there, "shop/**") as received:
            for kill in range(3):
                with command(*arguments) as running:
                    assert (await asyncio.to_thread(running.line))["ready"] is True
                    first = 300 * kill
                    publishing = asyncio.gather(*[publisher.publish(b"%d" % n) for n in range(first, first + 100)])
                    if kill == 0:
                        await received.wait(100)
                        await until(lambda: sent(tmp_path / "b.db", far) == 100)
                    running.kill()  # while events are on their way through it, but for the first time
                    await publishing
                await publisher.publish_many([b"%d" % n for n in range(first + 100, first + 300)])
            with command(*arguments) as running:
                events = await received.only(900)
                assert await asyncio.to_thread(running.end) == 0
                *_, report = running.rest()
    assert [event.sequence for event in events] == list(range(900))
    assert 200 <= report["forward"]["forwarded"] <= 800  # what had crossed at first was not sent again
    assert (
        report["reverse"]["forwarded"] == 0
    )  # and what it asked for afterwards does not go back to where it came from


async def test_what_waits_in_the_log_of_a_killed_bridge_reaches_plain_programs_when_it_is_back(
    server: NatsServer, tmp_path: Path
) -> None:
    port = free_port()
    zenoh = f"zenoh://127.0.0.1:{port}"
    arguments = [
        "bridge",
        "--between",
        server.url,
        zenoh,
        "--keys",
        "shop/**",
        "--raw",
        "--json",
        "--report-interval",
        "0.1",
    ]
    arguments += ["--log", str(tmp_path / "b.db")]
    async with router(port), zbus.open(tmp_path / "node.db", transport=zenoh) as node:
        publisher = await node.publisher("shop/orders")
        with command(*arguments) as running:
            await asyncio.to_thread(running.line)
            server.kill()
            await publisher.publish_many([b"%d" % n for n in range(200)])
            while (await asyncio.to_thread(running.line))["reverse"]["pending_events"] < 200:
                pass
            running.kill()
        server.start()
        plain = await nats.connect(server.url)
        try:
            received = await plain.subscribe("shop.>")
            await plain.flush()
            with command(*arguments) as running:
                messages = [await received.next_msg(timeout=20) for _ in range(200)]
                assert await asyncio.to_thread(running.end) == 0
        finally:
            await plain.close()
    assert [message.data for message in messages] == [b"%d" % n for n in range(200)]


def sent(log: Path, label: str) -> int:
    """The position of a link as it is on disk."""
    with closing(sqlite_driver.connect(f"file:{log}-cursors?mode=ro")) as connection:
        names = f"out/%/{label}"
        found = connection.execute("SELECT max(position) FROM positions WHERE name LIKE ?", [names]).fetchone()[0]
        return int(found or 0)


async def test_a_file_runs_several_bridges(server: NatsServer, tmp_path: Path) -> None:
    port = free_port()
    url = f"zenoh://127.0.0.1:{port}"
    file = tmp_path / "bridges.toml"
    file.write_text(f"""
        [[bridge]]
        name = "orders"
        between = ["{server.url}", "{url}"]
        keys = ["shop/orders/**"]
        direction = "forward"
        log = "{tmp_path}/orders.db"

        [[bridge]]
        name = "prices"
        between = ["{server.url}", "{url}"]
        keys = ["shop/prices/**"]
        direction = "reverse"
    """)
    async with router(port), zbus.open(transport=server.url) as left, zbus.open(transport=url) as right:
        async with receiving(left, "**") as at_left, receiving(right, "**") as at_right:
            with command("bridge", "--config", file, "--report-interval", "0") as running:
                ready = await asyncio.to_thread(running.line)
                for node in (left, right):
                    for key in ("shop/orders/x", "shop/prices/x"):
                        await (await node.publisher(key)).publish(b"left" if node is left else b"right")
                seen_left, seen_right = await at_left.only(3), await at_right.only(3)
                assert await asyncio.to_thread(running.end) == 0
    assert [(each["bridge"], each["durable"]) for each in ready["bridges"]] == [("orders", True), ("prices", False)]
    assert [event.key for event in seen_right if event.payload == b"left"] == ["shop/orders/x"]
    assert [event.key for event in seen_left if event.payload == b"right"] == ["shop/prices/x"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[bridge]]\nbetween = ["nats://a", "zenoh://b:1"]\nkeys = ["a/**"]\n[[bridge]]\n', "[[bridge]] 2: between: "),
        ('[[bridge]]\nbetween = ["nats://a", "zenoh://b:1"]\nkeys = ["a//b"]\n', "[[bridge]] 1: keys: "),
        ('[[bridge]]\nbetween = ["nats://a"]\nkeys = ["a"]\n', "[[bridge]] 1: between"),
        ('[[bridge]]\nbetween = ["nats://a", "zenoh://b:1"]\nkeys = ["a"]\ncolour = "red"\n', "[[bridge]] 1: colour: "),
        ('[[bridge]]\nbetween = ["nats://a", "zenoh://b:1"]\nkeys = ["a"]\nraw = "maybe"\n', "[[bridge]] 1: raw: "),
        (
            2 * '[[bridge]]\nbetween = ["nats://a", "zenoh://b:1"]\nkeys = ["a"]\nlog = "x.db"\n',
            "[[bridge]] 2: log: another bridge uses this log",
        ),
        ("[bridges]\n", "'bridges' is unknown"),
        ("", "the file has no [[bridge]] table"),
        ("[[bridge\n", "config: "),
    ],
)
def test_a_wrong_file_is_reported_by_table_and_field_before_anything_starts(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "bridges.toml"
    file.write_text(text)
    with command("bridge", "--config", file) as running:
        assert running.wait() == 2
    (line,) = running.errors
    assert said in line
    assert running.lines.empty()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--keys", "a/**"],
        ["--between", "nats://a", "zenoh://b:1"],
        ["--between", "nats://a", "--keys", "a"],
        ["--between", "nats://a", "zenoh://b:1", "--keys", "a", "--direction", "up"],
        ["--between", "nats://a", "zenoh://b:1", "--keys", "a", "--config", "x.toml"],
        ["--between", "nats://a", "zenoh://b:1", "--keys", "a", "--report-interval", "-1"],
    ],
)
def test_a_call_that_makes_no_sense_ends_with_two_and_one_line(arguments: list[str]) -> None:
    with command("bridge", *arguments) as running:
        assert running.wait() == 2
    assert len(running.errors) == 1
    assert running.lines.empty()


def test_one_url_between_is_said_to_be_too_few() -> None:
    with command("bridge", "--between", "nats://a", "--keys", "a/**") as running:
        assert running.wait() == 2
    assert "--between takes two URLs" in running.errors[0]


def test_a_side_that_is_not_there_ends_a_bridge_without_a_log_with_one(server: NatsServer) -> None:
    away = f"nats://127.0.0.1:{free_port()}"
    with command("bridge", "--between", away, "zenoh://127.0.0.1:1", "--keys", "a/**") as running:
        assert running.wait() == 1
    assert away in running.errors[-1]
    assert running.lines.empty()


async def test_a_router_process_carries_events_and_ends_on_a_signal() -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    with command("router", "--listen", endpoint) as running:
        ready = await asyncio.to_thread(running.line)
        assert (ready["ready"], ready["listen"]) == (True, [endpoint])
        async with (
            zbus.open(mode="client", connect=[endpoint]) as one,
            zbus.open(mode="client", connect=[endpoint]) as two,
        ):
            async with receiving(two, "a/**") as received:
                await (await one.publisher("a/b")).publish(b"x")
                assert (await received.only(1))[0].payload == b"x"
        assert await asyncio.to_thread(running.end) == 0
    assert not any("Traceback" in line for line in running.errors)


def test_a_router_ends_on_ctrl_c_too() -> None:
    with command("router", "--listen", f"tcp/127.0.0.1:{free_port()}") as running:
        running.line()
        assert running.end(signal.SIGINT) == 0


def test_routers_join_each_other() -> None:
    one, two = (f"tcp/127.0.0.1:{free_port()}" for _ in range(2))
    with command("router", "--listen", one) as first, command("router", "--listen", two, "--connect", one) as second:
        first.line()
        assert second.line()["connect"] == [one]

        async def cross() -> None:
            async with (
                zbus.open(mode="client", connect=[one]) as left,
                zbus.open(mode="client", connect=[two]) as right,
            ):
                async with receiving(right, "a/**") as received:
                    # No log has the events: those that are published before the routers have all routes are lost.
                    publisher = await left.publisher("a/b")
                    async with asyncio.timeout(30):
                        while not received.events:
                            await publisher.publish(b"x")
                            await asyncio.sleep(0.05)

        asyncio.run(cross())
        assert (first.end(), second.end()) == (0, 0)


def test_a_router_whose_port_is_taken_ends_with_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with command("router", "--listen", f"tcp/127.0.0.1:{taken.getsockname()[1]}") as running:
            assert running.wait() == 1
    assert running.lines.empty()
    assert len(running.errors) >= 1


def test_a_router_that_makes_no_sense_ends_with_two() -> None:
    for arguments in (["--listen", "nonsense"], ["--option", "tls_ca"], ["--option", "colour=red"]):
        with command("router", *arguments) as running:
            assert running.wait() == 2
        assert len(running.errors) == 1
