"""`zbus top`, as a process: beside the owner of a log, on a transport, from a server, and on a real terminal."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_processes import Commands
from free_ports import free_port
from nats_support import nats_server
from rich.console import Console
from terminal_support import COMMAND, ENVIRONMENT, WAIT_S, Terminal

import zbus
from zbus.cli.top import counts as top_counts
from zbus.cli.top.counts import OTHERS, KeyCounts
from zbus.cli.top.frame import CursorLag, Frame, KeyRate, NodeSeen, Quantiles
from zbus.cli.top.live_feed import check_url
from zbus.cli.top.screen import line, screen

run = Commands()
EVIL = "a\x1b[2J\x07\x9b2J\u202e\n[bold]"


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    run.close()


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [*COMMAND, *map(str, arguments)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def frame_with(process: subprocess.Popen[bytes], wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The first of the frames to come that is as wanted; the test's timeout ends what never comes."""
    assert process.stdout is not None
    for read in process.stdout:
        frame: dict[str, Any] = json.loads(read)
        if wanted(frame):
            return frame
    assert process.stderr is not None
    raise AssertionError(process.stderr.read().decode())


def events(frame: dict[str, Any]) -> int:
    return sum(each["events"] for each in frame["topics"])


def lag(frame: dict[str, Any]) -> int:
    return sum(each["lag"] for each in frame["cursors"])


# Beside the owner of a log.


def test_beside_the_owner_of_a_log_it_tells_rates_keys_and_lag(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        busy, rare = bus.publisher("shop/orders"), bus.publisher("audit/login")
        busy.publish_many([b"before"] * 5)
        with bus.subscribe("**", durable="billing", start="beginning") as subscription:
            assert subscription.next(timeout=WAIT_S) is not None
            subscription.ack(next(subscription))
        with started("top", log_path, "--json", "--interval", 0.1) as top:
            quiet = frame_with(top, lambda frame: True)
            busy.publish_many([b"x"] * 40)
            rare.publish(b"x")
            fast = frame_with(top, lambda frame: frame["published_per_s"] > 0)
            # All of it in one frame: what is read and what is counted may be a moment apart.
            seen = frame_with(top, lambda frame: frame["head"] == 46 and events(frame) == 41 and lag(frame) == 44)
            frame_with(top, lambda frame: frame["published_per_s"] == 0)
            top.terminate()
            assert top.wait(WAIT_S) == 0
            assert top.stderr is not None
            assert top.stderr.read() == b""

    assert (quiet["head"], quiet["topics"], quiet["published"]) == (5, [], 0)
    assert fast["published_per_s"] <= 41 / 0.1
    assert (seen["published"], seen["source"]) == (41, str(log_path))
    assert [(each["key"], each["events"]) for each in seen["topics"]] == [("shop/orders", 40), ("audit/login", 1)]
    assert [each["name"] for each in seen["cursors"]] == ["billing"]
    assert seen["log_bytes"] > 0
    for unknown in ("delivered_per_s", "dropped_per_s", "commit_ms", "subscriptions"):
        assert seen[unknown] is None  # only the owner has these values


def test_one_frame_is_a_table_and_a_log_without_an_owner_can_be_watched(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("a/b").publish_many([b"x"] * 1234)

    done = run("top", log_path, "--once", "--interval", 0.1)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert text.startswith("zbus top ")
    assert str(log_path) in text.replace("\n", "")
    assert "log head 1,234" in text
    assert "published/s 0.0" in text
    assert "delivered/s -" in text

    (frame,) = run("top", "--json", "--once", "--interval", 0.1, ZBUS_LOG=str(log_path)).stdout.splitlines()
    assert json.loads(frame)["head"] == 1234


def test_piped_it_prints_plain_lines_and_ends_with_its_reader(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("a/b").publish(b"x")
    with started("top", log_path, "--interval", 0.1) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        lines = [top.stdout.readline().decode() for _ in range(2)]
        top.stdout.close()
        assert top.wait(WAIT_S) == 0
        assert top.stderr.read() == b""

    for each in lines:
        assert f"{log_path}; head 1; published 0.0/s; delivered -/s; dropped -/s" in each
        assert each.rstrip("\n").isprintable()


# On a transport.


def test_on_a_transport_it_tells_what_nodes_publish_and_who_is_there(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server, zbus.blocking.open(transport=server.url, node="worker-7") as bus:
        publisher, stop = bus.publisher("shop/orders"), threading.Event()

        def publish() -> None:
            while not stop.wait(0.02):
                publisher.publish(b"x")

        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            with started("top", "--transport", server.url, "--json", "--interval", 0.1) as top:
                seen = frame_with(top, lambda frame: frame["nodes"] and frame["topics"])
        finally:
            stop.set()
            publishing.join()

    assert [each["key"] for each in seen["topics"]] == ["shop/orders"]
    assert [(each["name"], each["alive"], each["has_log"]) for each in seen["nodes"]] == [("worker-7", True, False)]
    assert (seen["head"], seen["source"], seen["dropped"]) == (None, "nats", 0)


# From a server.


@contextmanager
def serving(log_path: Path, port: int, *arguments: object) -> Iterator[str]:
    with started("serve", log_path, "--port", port, *arguments) as server:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"]
        server.terminate()
        server.wait(WAIT_S)


def post(port: int, key: str) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", f"/events/{key}", b"x")
    assert connection.getresponse().status == 201
    connection.close()


def test_a_server_shows_its_metrics_and_again_after_a_restart(log_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        with serving(log_path, port) as url:
            top = stack.enter_context(started("top", "--url", url, "--json"))
            frame_with(top, lambda frame: frame["head"] == 0 and not frame["trouble"])
            post(port, "shop/orders")
            stored = frame_with(top, lambda frame: frame["head"] == 1 and frame["topics"])
        lost = frame_with(top, lambda frame: frame["trouble"])
        with serving(log_path, port):
            post(port, "shop/orders")
            back = frame_with(top, lambda frame: frame["head"] == 2 and not frame["trouble"])

    assert stored["source"] == f"http://127.0.0.1:{port}"
    assert [(each["key"], each["events"]) for each in stored["topics"]] == [("shop/orders", 1)]
    assert stored["published"] == 1
    assert stored["dropped"] == 0
    assert stored["delivered_per_s"] is not None
    assert stored["commit_ms"] is None or stored["commit_ms"]["p99"] > 0
    assert lost["trouble"].startswith("reconnecting: ")
    assert lost["head"] == 1  # what was known last
    assert back["published"] == 1  # the server counts from its start


def test_a_server_that_wants_a_token_gets_it_from_a_file(log_path: Path, tmp_path: Path) -> None:
    token, wrong, empty = tmp_path / "token", tmp_path / "wrong", tmp_path / "empty"
    token.write_text("0123456789abcdef0123456789abcdef\nsomething else\n")
    wrong.write_text("fedcba9876543210fedcba9876543210")
    empty.write_text("\n")
    with serving(log_path, free_port(), "--token-file", token) as url:
        done = run("top", "--url", url, "--token-file", token, "--once", "--json")
        refused = [
            run("top", "--url", url, *how, "--once") for how in ((), ("--token-file", wrong), ("--token-file", empty))
        ]

    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["head"] == 0
    for each in refused:
        assert (each.returncode, each.stdout) == (2, b"")
        assert b"token" in each.stderr
        assert b"0123456789abcdef" not in each.stderr
        assert b"fedcba" not in each.stderr


SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
ODD: dict[str, tuple[bytes, int, str]] = {
    "another server": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi",
        2,
        "not a zbus server",
    ),
    "no such page": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", 2, "404"),
    "a reason that would control a terminal": (
        b'HTTP/1.1 403 No\r\n\r\n{"error":{"message":"not \\u001b[2J yours\\n"}}',
        2,
        "403: not  [2J yours",
    ),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", 1, "cannot be reached"),
    "nothing": (b"", 1, "cannot be reached"),
    "a feed that is no JSON": (SSE + b"data: {oops\n\n", 1, "cannot be reached"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_server_that_is_not_ours_is_one_line_on_stderr(name: str) -> None:
    answer, code, said = ODD[name]
    with answering(answer) as url:
        done = run("top", "--url", url, "--once")

    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.count(b"\n") == 1
    assert said in done.stderr.decode()
    assert b"\x1b" not in done.stderr


def test_a_server_that_tells_less_or_more_than_it_should_is_shown_as_far_as_it_goes() -> None:
    odd = {"at": EVIL, "stats": [], "topics": [1, {"key": EVIL}], "nodes": {}, "latency": {"commit_ms": {}}, "new": 1}
    reported = SSE + b": hello\n\nretry: 1000\n\n" + b"data: []\n\n" + b"data: %b\n\n" % json.dumps(odd).encode() * 2
    with answering(reported) as url:
        done = run("top", "--url", url, "--once")

    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert "a\\x1b[2J\\x07\\x9b2J\\u202e\\n[bold]" in text
    assert all(each.isprintable() for each in text.splitlines())


@contextmanager
def answering(answer: bytes, *, hold: bool = False) -> Iterator[str]:
    """A server that says the same to everybody, and closes; or it waits until the other end does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_all() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.settimeout(0.5)
                    while hold:  # until the other end closes
                        with suppress(TimeoutError):
                            if not connection.recv(65536):
                                break
                        connection.sendall(b": keep-alive\n\n")
                    connection.settimeout(None)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(65536)  # so that what was sent is read before it is closed

        thread = threading.Thread(target=answer_all)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "url", ["", "localhost", "ftp://x", "http://", "http://a b", "http://a:99999", "http://[::1", "file:///x"]
)
def test_an_address_that_is_not_an_http_url_is_refused(url: str) -> None:
    with pytest.raises(zbus.ConfigInvalid, match="url"):
        check_url(url)


# On a terminal.


@pytest.mark.parametrize("how", ["q", "ctrl-c", "terminated"])
def test_it_fills_the_terminal_and_leaves_it_as_it_was(log_path: Path, how: str) -> None:
    with zbus.blocking.open(log_path) as bus:
        publisher = bus.publisher("shop/orders/created")
        publisher.publish_many([b"x"] * 1234)
        with Terminal("top", log_path, "--interval", 0.1, rows=24, columns=100) as terminal:
            terminal.wait_for("log head 1,234")
            terminal.wait_for("q quits")
            publisher.publish(b"x")
            terminal.wait_for("log head 1,235")
            terminal.wait_for("shop/orders/created")
            if how == "ctrl-c":
                terminal.press("\x03")
            elif how == "terminated":
                terminal.process.send_signal(signal.SIGTERM)
            else:
                terminal.press(how)
            assert terminal.wait() == 0
            assert termios.tcgetattr(terminal.theirs) == terminal.before
            assert terminal.process.stderr is not None
            assert terminal.process.stderr.read() == b""

    assert b"\x1b[?1049h" in terminal.raw  # a screen of its own,
    assert terminal.raw.endswith((b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))  # and back, with a cursor


def test_it_is_drawn_anew_when_the_terminal_has_another_size() -> None:
    """Also while nothing new comes: after two frames this server says nothing more."""

    def is_narrow(text: str) -> bool:
        frame = text.rpartition("zbus top")[2].split("\r\n")
        return len(frame) == 10 and all(len(each) <= 50 for each in frame)

    reported = SSE + b'data: {"stats": {"log": {"head": 7}}}\n\n' * 2
    with answering(reported, hold=True) as url, Terminal("top", "--url", url, rows=24, columns=100) as terminal:
        terminal.wait_for("log head 7")
        terminal.wait_for(lambda text: text.count("\r\n") >= 46)  # two screens: one before the first values
        size = len(terminal.raw)
        terminal.resize(10, 50)
        shown = terminal.wait_for(is_narrow, since=size)
        terminal.press("q")
        assert terminal.wait() == 0

    assert "log head 7" in shown


def test_what_goes_wrong_later_ends_the_screen_and_is_reported(tmp_path: Path) -> None:
    with answering(b"") as url, Terminal("top", "--url", url) as terminal:
        assert terminal.wait() == 1
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert terminal.process.stderr is not None
        reported = terminal.process.stderr.read()

    assert reported.startswith(b"zbus: http://127.0.0.1:")
    assert reported.count(b"\n") == 1
    assert b"\x1b[?1049l" in terminal.raw


# What is shown.

FULL = Frame(
    at="2026-01-02T03:04:05.678+00:00",
    source=EVIL,
    head=12_345_678_901,
    log_bytes=5 << 40,
    published_per_s=123_456.7,
    delivered_per_s=0.0,
    dropped_per_s=9.0,
    dropped=99,
    subscriptions=3,
    commit_ms=Quantiles(0.5, 1234.5),
    delivery_ms=Quantiles(0.5, 1234.5),
    topics=tuple(KeyRate(f"{EVIL}/{'é' * 200}/{at}", at, at * 1.5) for at in range(200)),
    cursors=tuple(CursorLag(f"{EVIL}{at}", at) for at in range(50)),
    nodes=tuple(NodeSeen(f"{EVIL}{at}", at % 2 == 0, True) for at in range(50)),
    trouble=EVIL,
)


@pytest.mark.parametrize("frame", [FULL, Frame("", "x"), msgspec.structs.replace(FULL, cursors=(), nodes=())])
@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 24), (60, 20), (300, 30), (52, 22)])
def test_a_frame_fits_into_the_terminal_and_never_controls_it(frame: Frame, width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, markup=False)

    rows = console.render_lines(screen(frame, width, height, "q quits"), pad=False)

    assert len(rows) <= height
    for row in rows:
        assert sum(segment.cell_length for segment in row) <= width
        assert all(each.isprintable() for segment in row for each in segment.text)


def test_a_line_is_one_line() -> None:
    text = line(FULL)

    assert text.isprintable()
    assert "head 12,345,678,901; published 123,456.7/s; delivered 0.0/s; dropped 9.0/s" in text
    assert "lag 49 (" in text


def test_of_any_number_of_keys_a_bounded_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_counts, "KEYS_MAX", 10)
    counts = KeyCounts()
    for at in range(50):
        counts.add(f"k/{at}")
    counts.add("k/3")

    found = {topic.key: topic.events for topic in counts.top(100, 1.0)}

    assert counts.seen == 51
    assert sum(found.values()) == 51
    assert found["k/3"] == 2
    assert len(found) == 11
    assert found[OTHERS] == 40


def test_the_busiest_keys_of_the_last_moment_come_first() -> None:
    counts = KeyCounts()
    for _ in range(100):
        counts.add("old")
    assert [(topic.key, topic.events_per_s) for topic in counts.top(5, 2.0)] == [("old", 50.0)]

    for _ in range(80):
        counts.add("new")
    assert [(topic.key, topic.events_per_s) for topic in counts.top(5, 1.0)] == [("new", 80.0), ("old", 25.0)]

    for _ in range(20):
        last = counts.top(5, 1.0)
    assert [(topic.key, topic.events_per_s) for topic in last] == [("old", 0.0), ("new", 0.0)]


# Bad input.

BAD: dict[str, tuple[list[str], str]] = {
    "no source": (["top"], "ZBUS_LOG"),
    "two sources": (["top", "LOG", "--url", "http://127.0.0.1:1"], "only one of"),
    "two others": (["top", "--transport", "nats://127.0.0.1:1", "--url", "http://127.0.0.1:1"], "only one of"),
    "a log that is not there": (["top", "NONE", "--once"], "there is no log"),
    "no address": (["top", "--url", "localhost:7480", "--once"], "http://127.0.0.1:7480"),
    "a token for nobody": (["top", "LOG", "--token-file", "NONE"], "--token-file"),
    "a token that is not there": (["top", "--url", "http://127.0.0.1:1", "--token-file", "NONE"], "No such file"),
    "no interval": (["top", "LOG", "--interval", "0"], "--interval"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(name: str, tmp_path: Path) -> None:
    arguments, named = BAD[name]
    places = {"LOG": str(tmp_path / "app.db"), "NONE": str(tmp_path / "none")}

    done = run(*[places.get(each, each) for each in arguments])

    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"zbus: ")
    assert done.stderr.count(b"\n") == 1
    assert named in done.stderr.decode()
