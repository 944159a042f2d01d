"""The help is the manual: every command has it, it is printed as it is written, and it costs no library's import."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from reference import commands

from zbus.cli.app import COMMANDS, run

ALL = dict(commands())


def printed(path: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The help of a command, as a user sees it."""
    assert run([*path.split()[1:], "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def without_blanks(text: str) -> str:
    """Text that does not depend on where its lines are wrapped."""
    return "".join(text.split())


def test_all_commands_are_there() -> None:
    own = {f"zbus {name}" for name in ("pub", "sub", "monitor", "top", "nodes", "demo", "bench", "doctor", "log")}
    of_the_log = {f"zbus log {name}" for name in ("stats", "tail", "replay", "verify", "cursors", "prune")}
    jobs = {f"zbus pipeline {name}" for name in ("rollup", "gaps", "coverage", "sessions", "demo")}

    assert {"zbus"} | own | of_the_log | jobs <= set(ALL)


@pytest.mark.parametrize("path", ALL)
def test_every_command_and_every_option_has_help(path: str) -> None:
    command = ALL[path]

    assert command.help
    assert len(command.help) > 20
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{path} {parameter.name} has no help"


@pytest.mark.parametrize("path", ALL)
def test_help_is_printed_as_it_is_written(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ALL[path]
    documented = None if hasattr(command, "list_commands") else command.callback.__doc__

    shown = without_blanks(printed(path, capsys))

    assert without_blanks(documented or command.help) in shown
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            assert without_blanks(parameter.help) in shown


@pytest.mark.parametrize("path", [path for path, command in ALL.items() if hasattr(command, "list_commands")])
def test_a_group_lists_its_commands_with_the_first_sentence_of_each(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = {each.removeprefix(f"{path} "): command for each, command in ALL.items() if each.startswith(f"{path} ")}

    shown = printed(path, capsys).partition("Commands:\n")[2]

    for name, command in listed.items():
        if " " not in name:
            sentence = command.help.partition(".\n")[0].partition(". ")[0].partition("\n\n")[0]
            assert f"{name}{without_blanks(sentence)}" in without_blanks(shown)


IMPORTED = """
import json, sys
from zbus.cli.app import run
code = run(sys.argv[1:])
print(json.dumps([code, *sys.modules]), file=sys.stderr)
"""
SLOW = {"adbc_driver_manager", "nats", "pandas", "pyarrow", "pyspark", "apsw", "sqlalchemy", "starlette"}
SLOW |= {"strawberry", "uvicorn", "zenoh", "zmq"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["pub", "--help"], ["serve", "--help"], ["broker", "--help"]], ids=str
)
def test_help_imports_no_library_that_is_slow_or_optional(arguments: list[str]) -> None:
    command = [sys.executable, "-c", IMPORTED, *arguments]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    code, *modules = json.loads(done.stderr)
    assert code == 0
    assert {name.partition(".")[0] for name in modules} & SLOW == set()
    if arguments == ["--help"]:
        names = [line.split()[0] for line in done.stdout.partition("Commands:\n")[2].splitlines() if line[2] != " "]
        assert {point.name for point in entry_points(group=COMMANDS)} < set(names)
