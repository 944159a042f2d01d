"""Commands in the environment of an application: the `ZBUS_…` variables of its log and its bus are not theirs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bridge_support import command
from cli_processes import Commands
from free_ports import free_port

from zbus import blocking

# What an application that names its log in its code may have in its environment.
OF_THE_LOG = {
    "ZBUS_RETAIN_AGE_S": "86400",
    "ZBUS_RETAIN_EVENTS": "5",
    "ZBUS_COLD_DIR": "/no/such/tier",
    "ZBUS_KEEP": "shop/**",
    "ZBUS_ACCEPT_LOSS": "true",
}
OF_THE_BUS = {"ZBUS_SESSION_SECRET_FILE": "/no/such/file", "ZBUS_RECEIVE_ON": "nats", "ZBUS_PENDING_BYTES_MAX": "1"}
run = Commands()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    run.close()


@pytest.fixture
def filled(log_path: Path) -> Path:
    with blocking.open(log_path) as bus:
        bus.publisher("shop/orders").publish(b"x")
    return log_path


def test_a_router_starts_whatever_the_settings_of_the_application_are() -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    environment = OF_THE_LOG | OF_THE_BUS | {"ZBUS_CONFIG": "/no/such/file", "ZBUS_LOG": "/no/such/folder/app.db"}

    with command("router", "--listen", endpoint, **environment) as running:
        assert running.line()["listen"] == [endpoint]
        assert running.end(signal.SIGTERM) == 0


def test_a_bridge_without_a_log_starts_whatever_the_settings_of_the_application_are(tmp_path: Path) -> None:
    between = [f"zmq://?registry={tmp_path}/{name}" for name in ("a", "b")]
    environment = OF_THE_LOG | OF_THE_BUS | {"ZBUS_CONFIG": "/no/such/file", "ZBUS_LOG": "/no/such/folder/app.db"}

    with command("bridge", "--between", *between, "--keys", "shop/**", **environment) as running:
        assert [each["durable"] for each in running.line()["bridges"]] == [False]
        assert running.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("given", ["option", "variable"])
def test_nodes_are_found_whatever_the_log_of_the_application_is(given: str, tmp_path: Path) -> None:
    url = f"zmq://?registry={tmp_path}"
    options = ["--transport", url] if given == "option" else []
    network = {"ZBUS_TRANSPORTS": "nats://127.0.0.1:1"} if given == "option" else {"ZBUS_TRANSPORT": url}
    environment = OF_THE_LOG | OF_THE_BUS | network | {"ZBUS_LOG": "/no/such/folder/app.db"}

    with blocking.open(transport=url, node="worker-7"):
        done = run("nodes", "--json", *options, **environment)

    assert (done.returncode, done.stderr) == (0, b"")
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == ["worker-7"]


def test_events_go_to_a_transport_whatever_the_log_of_the_application_is(tmp_path: Path) -> None:
    url = f"zmq://?registry={tmp_path}"

    with blocking.open(transport=url) as bus, bus.subscribe("shop/**") as subscription:
        done = run("pub", "shop/orders", "hello", "--transport", url, **OF_THE_LOG, **OF_THE_BUS)

        assert (done.returncode, done.stderr) == (0, b"")
        assert next(subscription).payload == b"hello"


READERS = {
    "sub": ["sub", "**", "--from", "beginning", "--count", 1, "--log", "LOG"],
    "monitor": ["monitor", "**", "--from", "beginning", "--count", 1, "--log", "LOG"],
    "log tail": ["log", "tail", "LOG"],
    "log replay": ["log", "replay", "LOG"],
    "top": ["top", "LOG", "--once", "--json", "--interval", 0.1],
}


@pytest.mark.parametrize("name", READERS)
def test_a_log_is_read_whatever_its_owner_keeps_and_wherever_its_events_go(name: str, filled: Path) -> None:
    owner = {"ZBUS_KEEP": "shop/**", "ZBUS_WIRE": "dynamo", "ZBUS_MODE": "peer", "ZBUS_LISTEN": "tcp/127.0.0.1:1"}

    done = run(*[str(filled) if each == "LOG" else each for each in READERS[name]], **owner, **OF_THE_BUS)

    assert (done.returncode, done.stderr) == (0, b"")
    assert (str(filled) if name == "top" else "shop/orders") in done.stdout.decode()


@pytest.mark.parametrize("name", ["sub", "top"])
def test_a_log_that_only_the_file_of_settings_names_is_read_beside_its_owner(name: str, filled: Path) -> None:
    file = filled.with_name("zbus.toml")
    file.write_text(f"log = '{filled}'\n")
    arguments = [each for each in READERS[name] if each not in ("--log", "LOG")]

    with blocking.open(filled):
        done = run(*arguments, ZBUS_CONFIG=str(file))

    assert (done.returncode, done.stderr) == (0, b"")
    assert (str(filled) if name == "top" else "shop/orders") in done.stdout.decode()


def test_doctor_does_not_blame_sqlite_for_a_cold_tier(tmp_path: Path) -> None:
    found = json.loads(run("doctor", tmp_path, "--json", ZBUS_COLD_DIR="/no/such/tier", ZBUS_LOG="app.db").stdout)

    assert found["sqlite"]["ok"], found["sqlite"]["reason"]


def test_bench_measures_whatever_the_settings_of_the_application_are(tmp_path: Path) -> None:
    done = run("bench", tmp_path, "--seconds", 0.1, "--json", **OF_THE_LOG, **OF_THE_BUS, ZBUS_LOG="app.db")

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_schema_is_registered_whatever_the_owner_of_the_log_does(filled: Path) -> None:
    file = filled.with_name("order.json")
    file.write_text('{"type": "object"}')

    done = run("schema", "register", filled, "shop/orders", file, **OF_THE_LOG, **OF_THE_BUS, ZBUS_TRANSPORT="nats")

    assert (done.returncode, done.stderr) == (0, b"")
