"""Shows for which platforms pip finds a wheel of every dependency of the core: `make platforms`.

It downloads the wheels into a temporary folder, and neither builds nor installs anything. The platforms of `WAITING`
are shown too, but may lack a wheel. pip evaluates conditions such as `sys_platform == "win32"` for the machine that it
runs on, so a dependency that only another platform has is not checked.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.14")  # the oldest and the newest that are supported

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
    """The result of one download, for a platform and a version of Python."""

    platform: str
    python: str
    found: str
    ok: bool

    @property
    def is_failure(self) -> bool:
        """Whether a platform that must work does not."""
        return not self.ok and self.platform not in WAITING


def requirements() -> list[str]:
    """Return the dependencies of the core."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return found


def command(tags: tuple[str, ...], python: str, folder: str) -> list[str]:
    """Return the command that downloads the dependencies for a platform, and only accepts wheels."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", folder]
    wheels = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return [*pip, *wheels, *[part for tag in tags for part in ("--platform", tag)], *requirements()]


def check(platform: str, python: str) -> Result:
    """Download the dependencies of the core for a platform."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command(PLATFORMS[platform], python, folder), capture_output=True, text=True)
        wheels = [each.stat().st_size for each in Path(folder).iterdir()]
    if not done.returncode:
        return Result(platform, python, f"ok: {len(wheels)} wheels, {sum(wheels) / 1e6:.0f} MB", True)
    lacking = re.search(r"No matching distribution found for (\S+)", done.stderr)
    return Result(platform, python, f"no wheel of {lacking[1]}" if lacking else done.stderr.strip()[-200:], False)


def table(results: list[Result]) -> str:
    """Return the results as lines of text."""
    lines = [f"{'platform':<22} {'python':<8} result"]
    for each in results:
        note = f" (known: {WAITING[each.platform]})" if not each.ok and each.platform in WAITING else ""
        lines.append(f"{each.platform:<22} {each.python:<8} {each.found}{note}")
    return "\n".join(lines)


def main() -> int:
    """Print the table. Returns 1 if a platform that must work lacks a wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="check this version of Python instead")
    wanted = parser.parse_args().python or PYTHONS
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda each: check(*each), [(name, each) for name in PLATFORMS for each in wanted]))
    print(table(results))
    return 1 if any(each.is_failure for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
