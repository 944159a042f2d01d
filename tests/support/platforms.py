"""Shows for which platforms pip finds a wheel of every dependency of the core: `make platforms`.

Nothing is installed or built. The platforms of `WAITING` are shown too, but may lack a wheel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

# A system accepts the wheels of all tags in its list.
PLATFORMS = {
    "Linux x86_64": ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"),
    "Linux arm64": ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"),
    "macOS arm64": ("macosx_11_0_arm64",),
    "macOS x86_64": ("macosx_11_0_x86_64", "macosx_10_13_x86_64", "macosx_10_12_x86_64", "macosx_10_9_x86_64"),
    "Windows x86_64": ("win_amd64",),
    "Alpine x86_64 (musl)": ("musllinux_1_2_x86_64", "musllinux_1_1_x86_64"),
}
WAITING = {"Alpine x86_64 (musl)": "eclipse-zenoh has no wheels for it"}


class Result(NamedTuple):
    """What pip found for a platform and a Python: the number of wheels, or what is missing."""

    platform: str
    python: str
    wheels: int
    problem: str

    @property
    def is_failure(self) -> bool:
        """Whether a platform that must work does not."""
        return bool(self.problem) and self.platform not in WAITING


def requirements() -> list[str]:
    """Return the dependencies of the core."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return found


def command(tags: tuple[str, ...], python: str, report: Path) -> list[str]:
    """Return the command that resolves the dependencies for a platform from wheels only, and downloads nothing."""
    wheels = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    # Without a target, pip refuses to resolve for another platform than this one.
    target = ["--dry-run", "--ignore-installed", "--target", str(report.parent / "none"), "--report", str(report)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return [*pip, *wheels, *target, *[part for tag in tags for part in ("--platform", tag)], *requirements()]


def check(platform: str, python: str) -> Result:
    """Resolve the dependencies of the core for a platform."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(command(PLATFORMS[platform], python, report), capture_output=True, text=True)
        if done.returncode:
            lacking = re.search(r"No matching distribution found for (\S+)", done.stderr)
            return Result(platform, python, 0, f"no wheel of {lacking[1]}" if lacking else done.stderr.strip()[-200:])
        return Result(platform, python, len(json.loads(report.read_text())["install"]), "")


def table(results: list[Result]) -> str:
    """Return the results as lines of text."""
    lines = [f"{'platform':<22} {'python':<8} result"]
    for each in results:
        found = f"ok: {each.wheels} wheels" if not each.problem else each.problem
        note = f" (known: {WAITING[each.platform]})" if each.problem and each.platform in WAITING else ""
        lines.append(f"{each.platform:<22} {each.python:<8} {found}{note}")
    return "\n".join(lines)


def main() -> int:
    """Print the table. Returns 1 if a platform that must work lacks a wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", choices=PYTHONS, help="check only this version of Python")
    wanted = parser.parse_args().python or PYTHONS
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda each: check(*each), [(name, each) for name in PLATFORMS for each in wanted]))
    print(table(results))
    return 1 if any(each.is_failure for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
