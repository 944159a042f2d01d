"""`zbus monitor`, as a process: filters, full payloads, schemas, records, and a terminal that stays as it is."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_processes import Commands
from nats_support import NatsServer, nats_server
from terminal_support import COMMAND, ENVIRONMENT, WAIT_S, Terminal

import zbus
from zbus.cli.render.dump import dump, hex_lines
from zbus.observe.records import EVENT_RETRY
from zbus.observe.records import record as zbus_record

run = Commands()

ORDER = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    run.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven events: by two publishers, with and without headers, of every kind of payload."""
    path = tmp_path_factory.mktemp("monitor") / "app.db"
    with zbus.blocking.open(path) as bus:
        bus.schemas.register("shop/*/created", ORDER, mode="permissive")
        orders, other = bus.publisher("shop/orders/created"), bus.publisher("audit/login")
        orders.publish({"id": 1}, headers={"tenant": "red"})
        orders.publish({"id": "two", "why": "a cat"}, headers={"tenant": "blue"})
        other.publish("Cat\x1b[2J\x07 \u202e[bold]x[/]", headers={"tenant": "red", "evil": "\x9b2J"})
        other.publish(bytes(range(20)) + b"\xff")
        other.publish(b"")
        other.publish("x" * 5000)
        other.publish(b'{"big": 12345678901234567890123, "twice": 1, "twice": 1.50}')
    return path


def monitor(log: Path, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    done: subprocess.CompletedProcess[bytes] = run("monitor", "--log", log, "--from", "beginning", *arguments)
    return done


def offsets(log: Path, *arguments: object, count: int) -> list[int]:
    """The offsets of the first that are shown."""
    done = monitor(log, *arguments, "--count", count)
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line)["offset"] for line in done.stdout.splitlines()]


def shown(log: Path, *arguments: object, count: int) -> str:
    """The text of the first that are shown."""
    done = monitor(log, *arguments, "--count", count)
    assert (done.returncode, done.stderr) == (0, b"")
    return str(done.stdout.decode())


def test_piped_it_prints_json_lines_of_every_key(log: Path) -> None:
    done = monitor(log, "--count", 7)

    assert (done.returncode, done.stderr) == (0, b"")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["offset"] for each in found] == [1, 2, 3, 4, 5, 6, 7]
    assert found[0]["payload"] == '{"id":1}'
    assert found[3]["payload_base64"]
    assert b"\x1b" not in done.stdout


def test_it_shows_the_keys_that_are_requested(log: Path) -> None:
    assert offsets(log, "shop/**", count=2) == [1, 2]
    assert offsets(log, "audit/*", count=5) == [3, 4, 5, 6, 7]
    assert offsets(log, "shop/**", "audit/login", count=7) == [1, 2, 3, 4, 5, 6, 7]


def test_it_filters_by_header_publisher_and_payload(log: Path) -> None:
    with zbus.blocking.open(log, read_only=True) as bus:
        first = next(bus.replay("shop/**"))
        last = next(bus.replay("audit/**"))

    lines = {
        ("--header", "tenant=red"): [1, 3],
        ("--header", "Tenant"): [1, 2, 3],
        ("--header", "tenant=red", "--header", "evil"): [3],
        ("--publisher", str(first.publisher_id)): [1, 2],
        ("--publisher", hex(last.publisher_id)): [3, 4, 5, 6, 7],
        ("--grep", "cat"): [2],
        ("--grep", "(?i)cat"): [2, 3],
        ("--grep", "^x+$"): [6],
        ("--header", "tenant=red", "--grep", "Cat"): [3],
        ("--publisher", str(first.publisher_id), "--publisher", str(last.publisher_id), "--grep", "1"): [1, 7],
    }
    for filters, expected in lines.items():
        assert offsets(log, *filters, count=len(expected)) == expected, filters


def test_what_does_not_pass_is_neither_shown_nor_counted(log: Path) -> None:
    done = monitor(log, "--header", "tenant=green", "--count", 1, "--timeout", 1.5)

    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"zbus: 0 of 1 events arrived within 1.5 s\n"


def test_json_lines_tell_whether_a_payload_fits_its_schema(log: Path) -> None:
    done = monitor(log, "--count", 3)

    fits, does_not, has_none = [json.loads(line).get("schema") for line in done.stdout.splitlines()]
    assert fits == {"expression": "shop/*/created", "version": 1, "valid": True}
    assert does_not["valid"] is False
    assert "two" in does_not["reason"] or "integer" in does_not["reason"]
    assert has_none is None


def test_the_payloads_of_some_keys_are_dumped_in_full_and_others_are_a_line_each(log: Path) -> None:
    text = shown(log, "--dump", "shop/**", count=7)

    head, publisher, *body = text.splitlines()[:5]
    assert head.endswith("shop/orders/created content-type=application/json tenant=red [valid: shop/*/created v1]")
    assert publisher.startswith("  publisher ")
    assert publisher.endswith(" sequence 0, 8 bytes")
    assert body == ["  {", '    "id": 1', "  }"]
    assert "[invalid: shop/*/created v1: " in text
    (login,) = [line for line in text.splitlines() if "audit/login" in line and "Cat" in line]
    assert "Cat\\x1b[2J\\x07 \\u202e[bold]x[/]" in login
    assert "(5,000 bytes)" in text
    assert "x" * 401 not in text


def test_a_dump_is_json_as_it_was_written_or_text_or_hex(log: Path) -> None:
    text = shown(log, "audit/**", "--dump", "audit/login", "--dump", "nobody/**", count=5)

    assert "  Cat\\x1b[2J\\x07 \\u202e[bold]x[/]\n" in text
    assert "  00000000  00 01 02 03 04 05 06 07  08 09 0a 0b 0c 0d 0e 0f  |................|\n" in text
    assert "  00000010  10 11 12 13 ff                                    |.....|\n" in text
    assert "  (empty)\n" in text
    assert "  " + "x" * 5000 + "\n" in text
    assert '    "big": 12345678901234567890123,\n    "twice": 1,\n    "twice": 1.50\n' in text
    assert all(each.isprintable() or each == "\n" for each in text)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"[]", ["[]"]),
        (b'{"a":', ['{"a":']),
        (b"[1] and more", ["[1] and more"]),
        (b"7", ["7"]),
        (b"two\nlines\r\n", ["two", "lines\\r"]),
        (b"tab\there", ["tab\\there"]),
        (b"a\0b", ["00000000  61 00 62                                          |a.b|"]),
        (b"[" * 100_000, None),
        ('{"\u202e":"\u2028"}'.encode(), ["{", '  "\\u202e": "\\u2028"', "}"]),
    ],
    ids=ascii,
)
def test_whatever_is_dumped_no_line_controls_a_terminal(payload: bytes, expected: list[str] | None) -> None:
    found = list(dump(payload))

    assert all(line.isprintable() for line in found)
    if expected is not None:
        assert found == expected


def test_a_hex_dump_holds_every_byte() -> None:
    data = bytes(range(256)) * 3 + b"end"

    assert b"".join(bytes.fromhex(line[10:58]) for line in hex_lines(data)) == data


def test_it_follows_the_owner_of_the_log_and_learns_of_new_schemas(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("a/b").publish({"id": 1})
        command = [*COMMAND, "monitor", "--log", str(log_path), "--from", "beginning"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as monitoring:
            assert monitoring.stdout is not None
            assert "schema" not in json.loads(monitoring.stdout.readline())
            bus.schemas.register("a/*", ORDER)
            publisher, reported = bus.publisher("a/b"), None
            while reported is None:  # it looks for schemas every few seconds; a pytest timeout ends what never comes
                publisher.publish({"id": 2})
                reported = json.loads(monitoring.stdout.readline()).get("schema")
            monitoring.terminate()
            assert monitoring.wait(WAIT_S) == 0
            assert monitoring.stderr is not None
            assert monitoring.stderr.read() == b""

    assert reported == {"expression": "a/*", "version": 1, "valid": True}


def test_on_a_terminal_it_is_readable_cannot_be_controlled_and_ends_with_ctrl_c(log: Path) -> None:
    with Terminal("monitor", "--log", log, "--from", "beginning", "--dump", "audit/*", columns=200) as terminal:
        text = terminal.wait_for('"twice": 1.50')
        assert terminal.stop(signal.SIGINT) == 0

    assert "Cat\\x1b[2J\\x07" in text
    assert b"\x1b[2J" not in terminal.raw
    assert b"\x07" not in terminal.raw
    assert "\x9b".encode() not in terminal.raw
    assert b"\x1b[32m" in terminal.raw or b"\x1b[1;32m" in terminal.raw  # colours


def test_a_reader_that_goes_away_ends_it_quietly(log: Path) -> None:
    command = [*COMMAND, "monitor", "--log", str(log), "--from", "beginning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as monitoring:
        assert monitoring.stdout is not None
        assert monitoring.stderr is not None
        assert monitoring.stdout.readline()
        monitoring.stdout.close()

        assert monitoring.wait(WAIT_S) == 0
        assert monitoring.stderr.read() == b""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as running:
        yield running


async def test_records_of_other_nodes_are_shown_beside_their_events(server: NatsServer) -> None:
    """Filters are for events: a record passes all of them, and counts for nothing."""
    arguments = ["monitor", "shop/**", "--transport", server.url, "--system-events", "--grep", "hello", "--count", "1"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "zbus", *arguments, env=ENVIRONMENT, stdout=pipe, stderr=pipe
    )
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        async with zbus.open(transport=server.url, system_events="info") as bus:
            publisher = await bus.publisher("shop/orders")
            first = asyncio.create_task(process.stdout.readline())
            while not first.done():  # it takes a moment until it listens
                await publisher.publish(b"not this one")
                zbus_record(EVENT_RETRY, reason="a test")
                await asyncio.sleep(0.05)
            record = json.loads(first.result())
            await publisher.publish(b"hello")
            rest, stderr = await process.communicate()
    found = [json.loads(line) for line in rest.splitlines()]

    assert process.returncode == 0, stderr.decode()
    assert record["key"].startswith("@zbus/record/")
    assert [each["payload"] for each in found if not each["key"].startswith("@zbus/")] == ["hello"]


BAD: dict[str, tuple[list[str], str]] = {
    "no source": (["monitor", "**"], "ZBUS_LOG"),
    "two sources": (["monitor", "--log", "LOG", "--transport", "nats://127.0.0.1:1"], "not both"),
    "a log that is not there": (["monitor", "--log", "NONE"], "there is no log"),
    "half a wildcard": (["monitor", "a*", "--log", "LOG"], "a*"),
    "half a wildcard to dump": (["monitor", "--dump", "a*", "--log", "LOG"], "a*"),
    "no regular expression": (["monitor", "--log", "LOG", "--grep", "("], "regular expression"),
    "no publisher": (["monitor", "--log", "LOG", "--publisher", "me"], "publisher"),
    "no header": (["monitor", "--log", "LOG", "--header", "=x"], "header"),
    "no start": (["monitor", "--log", "LOG", "--from", "soon"], "soon"),
    "records of a log": (["monitor", "--log", "LOG", "--system-events"], "--transport"),
    "a dump in JSON": (["monitor", "--log", "LOG", "--json", "--dump", "**"], "--dump"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(name: str, log: Path) -> None:
    arguments, named = BAD[name]
    places: dict[str, Any] = {"LOG": str(log), "NONE": str(log.with_name("none.db"))}

    done = run(*[places.get(each, each) for each in arguments])

    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"zbus: ")
    assert done.stderr.count(b"\n") == 1
    assert named in done.stderr.decode()
