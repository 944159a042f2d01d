"""The command line, as a process: data to stdout, prose to stderr, exit codes 0, 1 and 2, and never a traceback."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_processes import Commands

import zbus
from zbus.cli.java import JAVA_INSTALL
from zbus.cli.render.values import parse_age, parse_position, parse_size, parse_start
from zbus_log.file import sqlite_driver

WAIT_S = 30.0
COMMAND = [sys.executable, "-m", "zbus"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}
run = Commands()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    run.close()


def lines(*arguments: object, stdin: bytes = b"") -> list[dict[str, Any]]:
    """Run a command that succeeds and says nothing on stderr; return its JSON lines."""
    done = run(*arguments, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def start() -> Iterator[Any]:
    """Start a command that goes on; whatever happens, it ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        started.append(subprocess.Popen([*COMMAND, *map(str, arguments)], env=ENVIRONMENT, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def publish(log_path: Path, *payloads: bytes) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("a/b").publish_many(payloads)


@pytest.mark.parametrize("command", [COMMAND, [str(Path(sys.executable).with_name("zbus"))]])
def test_the_command_has_the_version_of_the_library(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, timeout=WAIT_S, env=ENVIRONMENT, check=True)

    assert (done.stdout.decode(), done.stderr) == (f"zbus {zbus.__version__}\n", b"")


def test_a_log_can_be_given_as_a_url(log_path: Path) -> None:
    url = f"sqlite://{log_path}"

    (stored,) = lines("pub", "a/b", "1", "--log", url)
    (event,) = lines("sub", "a/*", "--log", url, "--from", "beginning", "--count", 1)
    (watched,) = lines("monitor", "a/*", "--log", url, "--from", "beginning", "--count", 1)
    (frame,) = lines("top", url, "--once", "--json")
    (state,) = lines("log", "stats", url, "--json")

    assert stored["offset"] == event["offset"] == watched["offset"] == frame["head"] == state["head"] == 1
    assert log_path.is_file()


def test_pub_prints_where_the_event_is_stored_and_sub_prints_the_event(log_path: Path) -> None:
    (stored,) = lines("pub", "shop/orders/created", '{"id": 1}', "--log", log_path, "--header", "x=a=b")

    (event,) = lines("sub", "shop/*/created", "--log", log_path, "--from", "beginning", "--count", 1)

    assert stored == {"offset": 1, "publisher_id": event["publisher_id"], "sequence": 0}
    assert list(event) == [
        *("offset", "key", "publisher_id", "sequence", "published_at", "published_ns", "headers", "payload")
    ]
    assert (event["offset"], event["key"], event["payload"]) == (1, "shop/orders/created", '{"id": 1}')
    assert event["headers"] == {"x": "a=b", "content-type": "application/json"}
    published = datetime.fromisoformat(event["published_at"])
    assert published.tzinfo is not None
    assert event["published_ns"] // 1000 == int(published.timestamp()) * 1_000_000 + published.microsecond


@pytest.mark.parametrize("dash", [[], ["-"]])
def test_pub_reads_a_payload_of_any_bytes_from_stdin(log_path: Path, dash: list[str]) -> None:
    lines("pub", "a/b", *dash, "--log", log_path, stdin=b"\xff\x00\n")

    (event,) = lines("sub", "a/b", "--log", log_path, "--from", "beginning", "--count", 1)

    assert "payload" not in event
    assert event["payload_base64"] == "/wAK"


def test_pub_names_the_type_of_a_json_object_or_array_and_of_nothing_else(log_path: Path) -> None:
    for payload in ('{"id": 1}', "[1]", "5", "{bad", "text"):
        lines("pub", "a/b", payload, "--log", log_path)
    lines("pub", "a/b", "{}", "--log", log_path, "--header", "content-type=text/plain")
    lines("pub", "a/b", "--lines", "--log", log_path, stdin=b'{"id": 2}\nx\n[]\n')

    with zbus.blocking.open(log_path, read_only=True) as bus:
        found = [event.decode() for event in bus.replay("**")]

    assert found == [{"id": 1}, [1], b"5", b"{bad", b"text", "{}", {"id": 2}, b"x", []]


def test_a_transport_has_no_history_to_start_from() -> None:
    for option in (["--from", "beginning"], ["--durable", "x"]):
        done = run("sub", "a/**", "--transport", "zmq://", *option)

        assert done.returncode == 2
        assert "a transport has no history: read a log with --log" in str(done.stderr)


def test_pub_takes_the_log_from_the_environment(log_path: Path) -> None:
    assert run("pub", "a/b", "x", ZBUS_LOG=str(log_path)).returncode == 0
    assert log_path.is_file()


def test_each_line_of_stdin_becomes_an_event_as_it_comes(log_path: Path, start: Any) -> None:
    publishing = start("pub", "a/b", "--lines", "--log", log_path, stdin=subprocess.PIPE)
    for number, line in enumerate((b"one\n", b"\n", b"three\r\n")):
        publishing.stdin.write(line)
        publishing.stdin.flush()
        stored = json.loads(publishing.stdout.readline())  # before the next line is written
        assert (stored["offset"], stored["sequence"]) == (number + 1, number)
    output, errors = publishing.communicate(b"no line end", timeout=WAIT_S)

    assert (publishing.returncode, errors, json.loads(output)["offset"]) == (0, b"", 4)
    found = lines("sub", "a/b", "--log", log_path, "--from", 1, "--count", 4)
    assert [event["payload"] for event in found] == ["one", "", "three", "no line end"]


def test_many_lines_keep_their_order(log_path: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_bytes(b"".join(b"%d\n" % number for number in range(20_000)))
    with (tmp_path / "lines.txt").open("rb") as file:
        command = [*COMMAND, "pub", "a/b", "--lines", "--log", str(log_path)]
        done = subprocess.run(command, stdin=file, capture_output=True, timeout=WAIT_S, env=ENVIRONMENT, check=True)

    assert [json.loads(line)["offset"] for line in done.stdout.splitlines()] == list(range(1, 20_001))
    with zbus.blocking.open(log_path, read_only=True) as bus:
        assert [event.payload for event in bus.replay("**")] == [b"%d" % number for number in range(20_000)]


def test_sub_starts_at_the_position_of_from(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        publisher = bus.publisher("a/b")
        publisher.publish_many([b"1", b"2"])
        moment = datetime.now(UTC)
        publisher.publish_many([b"3", b"4"])

    expected = {"-10m": ["1", "2", "3", "4"], "4": ["4"], moment.isoformat(): ["3", "4"]}
    for begin, payloads in expected.items():
        found = lines("sub", "a/b", "--log", log_path, "--from", begin, "--count", len(payloads))
        assert [event["payload"] for event in found] == payloads
    assert lines("sub", "a/b", "--log", log_path, "--from", "new", "--timeout", 0.3) == []


def test_sub_prints_events_as_the_owner_of_the_log_publishes_them(log_path: Path, start: Any) -> None:
    with zbus.blocking.open(log_path) as bus:
        publisher = bus.publisher("a/b")
        publisher.publish(b"0")
        subscribed = start("sub", "a/**", "--log", log_path, "--from", "beginning", "--count", 300)
        assert json.loads(subscribed.stdout.readline())["payload"] == "0"
        for number in range(1, 100):
            publisher.publish(b"%d" % number)
            bus.publisher("c/d").publish(b"not asked for")
        publisher.publish_many(b"%d" % number for number in range(100, 300))
        output, errors = subscribed.communicate(timeout=WAIT_S)

    assert (subscribed.returncode, errors) == (0, b"")
    found = [json.loads(line)["payload"] for line in output.splitlines()]
    assert found == [str(number) for number in range(1, 300)]


def test_a_durable_name_resumes_after_the_last_event_that_was_printed(log_path: Path) -> None:
    publish(log_path, b"1", b"2", b"3", b"4", b"5")
    common = ("sub", "a/b", "--log", log_path, "--durable", "printer", "--from", "beginning")

    assert [event["payload"] for event in lines(*common, "--count", 2)] == ["1", "2"]
    assert [event["payload"] for event in lines(*common, "--count", 3)] == ["3", "4", "5"]
    with zbus.blocking.open(log_path, read_only=True) as bus, bus.subscribe("a/b", durable="printer") as subscription:
        with pytest.raises(TimeoutError):
            subscription.next(timeout=0.2)


def test_a_durable_name_does_not_acknowledge_events_that_were_not_received(log_path: Path, start: Any) -> None:
    publish(log_path, b"1")
    common = ("sub", "a/b", "--log", log_path, "--durable", "printer", "--from", "beginning")
    no_responders, gone = os.pipe()
    os.close(no_responders)
    done = start(*common, stdout=gone)
    os.close(gone)

    assert done.wait(WAIT_S) == 0
    assert [event["payload"] for event in lines(*common, "--count", 1)] == ["1"]


def test_a_count_that_is_not_reached_in_time_is_an_error(log_path: Path) -> None:
    publish(log_path, b"x")

    done = run("sub", "a/b", "--log", log_path, "--from", "beginning", "--count", 2, "--timeout", 1.5)

    assert done.returncode == 1
    assert done.stderr == b"zbus: 1 of 2 events arrived within 1.5 s\n"
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("command", [["sub", "a/**", "--from", "beginning", "--log"], ["log", "tail", "--follow"]])
def test_ctrl_c_ends_a_subscription_quietly(log_path: Path, start: Any, command: list[str]) -> None:
    publish(log_path, b"x")
    waiting = start(*command, log_path)
    assert waiting.stdout.readline()

    for _ in range(3):  # people press it more than once
        waiting.send_signal(signal.SIGINT)

    assert waiting.communicate(timeout=WAIT_S) == (b"", b"")
    assert waiting.returncode == 0


@pytest.mark.parametrize("command", [["sub", "a/**", "--from", "beginning", "--log"], ["log", "tail", "--follow"]])
def test_a_reader_that_goes_away_ends_a_subscription_quietly(log_path: Path, start: Any, command: list[str]) -> None:
    publish(log_path, b"x")
    waiting = start(*command, log_path)
    assert waiting.stdout.readline()

    waiting.stdout.close()  # and no further event ever comes

    assert waiting.wait(WAIT_S) == 0
    assert waiting.stderr.read() == b""


def test_ctrl_c_ends_publishing_that_waits_for_lines(log_path: Path, start: Any) -> None:
    publishing = start("pub", "a/b", "--lines", "--log", log_path, stdin=subprocess.PIPE)
    publishing.stdin.write(b"1\n")
    publishing.stdin.flush()
    assert publishing.stdout.readline()

    publishing.send_signal(signal.SIGINT)

    assert publishing.wait(WAIT_S) == 130
    assert publishing.stderr.read() == b""


def test_on_a_terminal_events_are_readable_and_cannot_control_it(log_path: Path, start: Any) -> None:
    with zbus.blocking.open(log_path) as bus:
        publisher = bus.publisher("shop/orders/created")
        publisher.publish_many([b"caf\xc3\xa9 [red]x[/]", b"\x1b[2Jgone\x07", b"\xff\xfe", b"y" * 5000])
    ours, theirs = pty.openpty()
    subscribed = start("sub", "**", "--log", log_path, "--from", "beginning", "--count", 4, stdout=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        pass  # the other end is closed
    os.close(ours)

    assert subscribed.wait(WAIT_S) == 0
    text = shown.decode()
    assert "shop/orders/created" in text
    assert "café [red]x[/]" in text
    assert "\\x1b[2Jgone\\x07" in text
    assert "\x1b[2J" not in text
    assert "ff fe" in text
    assert "(5,000 bytes)" in text
    assert "\x1b[" in text  # colours


def test_a_log_that_another_process_owns_is_not_published_to(log_path: Path) -> None:
    with zbus.blocking.open(log_path):
        done = run("pub", "a/b", "x", "--log", log_path)

    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert f"process {os.getpid()}" in done.stderr.decode()


def test_bench_measures_this_machine(tmp_path: Path) -> None:
    (metrics,) = lines("bench", tmp_path, "--seconds", 1, "--json")

    measured = [name for name in metrics if name.endswith(("_per_s", "_p50", "_p99"))]
    assert len(measured) == 6
    assert all(metrics[name] > 0 for name in measured)
    assert list(tmp_path.iterdir()) == []


def test_bench_prints_a_table(tmp_path: Path) -> None:
    done = run("bench", tmp_path, "--seconds", 0.5)

    assert (done.returncode, done.stderr) == (0, b"")
    assert len(re.findall(r"[\d,]+ (?:/s|µs)", done.stdout.decode())) == 6


def test_doctor_reports_versions_the_disk_and_what_is_missing(tmp_path: Path) -> None:
    (found,) = lines("doctor", tmp_path, "--json")

    assert found["zbus"] == zbus.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"eclipse-zenoh", "msgspec", "pydantic", "apsw", "sqlalchemy", "typer"} <= found["libraries"].keys()
    assert all(found["libraries"].values())
    assert found["sqlite"]["ok"]
    assert found["sqlite"]["version"]
    assert 0 < found["fsync"]["us_p50"] <= found["fsync"]["us_p99"]
    assert found["open_files"]["soft"] != 0
    assert found["java"]["ok"]
    assert found["java"]["version"] >= 17
    assert {"nats", "zmq", "web", "spark"} <= found["extras"].keys()
    assert {"starlette", "sse-starlette", "uvicorn", "strawberry-graphql"} <= found["extras"]["web"]["libraries"].keys()
    for extra, parts in found["extras"].items():
        assert parts["install"] == f"pip install 'zbus-mesh[{extra}]'"
        assert set(parts["missing"]) == {name for name, version in parts["libraries"].items() if version is None}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("durability", "survives"), [("fsync", "power loss"), ("os", "a crash of the process")])
def test_doctor_shows_what_a_log_in_the_folder_promises(tmp_path: Path, durability: str, survives: str) -> None:
    found = json.loads(run("doctor", tmp_path, "--json", ZBUS_DURABILITY=durability).stdout)
    table = run("doctor", tmp_path, ZBUS_DURABILITY=durability).stdout.decode()

    assert found["sqlite"]["promise"] == {
        "durability": survives,
        "writers": "one",
        "dense": True,
        "identities": "as long as its event, then 7 days",
        "atomic_events": None,
    }
    for line in ("guarantees of a log here", f"events survive {survives}", "one writer, offsets without gaps"):
        assert line in table


def test_doctor_prints_the_exact_line_that_installs_what_is_missing(tmp_path: Path) -> None:
    (found,) = lines("doctor", tmp_path, "--json")
    table = run("doctor", tmp_path).stdout.decode()

    for parts in found["extras"].values():
        assert (parts["install"] in table) == bool(parts["missing"])


JAVAS = {
    "no Java": ("", None, "missing"),
    "a Java that is too old": ('openjdk version "11.0.2" 2019-01-15', 11, "11, too old"),
    "a Java of the old way to count": ('java version "1.8.0_292"', 8, "8, too old"),
    "something else": ("hello", None, "missing"),
}


@pytest.mark.parametrize("case", JAVAS)
def test_doctor_tells_what_installs_the_java_that_spark_needs(tmp_path: Path, case: str) -> None:
    reported, version, shown = JAVAS[case]
    java = tmp_path / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    if reported:
        java.write_text(f"#!/bin/sh\necho '{reported}' >&2\n")
        java.chmod(0o755)
    home = {"JAVA_HOME": str(tmp_path / "home")}

    done = run("doctor", tmp_path, "--json", **home)
    table = run("doctor", tmp_path, **home).stdout.decode()

    assert done.returncode == 0  # only the extra spark needs it
    assert json.loads(done.stdout)["java"] == {"version": version, "ok": False, "install": JAVA_INSTALL}
    (line,) = [line for line in table.splitlines() if "Java" in line]
    assert shown in line
    assert JAVA_INSTALL in line


WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None  # as if it were not installed
from zbus.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("library", "command", "extra"),
    [("pyspark", ["pipeline", "rollup", "app.db", "--json"], "spark"), ("starlette", ["serve", "app.db"], "web")],
)
def test_a_command_without_its_library_prints_the_exact_line_that_installs_it(
    library: str, command: list[str], extra: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, library, *command], capture_output=True, text=True, timeout=60
    )

    reported = f"zbus: {command[0]}: it needs {library}, which is missing: pip install 'zbus-mesh[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", reported)


def test_doctor_finds_a_wrong_configuration(tmp_path: Path) -> None:
    done = run("doctor", tmp_path, "--json", ZBUS_DURABILITY="perhaps")

    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["configuration"]["ok"]
    assert "ZBUS_DURABILITY" in found["configuration"]["reason"]


def test_a_command_of_another_package_that_lacks_a_library_says_so(tmp_path: Path) -> None:
    about = tmp_path / "other-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[zbus.commands]\nother = no_such_library.cli:app\n")

    def fresh(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=WAIT_S, env=environment, check=False)

    done, listed = fresh("other", "--anything"), fresh("--help")

    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"no_such_library" in done.stderr
    assert listed.returncode == 0
    assert b"no_such_library" in listed.stdout


# Each: the arguments ('LOG' is a log that is there, 'NONE' one that is not), and what the one line must name.
BAD = {
    "no command": ([], "--help"),
    "no such command": (["publish"], "publish"),
    "no such option": (["--loud"], "--loud"),
    "pub: no key": (["pub"], "KEY"),
    "pub: a wildcard": (["pub", "a/*", "x", "--log", "LOG"], "a/*"),
    "pub: an empty segment": (["pub", "a//b", "x", "--log", "LOG"], "a//b"),
    "pub: a line break in the key": (["pub", "a\nb", "x", "--log", "LOG"], "rejected"),
    "pub: no log": (["pub", "a/b", "x"], "ZBUS_LOG"),
    "pub: no folder": (["pub", "a/b", "x", "--log", "/no/such/folder/app.db"], "/no/such/folder"),
    "pub: a header without a value": (["pub", "a/b", "x", "--log", "LOG", "--header", "x"], "NAME=VALUE"),
    "pub: a header in upper case": (["pub", "a/b", "x", "--log", "LOG", "--header", "X=1"], "'X'"),
    "pub: lines and a payload": (["pub", "a/b", "x", "--lines", "--log", "LOG"], "--lines"),
    "pub: one payload too many": (["pub", "a/b", "x", "y", "--log", "LOG"], "y"),
    "sub: no expression": (["sub", "--log", "LOG"], "EXPR"),
    "sub: half a wildcard": (["sub", "a/b*", "--log", "LOG"], "a/b*"),
    "sub: no log": (["sub", "a/b"], "ZBUS_LOG"),
    "sub: a log that is not there": (["sub", "a/b", "--log", "NONE"], "there is no log"),
    "sub: a start that is none": (["sub", "a/b", "--log", "LOG", "--from", "yesterday"], "yesterday"),
    "sub: an offset that is too large": (["sub", "a/b", "--log", "LOG", "--from", "9" * 30], "offset"),
    "sub: a time before time": (["sub", "a/b", "--log", "LOG", "--from", "1066-10-14"], "1066"),
    "sub: no count": (["sub", "a/b", "--log", "LOG", "--count", "0"], "--count"),
    "sub: no number": (["sub", "a/b", "--log", "LOG", "--timeout", "soon"], "--timeout"),
    "bench: no folder": (["bench", "/no/such/folder"], "/no/such/folder"),
    "bench: no time": (["bench", "--seconds", "0"], "--seconds"),
    "doctor: no folder": (["doctor", "/no/such/folder"], "/no/such/folder"),
    "doctor: a file": (["doctor", "LOG"], "LOG"),
    "log: no command": (["log"], "zbus log --help"),
    "log: no such command": (["log", "burn"], "burn"),
    "log stats: no log": (["log", "stats"], "LOG"),
    "log stats: a log that is not there": (["log", "stats", "NONE"], "there is no log"),
    "log stats: no such option": (["log", "stats", "LOG", "--all"], "--all"),
    "log tail: a log that is not there": (["log", "tail", "NONE"], "there is no log"),
    "log tail: fewer than none": (["log", "tail", "LOG", "-n", "-1"], "-n"),
    "log tail: a key that is none": (["log", "tail", "LOG", "--key", "a//b"], "a//b"),
    "log replay: a log that is not there": (["log", "replay", "NONE"], "there is no log"),
    "log replay: a key that is none": (["log", "replay", "LOG", "--key", "*a"], "*a"),
    "log replay: a position that is none": (["log", "replay", "LOG", "--after", "x"], "--after"),
    "log replay: an end of time": (["log", "replay", "LOG", "--until", "9999-01-01"], "9999"),
    "log verify: a log that is not there": (["log", "verify", "NONE"], "there is no log"),
    "log verify: accepting the loss of no log": (["log", "verify", "NONE", "--accept-loss"], "there is no log"),
    "log cursors: a log that is not there": (["log", "cursors", "NONE"], "there is no log"),
    "log cursors: a reset to nowhere": (["log", "cursors", "LOG", "--reset", "x"], "--to"),
    "log cursors: nothing to reset": (["log", "cursors", "LOG", "--to", "end"], "--reset"),
    "log cursors: a position that is none": (["log", "cursors", "LOG", "--reset", "x", "--to", "-1"], "'-1'"),
    "log cursors: beyond the head": (["log", "cursors", "LOG", "--reset", "x", "--to", "2"], "head"),
    "log cursors: both at once": (["log", "cursors", "LOG", "--reset", "x", "--to", "1", "--delete", "x"], "both"),
    "log prune: a log that is not there": (["log", "prune", "NONE", "--max-events", "1"], "there is no log"),
    "log prune: no rule": (["log", "prune", "LOG"], "--max-age"),
    "log prune: an age that is none": (["log", "prune", "LOG", "--max-age", "7 years"], "7 years"),
    "log prune: a size that is none": (["log", "prune", "LOG", "--max-bytes", "much"], "much"),
    "log prune: fewer than none": (["log", "prune", "LOG", "--max-events", "-1"], "--max-events"),
    "demo: no such fault": (["demo", "--fault", "fire"], "fire"),
    "demo: too long": (["demo", "--seconds", "60"], "--seconds"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bad")
    publish(folder / "LOG", b"x")
    return {"LOG": str(folder / "LOG"), "NONE": str(folder / "NONE")}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(name: str, places: dict[str, str]) -> None:
    arguments, named = BAD[name]

    done = run(*[places.get(each, each) for each in arguments])

    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"zbus: ")
    assert done.stderr.count(b"\n") == 1
    assert named in done.stderr.decode()


def test_a_wrong_variable_is_named_in_one_line(log_path: Path) -> None:
    done = run("pub", "a/b", "x", "--log", log_path, ZBUS_DURABILITY="perhaps")

    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"ZBUS_DURABILITY" in done.stderr


@pytest.mark.parametrize("what", ["folder", "text", "database"])
def test_a_file_that_is_no_log_is_one_line_and_never_a_traceback(tmp_path: Path, what: str) -> None:
    path = tmp_path / "app.db"
    if what == "folder":
        path.mkdir()
    elif what == "text":
        path.write_text("hello\n" * 1000)
    else:
        with closing(sqlite_driver.connect(path)) as connection:
            connection.execute("CREATE TABLE somebody_elses (x)")

    for command in (["pub", "a/b", "x", "--log"], ["sub", "a/b", "--timeout", "1", "--log"]):
        done = run(*command, path)
        assert done.returncode in (1, 2)
        assert done.stdout == b""
        assert done.stderr.startswith(b"zbus: ")
        assert done.stderr.count(b"\n") == 1
        assert str(path) in done.stderr.decode()


def test_values_are_read_as_people_write_them() -> None:
    assert parse_age("90s") == 90
    assert parse_size("1G") == 1 << 30
    assert parse_size("500000") == 500_000
    assert parse_start("new") == "new"
    assert parse_position("2026-01-02T03:04:05Z") == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    age = parse_position("-1h")
    assert isinstance(age, datetime)
    assert 3599 < (datetime.now(UTC) - age).total_seconds() < 3700
    for parse, text in (
        (parse_age, "7"),
        (parse_age, "-1d"),
        (parse_size, "-1"),
        (parse_size, "9e9"),
        (parse_size, ""),
    ):
        with pytest.raises(typer.BadParameter):
            parse(text)
