"""How much do a subscription, `import zbus` and an idle bus cost?

Each measurement runs in fresh processes. The peers: bare zenoh subscribers with the default
callback; `import nats`; a bare zenoh session with a bare SQLite file. The targets are absolute.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _harness import (
    Measurement,
    Row,
    Sizes,
    alternate,
    compare,
    folder,
    run_one,
    sqlite_versions,
    zbus_versions,
    zenoh_versions,
)

CHILD = Path(__file__).with_name("_child.py")
CHILD_S = 60.0
TARGET_SUBSCRIPTIONS_MB, TARGET_IMPORT_MS, TARGET_IDLE_MB = 10.0, 150.0, 25.0


def rows(sizes: Sizes) -> list[Row]:
    """Measure the three rows."""
    return [_subscriptions(sizes), _import(sizes), _idle(sizes)]


def child(task: str, argument: object) -> dict[str, Any]:
    """Run a task in a fresh interpreter and return its result."""
    command = [sys.executable, str(CHILD), task, str(argument)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{task} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _subscriptions(sizes: Sizes) -> Row:
    many, some = sizes.of(10_000, 2000), sizes.of(1000, 200)
    return compare(
        "footprint",
        "memory per 1,000 subscriptions",
        unit="MB",
        peer_name="zenoh, default callback",
        rounds=alternate(
            sizes.of(3, 1),
            lambda: Measurement(child("zbus-subscriptions", many)["mb_per_1000"]),
            lambda: Measurement(child("zenoh-subscriptions", some)["mb_per_1000"]),
        ),
        target=TARGET_SUBSCRIPTIONS_MB,
        target_is="zbus at most",
        versions={"zbus": zbus_versions(), "peer": zenoh_versions()},
    )


def _import(sizes: Sizes) -> Row:
    loaded = child("import", "zbus")["loaded"]  # also compiles the modules, so that no round does
    child("import", "nats")
    took: list[int] = []

    def timed(module: str) -> Measurement:
        begin = time.perf_counter_ns()
        found = child("import", module)
        took.append(time.perf_counter_ns() - begin)
        return Measurement(found["ms"], [int(found["ms"] * 1e6)])

    found = alternate(sizes.of(9, 3), lambda: timed("zbus"), lambda: timed("nats"))
    return compare(
        "footprint",
        "`import zbus`, and no optional library with it",
        unit="ms",
        peer_name="`import nats`",
        rounds=found,
        target=TARGET_IMPORT_MS,
        target_is="zbus at most",
        versions={"zbus": zbus_versions(), "peer": {"nats-py": version("nats-py")}},
        broken=f"it loads {', '.join(loaded)}" if loaded else "",
        whole_interpreter_ms=[each / 1e6 for each in took],
    )


def _idle(sizes: Sizes) -> Row:
    also: list[dict[str, Any]] = []

    def ours() -> Measurement:
        also.append(child("zbus-idle", where / f"{time.time_ns()}.db"))
        return Measurement(also[-1]["over_libraries_mb"])

    with folder() as where:
        found = alternate(
            sizes.of(3, 1),
            ours,
            lambda: Measurement(child("bare-idle", where / f"{time.time_ns()}.db")["over_libraries_mb"]),
        )
    over_import = sorted(each["over_import_zbus_mb"] for each in also)[len(also) // 2]
    return compare(
        "footprint",
        f"idle bus with a log, over its libraries (over only `import zbus`: {over_import:.0f} MB)",
        unit="MB",
        peer_name="bare zenoh session and SQLite file",
        rounds=found,
        target=TARGET_IDLE_MB,
        target_is="zbus at most",
        versions={"zbus": zbus_versions(), "peer": zenoh_versions() | sqlite_versions()},
        children=also,
    )


if __name__ == "__main__":
    run_one(rows)
