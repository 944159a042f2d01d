"""`zbus log`: look at a log, check it, and look after it, from another process than its owner."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_processes import Commands

import zbus
from zbus_log.file import sqlite_driver

WAIT_S = 30.0
COMMAND = [sys.executable, "-m", "zbus", "log"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}


call = Commands()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    call.close()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = call("log", *arguments)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def lines(*arguments: object) -> list[dict[str, Any]]:
    """Run a command that succeeds and says nothing on stderr; return its JSON lines."""
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def fill(log_path: Path, events: int, *keys: str) -> None:
    """Events with their number as payload, on each of the keys in turn."""
    with zbus.blocking.open(log_path) as bus:
        publishers = [bus.publisher(key) for key in keys or ("a/b",)]
        for number in range(events):
            publishers[number % len(publishers)].publish(b"%d" % (number + 1))


def acknowledge(log_path: Path, name: str, offset: int) -> None:
    with zbus.blocking.open(log_path, read_only=True) as bus:
        with bus.subscribe("**", durable=name, start="beginning") as subscription:
            for event in subscription:
                if event.offset == offset:
                    subscription.ack(event)
                    return


def damage(log_path: Path, *statements: str) -> None:
    """Change the file as a bad disk would: past the triggers that keep it append-only."""
    connection = sqlite_driver.connect(str(log_path))
    for trigger in ("events_are_not_updated", "events_are_not_deleted"):
        connection.execute(f"DROP TRIGGER {trigger}")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_stats_say_what_a_log_holds_while_its_owner_writes(log_path: Path) -> None:
    before = datetime.now(UTC)
    with zbus.blocking.open(log_path) as bus:
        for key in ("a/b", "a/c"):
            bus.publisher(key).publish_many([b"12345"] * 5000)
        acknowledge(log_path, "billing", 10)

        (metrics,) = lines("stats", log_path, "--json")

    assert metrics["log"] == str(log_path)
    assert (metrics["head"], metrics["low_water"], metrics["events"]) == (10_000, 0, 10_000)
    assert (metrics["payload_bytes"], metrics["keys"], metrics["publishers"]) == (50_000, 2, 2)
    assert metrics["owner_pid"] == os.getpid()
    assert metrics["file_bytes"] > 50_000
    assert 0 <= metrics["sealed_blocks"] <= 3
    first, last = (datetime.fromisoformat(metrics[f"{end}_published_at"]) for end in ("first", "last"))
    assert before - timedelta(milliseconds=1) <= first <= last <= datetime.now(UTC)
    (cursor,) = metrics["cursors"]
    assert (cursor["name"], cursor["offset"], cursor["behind"]) == ("billing", 10, 9990)


def test_stats_count_what_retention_left(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("a/b").publish_many([b"12345"] * 10_000)

    trimmed = lines("prune", log_path, "--max-events", 4000, "--json")
    (metrics,) = lines("stats", log_path, "--json")

    assert trimmed == [{"low_water": 6000, "removed": 6000, "held_by": None}]
    assert (metrics["head"], metrics["low_water"], metrics["events"]) == (10_000, 6000, 4000)
    assert (metrics["payload_bytes"], metrics["owner_pid"]) == (20_000, None)


def test_stats_of_an_empty_log_are_a_table_of_nothing(log_path: Path) -> None:
    fill(log_path, 0)

    done = run("stats", log_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert "head" in done.stdout
    assert "none" in done.stdout


def test_tail_prints_the_last_events_of_some_keys_however_rare(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        rare = bus.publisher("rare/key")
        rare.publish_many([b"r1", b"r2", b"r3"])
        bus.publisher("a/b").publish_many(b"%d" % number for number in range(9000))

    assert [event["payload"] for event in lines("tail", log_path, "-n", 2)] == ["8998", "8999"]
    assert [event["payload"] for event in lines("tail", log_path, "-n", 2, "--key", "rare/*")] == ["r2", "r3"]
    assert len(lines("tail", log_path, "-n", 7, "--key", "rare/*", "--key", "none/**")) == 3


def test_tail_follows_what_the_owner_publishes(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        publisher = bus.publisher("a/b")
        publisher.publish_many([b"1", b"2", b"3"])
        command = [*COMMAND, "tail", str(log_path), "-f", "-n", "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as following:
            assert following.stdout is not None
            seen = [json.loads(following.stdout.readline())["payload"]]
            for number in range(4, 8):
                publisher.publish(b"%d" % number)
                seen.append(json.loads(following.stdout.readline())["payload"])
            following.kill()

    assert seen == ["3", "4", "5", "6", "7"]


def test_replay_prints_a_part_of_the_log_by_key_offset_and_time(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("a/b").publish_many([b"1", b"2"])
        middle = datetime.now(UTC)
        bus.publisher("a/c").publish_many([b"3", b"4"])
        bus.publisher("d/e").publish_many([b"5"])

    def payloads(*options: object) -> list[str]:
        return [event["payload"] for event in lines("replay", log_path, *options)]

    assert payloads() == ["1", "2", "3", "4", "5"]
    assert payloads("--after", 1, "--until", 3) == ["2", "3"]
    assert payloads("--after", middle.isoformat(), "--key", "a/*", "--key", "x/**") == ["3", "4"]
    assert payloads("--until", middle.isoformat(), "--after", "-10m") == ["1", "2"]


def test_a_corrupt_event_ends_a_replay_unless_it_is_to_be_skipped(log_path: Path) -> None:
    fill(log_path, 5)
    damage(log_path, "UPDATE events SET payload = x'00' WHERE offset = 3")

    refused = run("replay", log_path)
    skipped = run("replay", log_path, "--skip-corrupt")

    assert refused.returncode == 1
    assert [json.loads(line)["offset"] for line in refused.stdout.splitlines()] == [1, 2]
    assert refused.stderr.count("\n") == 1
    assert "offset 3" in refused.stderr
    assert skipped.returncode == 0
    assert [json.loads(line)["offset"] for line in skipped.stdout.splitlines()] == [1, 2, 4, 5]
    assert skipped.stderr.startswith("zbus: 1 corrupt event")


def test_verify_finds_nothing_wrong_with_a_whole_log(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("a/b").publish_many([b"x"] * 9000)
        done = run("verify", log_path)

    assert (done.returncode, done.stdout) == (0, "")
    assert "9,000 events" in done.stderr


def test_verify_warns_of_requests_that_an_older_version_left(log_path: Path) -> None:
    fill(log_path, 5)
    left = Path(f"{log_path}-errands")
    left.mkdir()
    (left / "1-1-1-1.rows").touch()

    done = run("verify", log_path)

    assert (done.returncode, done.stdout) == (0, "")
    assert f"{left} holds 1 files with write requests of an older zbus" in done.stderr


def test_verify_lists_every_problem_and_fails(log_path: Path) -> None:
    fill(log_path, 5)
    damage(log_path, "UPDATE events SET payload = x'00' WHERE offset IN (2, 3)", "DELETE FROM events WHERE offset = 4")

    done = run("verify", log_path)

    assert done.returncode == 1
    problems = done.stdout.splitlines()
    for offset in (2, 3, 4):
        assert any(f"{offset}" in problem for problem in problems)
    assert len(problems) == 3


def test_a_loss_is_accepted_once_and_its_offsets_are_never_used_again(log_path: Path) -> None:
    fill(log_path, 5)
    damage(log_path, "DELETE FROM events WHERE offset > 3")

    found = run("verify", log_path)
    with pytest.raises(zbus.LogDamaged, match="accept-loss"):
        fill(log_path, 1)
    accepted = run("verify", log_path, "--accept-loss")

    assert (found.returncode, "offsets 4 to 5" in found.stdout) == (1, True)
    assert (accepted.returncode, accepted.stdout) == (0, "")
    assert "the loss was accepted" in accepted.stderr
    with zbus.blocking.open(log_path) as bus:
        assert bus.publisher("a/b").publish(b"after") > 5


def test_cursors_are_listed_moved_and_forgotten(log_path: Path) -> None:
    fill(log_path, 5, "a/b", "a/c")
    acknowledge(log_path, "billing", 4)

    (cursor,) = lines("cursors", log_path, "--json")
    assert (cursor["name"], cursor["offset"], cursor["behind"]) == ("billing", 4, 1)
    assert (cursor["keys"], cursor["owner"]) == (["**"], None)
    assert "billing" in run("cursors", log_path).stdout

    for target, offset in (("beginning", 0), ("end", 5), ("2", 2)):
        done = run("cursors", log_path, "--reset", "billing", "--to", target, "--yes")
        assert (done.returncode, done.stdout) == (0, "")
        assert f"offset {offset}" in done.stderr
    with zbus.blocking.open(log_path, read_only=True) as bus, bus.subscribe("**", durable="billing") as subscription:
        event = subscription.next(timeout=WAIT_S)
        assert event is not None
        assert event.offset == 3

    assert run("cursors", log_path, "--delete", "billing", "--yes").returncode == 0
    assert lines("cursors", log_path, "--json") == []


def test_a_cursor_that_is_unknown_or_in_use_is_left_alone(log_path: Path) -> None:
    fill(log_path, 5)
    unknown = run("cursors", log_path, "--delete", "nobody", "--yes")
    with zbus.blocking.open(log_path, read_only=True) as bus, bus.subscribe("**", durable="billing"):
        used = run("cursors", log_path, "--reset", "billing", "--to", "beginning", "--yes")

    for done, reason in ((unknown, "no such cursor"), (used, f"process {os.getpid()}")):
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1
        assert reason in done.stderr


def on_a_terminal(answer: bytes, *arguments: object) -> tuple[int, str]:
    """Run a command with a terminal as its stdin, and answer what it asks."""
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    command = [*COMMAND, *map(str, arguments)]
    with subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        os.close(theirs)
        _, errors = process.communicate(timeout=WAIT_S)
    os.close(ours)
    return process.returncode, errors.decode()


def test_on_a_terminal_a_cursor_is_changed_only_after_a_yes(log_path: Path) -> None:
    fill(log_path, 5)
    acknowledge(log_path, "billing", 4)
    offset: Callable[[], int] = lambda: lines("cursors", log_path, "--json")[0]["offset"]  # noqa: E731

    code, asked = on_a_terminal(b"n\n", "cursors", log_path, "--reset", "billing", "--to", "beginning")
    assert code == 1
    assert "billing" in asked
    assert offset() == 4

    assert on_a_terminal(b"y\n", "cursors", log_path, "--reset", "billing", "--to", "2")[0] == 0
    assert offset() == 2
    code, asked = on_a_terminal(b"", "cursors", log_path, "--reset", "billing", "--to", "1", "--yes")
    assert (code, "?" in asked) == (0, False)


def test_without_a_terminal_a_cursor_is_changed_only_with_yes(log_path: Path) -> None:
    fill(log_path, 5)
    acknowledge(log_path, "billing", 4)
    for change in (("--delete", "billing"), ("--reset", "billing", "--to", "end")):
        done = run("cursors", log_path, *change)
        assert done.returncode == 2
        assert "give --yes" in done.stderr

    assert lines("cursors", log_path, "--json")[0]["offset"] == 4


def test_one_event_is_not_called_events(log_path: Path) -> None:
    fill(log_path, 1)

    assert ": 1 event up to offset 1, " in run("verify", log_path).stderr


def test_retention_stops_at_a_durable_name_and_says_so(log_path: Path) -> None:
    fill(log_path, 20)
    acknowledge(log_path, "billing", 6)

    held = run("prune", log_path, "--max-events", 5)
    assert held.returncode == 0
    assert "removed 6 events" in held.stderr
    assert "'billing'" in held.stderr
    assert lines("replay", log_path)[0]["offset"] == 7

    (passed,) = lines("prune", log_path, "--max-events", 5, "--ignore-cursors", "--json")
    assert passed == {"low_water": 15, "removed": 9, "held_by": None}
    assert [event["offset"] for event in lines("replay", log_path)] == [16, 17, 18, 19, 20]


def test_retention_by_age_and_size_removes_the_oldest(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        week_ns = 7 * 86_400 * 10**9
        old = [zbus.Event(1, number, time.time_ns() - week_ns, "a/b", b"old") for number in range(10)]
        bus.put(*old)
        bus.publisher("a/b").publish_many([bytes(10_000)] * 400)

    (by_age,) = lines("prune", log_path, "--max-age", "1d", "--json")
    (by_size,) = lines("prune", log_path, "--max-bytes", "2M", "--json")

    assert (by_age["removed"], by_age["low_water"]) == (10, 10)
    assert 100 < by_size["removed"] < 400
    (metrics,) = lines("stats", log_path, "--json")
    assert metrics["events"] == 400 - by_size["removed"]


def test_a_log_that_a_bus_owns_is_trimmed_by_that_bus(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        bus.publisher("a/b").publish_many([b"x"] * 50)
        done = run("prune", log_path, "--max-events", 20)
        assert bus.publisher("a/b").publish(b"x") == 51

    assert (done.returncode, done.stdout) == (0, "")
    assert "removed 30 events; the log now starts after offset 30" in done.stderr
    assert [event["offset"] for event in lines("replay", log_path)] == list(range(31, 52))


def test_retention_up_to_an_offset_stops_at_a_durable_name(log_path: Path) -> None:
    fill(log_path, 20)
    acknowledge(log_path, "billing", 6)

    (held,) = lines("prune", log_path, "--until", 10, "--json")
    (passed,) = lines("prune", log_path, "--until", 10, "--ignore-cursors", "--json")
    (beyond,) = lines("prune", log_path, "--until", 1000, "--ignore-cursors", "--json")

    assert held == {"low_water": 6, "removed": 6, "held_by": "billing"}
    assert passed == {"low_water": 10, "removed": 4, "held_by": None}
    assert beyond == {"low_water": 20, "removed": 10, "held_by": None}
