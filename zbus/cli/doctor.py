"""`zbus doctor`: a check of this machine, with the command that installs each missing part."""

from __future__ import annotations

import platform
import re
import tempfile
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import zbus
from zbus.errors import ZbusError
from zbus.introspection import of
from zbus.util.atomic_file import fsync

from .bench.quantiles import quantile
from .failures import ERROR
from .java import JAVA_INSTALL, JAVA_VERSION_MIN, java_version
from .loop import run
from .options import JsonOption
from .render.output import encode_json, show, write

DISTRIBUTION = "zbus-mesh"
OPEN_FILES_MIN = 1024
FSYNCS_MAX, FSYNC_S_MAX = 300, 2.0

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^;]*(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?")


def doctor(
    folder: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="Measure the disk of this folder, where the log would be."),
    ] = Path(),
    json: JsonOption = False,
) -> None:
    """Check this machine: versions, SQLite, the settings, the cost of fsync, open files, and optional libraries."""
    found = examine(folder)
    write(encode_json(found)) if json else show(_table(found))
    if not (found["sqlite"]["ok"] and found["configuration"]["ok"]):
        raise typer.Exit(ERROR)


def examine(folder: Path) -> dict[str, Any]:
    """Return everything that the command prints."""
    required, extras = _requirements()
    return {
        "zbus": zbus.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in required},
        "sqlite": run(_sqlite(folder)),
        "configuration": _configuration(),
        "fsync": {"folder": str(folder.resolve())} | measure_fsync(folder),
        "open_files": _open_files(),
        "java": _java(),
        "extras": {extra: _extra(extra, names) for extra, names in extras.items()},
    }


def measure_fsync(folder: Path) -> dict[str, float]:
    """Measure how long an fsync of 4 KiB at the end of a file takes, in µs."""
    taken_ns: list[int] = []
    deadline = time.monotonic() + FSYNC_S_MAX
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while len(taken_ns) < FSYNCS_MAX and (not taken_ns or time.monotonic() < deadline):
            file.write(bytes(4096))
            begun = time.perf_counter_ns()
            fsync(file.fileno())
            taken_ns.append(time.perf_counter_ns() - begun)
    return {"us_p50": quantile(taken_ns, 0.5) / 1000, "us_p99": quantile(taken_ns, 0.99) / 1000}


async def _sqlite(folder: Path) -> dict[str, Any]:
    """Open a log in the folder. The log itself checks the version of SQLite and states its guarantees."""
    try:
        durability = zbus.BusConfig().durability
    except ZbusError:
        durability = "fsync"  # wrong settings are reported under `configuration`
    try:
        with tempfile.TemporaryDirectory(prefix=".zbus-doctor-", dir=folder) as place:
            config = zbus.BusConfig.exactly(log=str(Path(place) / "log.db"), durability=durability)
            async with zbus.open(config=config) as bus:
                diagnostics = of(bus).reader.required("doctor").diagnostics()
                promise = bus.stats()["log"]["promise"]
    except (ZbusError, OSError) as error:
        return {"version": None, "ok": False, "reason": str(error), "promise": None}
    return {"version": diagnostics["sqlite"], "ok": True, "reason": "", "promise": promise}


def _open_files() -> dict[str, Any]:
    """Return the limits of open files; None on Windows, which does not limit them."""
    try:
        import resource
    except ImportError:
        return {"soft": None, "hard": None, "ok": True}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard, "ok": soft >= OPEN_FILES_MIN or soft < 0}


def _configuration() -> dict[str, Any]:
    try:
        zbus.open()
    except ZbusError as error:
        return {"ok": False, "reason": str(error)}
    return {"ok": True, "reason": ""}


def _java() -> dict[str, Any]:
    found = java_version()
    return {"version": found, "ok": found is not None and found >= JAVA_VERSION_MIN, "install": JAVA_INSTALL}


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the requirements of the distribution, and those of each extra."""
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in requires(DISTRIBUTION) or ():
        found = _REQUIREMENT.match(line)
        if found and found[1] != DISTRIBUTION and found[2] != "all":  # `all` is the sum of the other extras
            (extras.setdefault(found[2], []) if found[2] else required).append(found[1])
    return required, extras


def _extra(extra: str, names: list[str]) -> dict[str, Any]:
    found = {name: _version(name) for name in names}
    missing = [name for name, version in found.items() if version is None]
    return {"libraries": found, "missing": missing, "install": f"pip install '{DISTRIBUTION}[{extra}]'"}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _promise(durability: str, writers: str, dense: bool, identities: str, atomic_events: int | None) -> str:
    """Describe the guarantees of a log."""
    together = "all events of a commit" if atomic_events is None else f"{atomic_events:,} events"
    gaps = "without gaps" if dense else "with gaps"
    return (
        f"events survive {durability}\n{writers} writer{'s' if writers == 'many' else ''}, offsets {gaps}\n"
        f"an identity is known {identities}\n{together} are stored together"
    )


def _table(found: dict[str, Any]) -> Table:
    table = Table("check", "found", "to do", title="zbus doctor", title_justify="left")
    for name in ("zbus", "python", "platform"):
        table.add_row(name, found[name], "")
    for name, installed in found["libraries"].items():
        table.add_row(name, installed or "missing", "" if installed else f"pip install {DISTRIBUTION}")
    sqlite, configuration, fsync, files = (found[each] for each in ("sqlite", "configuration", "fsync", "open_files"))
    table.add_row("SQLite of the log", f"{sqlite['version']} ok" if sqlite["ok"] else "rejected", sqlite["reason"])
    if sqlite["promise"]:
        table.add_row("guarantees of a log here", _promise(**sqlite["promise"]), "")
    table.add_row("configuration", "ok" if configuration["ok"] else "invalid", configuration["reason"])
    table.add_row(f"fsync in {fsync['folder']}", f"p50 {fsync['us_p50']:,.0f} µs, p99 {fsync['us_p99']:,.0f} µs", "")
    soft = "no limit" if files["soft"] is None else f"{files['soft']:,}"
    table.add_row("open files", soft, "" if files["ok"] else f"ulimit -n {OPEN_FILES_MIN}")
    java = found["java"]
    state = "missing" if java["version"] is None else f"{java['version']}{' ok' if java['ok'] else ', too old'}"
    table.add_row("Java, only for the extra spark", state, "" if java["ok"] else java["install"])
    for extra, parts in found["extras"].items():
        state = f"missing: {', '.join(parts['missing'])}" if parts["missing"] else "installed"
        table.add_row(f"extra {extra}", state, parts["install"] if parts["missing"] else "")
    return table
