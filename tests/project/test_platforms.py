"""Platforms other than the one that the tests run on: macOS, Windows, and the wheels of `make platforms`."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import platforms
import pytest
from log_support import append, opened

from zbus.ports.log import Row
from zbus.util.atomic_file import fsync, sync, write_atomically
from zbus_log.backup.flushing import Flushing
from zbus_log.file.database import make_engine

ROOT = Path(__file__).parents[2]
CODE = ("zbus", "store", "adapters")
FULL_FSYNC = 51  # its number on macOS
FAKE_WINDOWS = str(ROOT / "tests" / "support" / "fake_windows.py")
WITHOUT_LOG = """
import asyncio, zbus

async def main():
    async with zbus.open() as bus, bus.subscribe("shop/**") as sub:
        await (await bus.publisher("shop/orders")).publish({"id": 1})
        print((await anext(sub)).payload.decode())

asyncio.run(main())
"""
WITH_LOG = """
import asyncio, zbus

async def main():
    async with zbus.open("app.db"):
        pass

try:
    asyncio.run(main())
except zbus.ConfigInvalid as error:
    print(error)
"""


class MacOs:
    """The calls that macOS gets to write a file to disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.plain, self.error = 0, 0, 0
        self._fsync = os.fsync
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_FSYNC, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", self._fcntl)
        monkeypatch.setattr(os, "fsync", self._plain)
        monkeypatch.delattr(os, "fdatasync")

    def _fcntl(self, descriptor: int, command: int, *_: object) -> int:
        assert command == FULL_FSYNC
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self._fsync(descriptor)
        self.full += 1
        return 0

    def _plain(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self.plain += 1


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> MacOs:
    return MacOs(monkeypatch)


def on_windows(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}
    return subprocess.run(
        [sys.executable, FAKE_WINDOWS, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_macos_gets_a_full_fsync_for_files_folders_and_atomic_writes(macos: MacOs, tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"1", tmp_path / ".a", durable=True)  # the file and its folder
    sync(tmp_path / "a")

    assert (macos.full, macos.plain) == (3, 0)


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_of_macos_without_full_fsync_gets_a_plain_one(macos: MacOs, tmp_path: Path, number: int) -> None:
    macos.error = number

    with (tmp_path / "a").open("wb") as file:
        fsync(file.fileno())

    assert (macos.full, macos.plain) == (0, 1)


def test_a_full_fsync_that_fails_is_an_error(macos: MacOs, tmp_path: Path) -> None:
    macos.error = errno.EIO

    with (tmp_path / "a").open("wb") as file, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        fsync(file.fileno())

    assert macos.plain == 0


@pytest.mark.parametrize("read_only", [False, True])
def test_sqlite_uses_full_fsync_on_macos(macos: MacOs, tmp_path: Path, read_only: bool) -> None:
    path = str(tmp_path / "app.db")
    make_engine(path).connect().close()
    engine = make_engine(path, read_only=read_only)

    with engine.connect() as connection:
        found = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("fullfsync", "checkpoint_fullfsync")
        ]
    engine.dispose()

    assert found == [1, 1]


def test_sqlite_does_not_use_full_fsync_elsewhere(tmp_path: Path) -> None:
    with make_engine(str(tmp_path / "app.db")).connect() as connection:
        assert connection.exec_driver_sql("PRAGMA fullfsync").scalar() == 0


def test_a_log_on_macos_never_uses_a_plain_fsync(macos: MacOs, tmp_path: Path) -> None:
    with opened(tmp_path / "app.db") as log:
        append(log, [Row(1, 0, 1, "a", b"x")])

    assert macos.full > 0
    assert macos.plain == 0


def test_a_copy_is_flushed_on_macos_which_has_no_fdatasync(macos: MacOs, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    with Flushing(str(path)) as flushing:
        for _ in range(3):
            flushing.written()

    assert macos.plain > 0


def calls_of_fsync() -> Iterator[str]:
    for path in sorted(each for folder in CODE for each in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("fsync", "fdatasync"):
                yield str(path.relative_to(ROOT))


def test_only_one_function_writes_files_to_disk() -> None:
    """`os.fsync` is not enough on macOS. A part of a copy is flushed early, and synced again at the end."""
    assert set(calls_of_fsync()) == {"zbus/util/atomic_file.py", "store/zbus_log/backup/flushing.py"}


def test_a_bus_without_a_log_works_on_windows(tmp_path: Path) -> None:
    done = on_windows("-c", WITHOUT_LOG, folder=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, '{"id":1}\n', "")


def test_a_log_is_refused_on_windows_with_one_line_that_says_what_is_supported(tmp_path: Path) -> None:
    done = on_windows("-c", WITH_LOG, folder=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("log: a log needs Linux or macOS")
    assert done.stdout.count("\n") == 1
    assert "pip install" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_prints_its_help_on_windows(tmp_path: Path) -> None:
    for arguments in (["--help"], ["pub", "--help"], ["top", "--help"], ["doctor", "--help"], ["sim", "--help"]):
        done = on_windows("-m", "zbus", *arguments, folder=tmp_path)

        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Usage: zbus")


@pytest.mark.parametrize(
    "arguments", [["log", "stats", "app.db"], ["pub", "a/b", "x", "--log", "app.db"], ["pipeline", "rollup", "app.db"]]
)
def test_a_command_that_needs_a_log_is_refused_with_one_line_on_windows(tmp_path: Path, arguments: list[str]) -> None:
    done = on_windows("-m", "zbus", *arguments, folder=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("zbus: log: a log needs Linux or macOS")
    assert done.stderr.count("\n") == 1
    assert "pip install" not in done.stderr


def test_doctor_says_on_windows_that_a_log_does_not_work_there(tmp_path: Path) -> None:
    done = on_windows("-m", "zbus", "doctor", "--json", folder=tmp_path)

    assert (done.returncode, done.stderr) == (1, "")
    assert "a log needs Linux or macOS" in done.stdout


def test_a_command_that_runs_until_it_is_stopped_works_on_windows(tmp_path: Path) -> None:
    code = "import asyncio; from zbus.cli.serving import serve; serve(asyncio.sleep(0.01)); print('served')"
    done = on_windows("-c", code, folder=tmp_path)

    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr


def test_looking_for_a_process_does_not_end_it_on_windows(tmp_path: Path) -> None:
    done = on_windows(
        "-c", "from zbus.util.process import is_alive; import os; print(is_alive(os.getpid()))", folder=tmp_path
    )

    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_part_that_needs_a_module_of_posix_names_no_extra_on_windows(tmp_path: Path) -> None:
    code = WITH_LOG.replace('zbus.open("app.db")', 'zbus.open(transport="zmq://", wire="dynamo")')
    done = on_windows("-c", code, folder=tmp_path)

    assert "needs fcntl, which Python does not have on this platform" in done.stdout, done.stderr
    assert "pip install" not in done.stdout


def imported_in(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix == ".md":
        return set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    return set(re.findall(r"^\s*(?:import|from) (?:\w+, )*(\w+)", text, re.MULTILINE))


def test_nothing_uses_a_second_sqlite_library() -> None:
    """Two of them in one process would end each other's locks. Spark's ADBC is used in processes of its own."""
    files = [
        path
        for folder in (*CODE, "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md") and path != Path(__file__)
    ]
    found = {str(path.relative_to(ROOT)): imported_in(path) for path in [*files, ROOT / "README.md"]}

    assert len(found) > 500
    assert [path for path, names in found.items() if names & {"sqlite3", "pysqlite3", "aiosqlite"}] == []
    assert [path for path, names in found.items() if "adbc_driver_sqlite" in names] == ["store/zbus_spark/local.py"]


def test_make_platforms_covers_the_tags_of_each_platform() -> None:
    needed = {"manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64", "macosx_11_0_arm64"}
    tags = {tag for some in platforms.PLATFORMS.values() for tag in some}
    command = platforms.command(("macosx_11_0_arm64",), "3.11", "folder")

    assert needed <= tags
    assert {"download", "--only-binary=:all:", "macosx_11_0_arm64"} <= set(command)
    assert set(platforms.requirements()) <= set(command)


@pytest.mark.parametrize(
    ("lacking", "code"), [((), 0), (("Linux arm64",), 1), (("Alpine x86_64 (musl)",), 0)], ids=["none", "arm64", "musl"]
)
def test_make_platforms_fails_if_a_supported_platform_lacks_a_wheel(
    lacking: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tags = {platforms.PLATFORMS[each][0] for each in lacking}

    def download(command: list[str], **_: Any) -> Any:
        if tags & set(command):
            return SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found for apsw>=3.51.3\n")
        Path(command[command.index("--dest") + 1], "apsw.whl").write_bytes(bytes(1_000_000))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(sys, "argv", ["platforms.py", "--python", "3.11"])

    assert platforms.main() == code
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(platforms.PLATFORMS)
    for line in printed[1:]:
        expected = "no wheel of apsw>=3.51.3" if line.startswith(lacking or "-") else "ok: 1 wheels, 1 MB"
        assert expected in line
