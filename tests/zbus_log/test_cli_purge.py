"""`zbus log purge`: it shows what it would remove, and removes it after two confirmations."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_processes import Commands
from cold_support import epoch_of, write_segment
from log_support import ask, opened
from terminal_support import Terminal

import zbus
from zbus_log import Cold

call = Commands()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    call.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    with zbus.blocking.open(path) as bus:
        for key in ("shop/orders", "telemetry/cpu", "telemetry/disk"):
            bus.publisher(key).publish_many([b"x"] * 10)
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = call("log", *arguments)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def count(log: Path) -> int:
    return int(ask(log, "SELECT count(*) FROM events"))


KEY = ("--key", "telemetry/**")


def test_without_a_terminal_both_confirmations_must_be_given(log: Path) -> None:
    for given, wanted in (
        ((), "give --yes"),
        (("--key-again", "telemetry/**"), "give --yes"),
        (("--yes",), "give --key-again"),
        (("--yes", "--key-again", "telemetry/*"), "not the same as --key"),
        (("--yes", "--key-again", "telemetry/**", "--key-again", "shop/**"), "not the same as --key"),
    ):
        done = run("purge", log, *KEY, *given)
        assert done.returncode == 2, given
        assert wanted in " ".join(done.stderr.split())
    assert count(log) == 30

    done = run("purge", log, *KEY, "--yes", "--key-again", "telemetry/**")

    assert (done.returncode, done.stdout) == (0, "")
    assert [line for line in done.stderr.splitlines() if not line.startswith("LOG_PURGED")] == [
        "20 events in the log at the offsets 11 to 30",
        "removed 20 events up to offset 30",
    ]
    assert count(log) == 10


def test_on_a_terminal_the_expressions_must_be_typed_again(log: Path) -> None:
    with Terminal("log", "purge", log, *KEY) as terminal:
        terminal.press("n\n")
        assert terminal.wait() == 1
    with Terminal("log", "purge", log, *KEY) as terminal:
        terminal.press("y\ntelemetry/*\n")
        assert terminal.wait() == 2
    assert count(log) == 30
    with Terminal("log", "purge", log, *KEY, "--key", "shop/*") as terminal:
        terminal.press("y\nshop/* telemetry/**\n")
        assert terminal.wait() == 0
    assert count(log) == 0


def test_it_names_subscriptions_that_miss_events_and_the_cold_tier(log: Path) -> None:
    with opened(log) as owner:
        owner.cursors.claim("billing", ["**"], 15)
        owner.cursors.claim("orders", ["shop/**"], 0)
    tier = Cold(f"{log}-cold")
    tier.add([write_segment(log, tier.folder, 1, 12)], epoch_of(log))
    tier.close()

    done = run("purge", log, *KEY, "--yes", "--key-again", "telemetry/**", "--json")

    assert json.loads(done.stdout) == {
        "removed": 20,
        "until": 30,
        "unacknowledged": ["billing"],
        "offloaded_until": 12,
    }
    assert "durable 'billing' has not acknowledged all of them" in done.stderr
    assert "the cold tier has the events up to offset 12: nothing is removed from it" in done.stderr
    assert "orders" not in done.stderr


def test_nothing_to_remove_needs_no_confirmation(log: Path) -> None:
    done = run("purge", log, "--key", "nothing/here")

    assert (done.returncode, done.stderr.splitlines()) == (0, ["0 events in the log", "nothing was removed"])


def test_wrong_arguments_are_usage_errors(log: Path, tmp_path: Path) -> None:
    assert run("purge", log).returncode == 2
    assert run("purge", log, "--key", "a//b", "--yes", "--key-again", "a//b").returncode == 2
    assert run("purge", tmp_path / "none.db", *KEY).returncode == 2


def test_the_statistics_show_purges_and_verify_counts_them(log: Path) -> None:
    run("purge", log, *KEY, "--yes", "--key-again", "telemetry/**")

    values = json.loads(run("stats", log, "--json").stdout)
    (purge,) = values["purges"]
    assert (purge["keys"], purge["until"], purge["events"]) == (["telemetry/**"], 30, 20)
    assert purge["started_at"] <= purge["finished_at"]
    assert (values["events"], values["head"], values["keys"]) == (10, 30, 2)  # the newest key stays
    assert "20 events up to 30 of telemetry/**" in " ".join(run("stats", log).stdout.split())
    assert "10 events up to offset 30, 20 removed, no problems" in run("verify", log).stderr
