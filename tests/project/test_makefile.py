"""The Makefile: what it installs, for which command, and what it says where it may not install anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

JAVA = "openjdk-17-jre-headless"
BROWSER = "chromium fonts-liberation prometheus"
PURPOSES = {
    "java": "Spark needs Java 17 or later",
    "chromium": "the tests run the console in Chromium",
    "promtool": "promtool checks the metrics",
}


def make(*arguments: str, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run make; with `path`, on a machine that has only the programs in that folder."""
    program = shutil.which("make")
    assert program is not None
    environment = None if path is None else {"PATH": str(path), "HOME": str(path)}
    return subprocess.run([program, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def machine(folder: Path, user: str, **programs: str) -> Path:
    """A folder of programs, each a line of shell."""
    for name, line in {"id": f"echo {user}", **programs}.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def look_for(target: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a target that looks for programs, without installing anything into the environment."""
    return make("--old-file=.venv/.ready", target, f"BIN={Path(sys.executable).parent}", path=path)


MACHINES = {
    "root": ("0", {"apt-get"}, True),
    "a user who may": ("1000", {"apt-get", "sudo"}, True),
    "a user who may not": ("1000", {"apt-get"}, False),
    "another system": ("0", set(), False),
}


@pytest.mark.parametrize("case", MACHINES)
@pytest.mark.parametrize(
    ("target", "packages", "purposes"),
    [
        ("java", JAVA, ["java"]),
        ("browser", BROWSER, ["chromium", "promtool"]),
        ("system", f"{JAVA} {BROWSER}", ["java", "chromium", "promtool"]),
    ],
)
def test_all_programs_that_are_missing_are_installed_at_once_or_named_in_one_message(
    target: str, packages: str, purposes: list[str], case: str, tmp_path: Path
) -> None:
    user, tools, may = MACHINES[case]
    called = tmp_path / "called"
    scripts = {"apt-get": f'echo "$@" >> {called}', "sudo": 'shift; "$@"'}

    done = look_for(target, machine(tmp_path, user, **{name: scripts[name] for name in tools}))

    assert (done.returncode == 0) == may
    if may:
        assert called.read_text().splitlines() == ["update -qq", f"install -y -qq --no-install-recommends {packages}"]
    else:
        assert not called.exists()
        reasons = "; ".join(PURPOSES[each] for each in purposes)
        reported = f"{reasons}. Install the missing packages: sudo apt-get install -y {packages}"
        assert done.stderr.splitlines()[0] == reported


@pytest.mark.parametrize(
    ("there", "packages"),
    [
        (["java"], BROWSER),
        (["java", "chromium"], "prometheus"),
        (["promtool"], f"{JAVA} chromium fonts-liberation"),
        (["java", "chromium", "promtool"], None),
    ],
    ids=str,
)
def test_programs_that_are_there_are_not_requested(there: list[str], packages: str | None, tmp_path: Path) -> None:
    scripts = {"java": """echo 'openjdk version "21.0.1"' >&2""", "chromium": "", "promtool": ""}

    done = look_for("system", machine(tmp_path, "0", **{name: scripts[name] for name in there}))

    assert (done.returncode == 0) == (packages is None)
    if packages is not None:
        assert done.stderr.splitlines()[0].endswith(f"sudo apt-get install -y {packages}")


def test_the_tests_and_the_benchmarks_look_for_all_programs_first() -> None:
    for target in ("test", "bench"):
        shown = make("-n", "--old-file=.venv/.ready", target).stdout

        assert "case system in java | system)" in shown


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A copy of the project in which nothing is installed."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-demo.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_demo_installs_only_what_it_needs_and_says_how_much_that_is(fresh: Path) -> None:
    shown = make("-n", "demo", cwd=fresh).stdout

    assert "--require-hashes -r requirements-demo.lock" in shown
    assert "MB of packages downloaded" in shown
    assert "requirements.lock" not in shown


def test_the_tests_complete_the_environment_of_the_demo_and_the_demo_then_uses_it(fresh: Path) -> None:
    (fresh / ".venv").mkdir()
    (fresh / ".venv" / ".ready-demo").touch()

    assert "requirements" not in make("-n", "demo", cwd=fresh).stdout
    assert "--require-hashes -r requirements.lock" in make("-n", "test", cwd=fresh).stdout

    (fresh / ".venv" / ".ready").touch()
    (fresh / ".venv" / ".ready-demo").unlink()

    assert "requirements" not in make("-n", "demo", cwd=fresh).stdout
