"""Shared code of the benchmarks: rows, rounds, percentiles, a folder on a real disk, and the machine.

A row compares a measurement of zbus with one of a peer. Ratios are taken round by round, because
both sides of a round see the same machine; the row's ratio is the median of the rounds, never the
best.
"""

from __future__ import annotations

import gc
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"
PAYLOAD = b"x" * 100
FSYNC_TRIES = 200

TargetIs = Literal["ratio at least", "ratio at most", "zbus at most", "more than peer at most"]


@dataclass(frozen=True)
class Sizes:
    """The amount of work. `quick` only checks that everything runs; its results mean little."""

    quick: bool = False

    def of(self, full: int, quick: int) -> int:
        """Return the size for this run."""
        return quick if self.quick else full


@dataclass
class Measurement:
    """The result of one side in one round: a value, the durations of single events, and extra values."""

    value: float
    durations_ns: list[int] = field(default_factory=list, repr=False)
    extra: dict[str, float] = field(default_factory=dict)


@dataclass
class Row:
    """The result of one comparison, as it is printed and stored."""

    benchmark: str
    title: str
    unit: str
    zbus: float
    peer: float
    peer_name: str
    ratio: float
    target: float
    target_is: TargetIs
    rounds: list[dict[str, float]]
    versions: dict[str, dict[str, str]]
    p50_us: dict[str, float | None] = field(default_factory=dict)
    p99_us: dict[str, float | None] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)
    broken: str = ""  # the reason why the row is invalid, whatever its values

    @property
    def reached(self) -> float:
        """The value that is compared with the target."""
        if self.target_is == "more than peer at most":
            return self.zbus - self.peer
        return self.zbus if self.target_is == "zbus at most" else self.ratio

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        if self.broken:
            return False
        if self.target_is == "ratio at least":
            return self.reached >= self.target
        return self.reached <= self.target

    def as_json(self) -> dict[str, Any]:
        """Return all fields of the row."""
        return asdict(self) | {"met": self.met}


def compare(
    benchmark: str,
    title: str,
    *,
    unit: str,
    peer_name: str,
    rounds: Sequence[tuple[Measurement, Measurement]],
    target: float,
    target_is: TargetIs = "ratio at least",
    versions: dict[str, dict[str, str]],
    broken: str = "",
    **also: Any,
) -> Row:
    """Return the row of some rounds of (zbus, peer)."""
    sides = {"zbus": [ours for ours, _ in rounds], "peer": [theirs for _, theirs in rounds]}
    durations = {
        side: [each for measurement in measurements for each in measurement.durations_ns]
        for side, measurements in sides.items()
    }
    return Row(
        benchmark,
        title,
        unit,
        zbus=statistics.median(measurement.value for measurement in sides["zbus"]),
        peer=statistics.median(measurement.value for measurement in sides["peer"]),
        peer_name=peer_name,
        ratio=statistics.median(ours.value / theirs.value for ours, theirs in rounds),
        target=target,
        target_is=target_is,
        rounds=[_round(ours, theirs) for ours, theirs in rounds],
        versions=versions,
        p50_us={side: percentile_us(found, 50) for side, found in durations.items()},
        p99_us={side: percentile_us(found, 99) for side, found in durations.items()},
        also=also,
        broken=broken,
    )


def _round(ours: Measurement, theirs: Measurement) -> dict[str, float]:
    found = {"zbus": ours.value, "peer": theirs.value, "ratio": ours.value / theirs.value}
    for side, measurement in (("zbus", ours), ("peer", theirs)):
        found |= {f"{side}_{name}": value for name, value in measurement.extra.items()}
    return found


def median_of(measurements: Sequence[Measurement]) -> float:
    """Return the median of some rounds of one side."""
    return statistics.median(measurement.value for measurement in measurements)


def alternate(
    rounds: int, ours: Callable[[], Measurement], theirs: Callable[[], Measurement]
) -> list[tuple[Measurement, Measurement]]:
    """Measure both sides in turn. The peer goes first in every other round."""
    found = []
    for round_ in range(rounds):
        if round_ % 2:
            peer, own = settled(theirs), settled(ours)
        else:
            own, peer = settled(ours), settled(theirs)
        found.append((own, peer))
    return found


def settled(measure: Callable[[], Measurement]) -> Measurement:
    """Collect garbage and sync the disk, then measure.

    Otherwise an fsync of zbus would write pages that the peer left unsynced, and vice versa.
    """
    gc.collect()
    os.sync()
    return measure()


def percentile_us(durations_ns: Sequence[int], percent: int) -> float | None:
    """Return a percentile in microseconds, or None without durations."""
    if not durations_ns:
        return None
    ordered = sorted(durations_ns)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] / 1000


@contextmanager
def folder() -> Iterator[Path]:
    """Create a folder for logs and servers on the disk of this repository, which is not in memory."""
    RESULTS.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="bench-", dir=RESULTS))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def zbus_versions() -> dict[str, str]:
    """Return the versions of zbus and its libraries."""
    names = {"zbus": "zbus-mesh", "eclipse-zenoh": "eclipse-zenoh", "sqlalchemy": "sqlalchemy"}
    return {name: version(distribution) for name, distribution in names.items()} | sqlite_versions()


def sqlite_versions() -> dict[str, str]:
    """Return the versions of the driver and of SQLite."""
    import apsw

    return {"apsw": version("apsw"), "sqlite": apsw.sqlite_lib_version()}


def zenoh_versions() -> dict[str, str]:
    """Return the version of bare zenoh."""
    return {"eclipse-zenoh": version("eclipse-zenoh")}


def machine() -> dict[str, Any]:
    """Return the machine of the measurement, with the duration of an fsync."""
    with folder() as where:
        synced = fsync_ns(where)
        file_system = _file_system(where)
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "file_system": file_system,
        "python": platform.python_version(),
        "load_1m": os.getloadavg()[0],
        "fsync_us_p50": percentile_us(synced, 50),
        "fsync_us_p99": percentile_us(synced, 99),
    }


def fsync_ns(where: Path) -> list[int]:
    """Return the durations of appending a page to a file and syncing it."""
    durations = []
    with (where / "fsync").open("wb", buffering=0) as file:
        for _ in range(FSYNC_TRIES):
            begin = time.perf_counter_ns()
            file.write(bytes(8192))
            os.fdatasync(file.fileno())
            durations.append(time.perf_counter_ns() - begin)
    return durations


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as lines:
        found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def _file_system(where: Path) -> str:
    """Return the file system type of `where`: that of the longest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = {point: kind for point, kind in mounts if where.resolve().is_relative_to(point)}
    return inside[max(inside, key=len)] if inside else "unknown"


def run_one(rows: Callable[[Sizes], list[Row]]) -> None:
    """Run one benchmark: `python benchmarks/<file>.py [--quick]`."""
    from _table import table
    from rich.console import Console

    Console().print(table(rows(Sizes("--quick" in sys.argv[1:]))))
