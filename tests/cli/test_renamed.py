"""Retired commands and options are usage errors that name the replacement, and help does not list them."""

from __future__ import annotations

import pytest
import typer

import zbus
import zbus_log
from zbus.bridge.config import BridgeConfig
from zbus.cli.app import app, run
from zbus.cli.renamed import COMMANDS, OPTIONS, VALUES

RETIRED_OPTIONS = [(path, old, new) for path, names in OPTIONS.items() for old, new in names.items()]


def test_the_table_has_every_retired_spelling() -> None:
    assert COMMANDS == {"zbus log retain": "zbus log prune"}
    assert set(RETIRED_OPTIONS) == {
        ("zbus", "--records", "--logging"),
        ("zbus", "--records-level", "--logging-level"),
        ("zbus monitor", "--records", "--system-events"),
        ("zbus bridge", "--retain-age", "--max-age"),
        ("zbus bridge", "--retain-size", "--max-bytes"),
        ("zbus bridge", "--report-s", "--report-interval"),
        ("zbus broker", "--report-s", "--report-interval"),
        ("zbus broker", "--stall-s", "--stall-timeout"),
        ("zbus serve", "--host-name", "--allowed-host"),
        ("zbus log prune", "--age", "--max-age"),
        ("zbus log prune", "--bytes", "--max-bytes"),
        ("zbus log prune", "--events", "--max-events"),
        ("zbus log prune", "--upto", "--until"),
        ("zbus log prune", "--past-cursors", "--ignore-cursors"),
        ("zbus schema check", "--number", "--limit"),
        ("zbus pipeline offload", "--keep-age", "--max-age"),
        ("zbus pipeline offload", "--keep-events", "--max-events"),
    }


@pytest.mark.parametrize(("path", "old", "new"), RETIRED_OPTIONS)
@pytest.mark.parametrize("joined", [False, True])
def test_a_retired_option_is_a_usage_error_that_names_the_new_one(
    path: str, old: str, new: str, joined: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [f"{old}=1"] if joined else [old, "1"]

    code = run([*path.split()[1:], *given])

    shown = capfd.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err == f"zbus: No such option: {old}: renamed: use {new}; see: {path} --help\n"


@pytest.mark.parametrize(("old", "new"), COMMANDS.items())
def test_a_retired_command_is_a_usage_error_that_names_the_new_one(
    old: str, new: str, capfd: pytest.CaptureFixture[str]
) -> None:
    group, _, name = old.rpartition(" ")

    code = run([*old.split()[1:], "app.db", "--age", "7d"])

    shown = capfd.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err == f"zbus: No such command {name!r}: renamed: use {new}; see: {group} --help\n"


@pytest.mark.parametrize("path", OPTIONS)
def test_help_lists_the_new_options_and_not_the_retired_ones(path: str) -> None:
    command = typer.main.get_command(app)
    for name in path.split()[1:]:
        command = command.get_command(command.context_class(command), name)  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}

    assert set(OPTIONS[path].values()) <= options
    assert set(OPTIONS[path]) & options == set()


def test_the_command_line_and_the_bridge_know_the_same_retired_directions() -> None:
    assert {"zbus bridge": {"--direction": BridgeConfig.renamed_directions}} == VALUES
    assert BridgeConfig.renamed_directions == {"forth": "forward", "back": "reverse"}


@pytest.mark.parametrize(("old", "new"), BridgeConfig.renamed_directions.items())
def test_a_retired_direction_is_a_usage_error_that_names_the_new_one(
    old: str, new: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run(["bridge", "--direction", old])

    assert code == 2
    assert capfd.readouterr().err == (
        f"zbus: Invalid value for '--direction': '{old}' is not one of 'both', 'forward', 'reverse'; "
        f"{old} was renamed: use {new}; see: zbus bridge --help\n"
    )


def test_another_wrong_direction_has_no_hint(capfd: pytest.CaptureFixture[str]) -> None:
    run(["bridge", "--direction", "north"])

    assert "'reverse'; see: zbus bridge --help" in capfd.readouterr().err


@pytest.mark.parametrize(("old", "new"), BridgeConfig.renamed_directions.items())
def test_a_bridge_with_a_retired_direction_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(zbus.ConfigInvalid) as caught:
        zbus.Bridge(("nats://127.0.0.1:4222", "zmq://"), ["a"], direction=old)  # type: ignore[arg-type]

    assert str(caught.value) == f"direction: {old} was renamed: use {new}"


def test_a_retired_function_is_an_error_that_names_the_new_one() -> None:
    with pytest.raises(AttributeError, match="no attribute 'retain'; renamed: use prune"):
        _ = zbus_log.retain
