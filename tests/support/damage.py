"""Damage to the files of a log, one place at a time, and what readers and owners then say.

There are two outcomes: the damage is reported before wrong data is handed out, or everything reads as before.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from cold_support import epoch_of, write_segment
from log_support import append, ask, wait_until

from zbus.errors import ZbusError
from zbus.headers import encode_headers
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import Rules, SqliteLog
from zbus_log.cold.tier import Cold
from zbus_log.file.head_record import _FILE_AT, _SIZE, copied_from
from zbus_log.file.tables import BLOCK

EXPRESSIONS = ("**", "shop/**", "bank/c3/*", "iot/c1/topic", "**/topic")
START_NS = 1_700_000_000_000_000_000
LARGE = ("app.db", "app.db-wal")  # damaged more often
KINDS = ("bit", "bit", "sector", "page", "cut")
CURSORS = {"first": 700, "second": 4200}

Read = list[tuple[Any, ...]]


class Base(NamedTuple):
    """An undamaged log, the files that a case may damage, and everything that it should read as."""

    folder: Path
    files: tuple[str, ...]
    truth: dict[str, Read]


class Outcome(NamedTuple):
    """What one case led to."""

    damage: str
    reports: list[str]  # errors that were raised
    wrong: list[str]  # wrong data, or errors that are none of zbus

    @property
    def name(self) -> str:
        return "wrong" if self.wrong else "reported" if self.reports else "unchanged"


def rows(first: int, count: int) -> list[Row]:
    """Rows of 12 keys in three namespaces, with payloads of several sizes, and some headers."""
    chosen = random.Random(first)
    made: list[Row] = []
    for sequence in range(first, first + count):
        namespace, component = chosen.choice(("shop", "bank", "iot")), chosen.randrange(4)
        headers = encode_headers({"h": "v"}, None, None) if namespace == "bank" else None
        payload = chosen.randbytes(chosen.choice((0, 20, 60, 200)))
        made.append(Row(3, sequence, START_NS + sequence, f"{namespace}/c{component}/topic", payload, headers))
    return made


def make_closed(folder: Path) -> Base:
    """Return a log that was closed: one sealed block, and a tail."""
    log = _fill(folder)
    log.close(10.0)
    return _base(folder)


def make_killed(folder: Path) -> Base:
    """Return a log as a killed process leaves it: its newest events are in the write-ahead log.

    Its head record does not say which file the log is, so it is not taken for a copy of a log in use, of which all is
    read when it is opened.
    """
    live = folder.with_name(f"{folder.name}-live")
    live.mkdir()
    _fill(live).close(10.0)
    log = SqliteLog(str(live / "app.db"), synchronous="OFF")
    with closing(_Closing(log)):
        append(log, rows(BLOCK + 400, 200))
        _acknowledge(log, CURSORS["first"] + 100, CURSORS["second"] + 100)
        shutil.copytree(live, folder, ignore=shutil.ignore_patterns("*-shm"))
    shutil.rmtree(live)
    with (folder / "app.db-head").open("r+b") as head:
        head.seek(_FILE_AT)
        head.write(bytes(_SIZE - _FILE_AT))
    assert copied_from(str(folder / "app.db")) is None
    return _base(folder)


def make_purged(folder: Path) -> Base:
    """Return a log from whose middle the events of some keys were removed."""
    log = _fill(folder)
    log.purge(KeySet(["bank/**", "shop/c1/**"]))
    log.close(10.0)
    return _base(folder, BLOCK // 2)


def make_tiered(folder: Path) -> Base:
    """Return a log whose oldest events are in a cold tier."""
    log = _fill(folder)
    path = folder / "app.db"
    cold = f"{path}-cold"
    segments = [write_segment(path, cold, 1, 2000, row_group=500), write_segment(path, cold, 2001, 4095, row_group=500)]
    Cold(cold).add(segments, epoch_of(path))
    log.prune(Rules(until=4095, ignore_cursors=True, offloaded=True))
    log.close(10.0)
    return _base(folder)


def run_case(base: Base, seed: int, folder: Path) -> Outcome:
    """Damage one place of a copy, and read it as a reader, as an owner, and through its cursors."""
    chosen = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base.folder, folder)
    name, kind = chosen.choice([*base.files, *LARGE * 3]), chosen.choice(KINDS)
    name = name if name in base.files else "app.db"
    damage = f"{name}: {_damage(folder / name, kind, chosen)}"
    reports: list[str] = []
    wrong: list[str] = []
    for role in ("reader", "owner"):
        _use(folder / "app.db", role, base.truth, reports, wrong)
    return Outcome(damage, reports, wrong)


def _fill(folder: Path) -> SqliteLog:
    folder.mkdir(exist_ok=True)
    path = folder / "app.db"
    log = SqliteLog(str(path), synchronous="OFF")
    for first in range(0, BLOCK + 400, 500):
        append(log, rows(first, min(500, BLOCK + 400 - first)))
    wait_until(lambda: ask(path, "SELECT count(*) FROM blocks") == 1)
    _acknowledge(log, *CURSORS.values())
    log.positions.store({f"from/{origin:x}/1": 1000 + origin for origin in range(1, 60, 2)})
    return log


def _acknowledge(log: SqliteLog, *offsets: int) -> None:
    for name, offset in zip(CURSORS, offsets, strict=True):
        lease = log.cursors.claim(name, ["**"], 0)
        log.cursors.advance(name, lease.token, offset)
        log.cursors.release(name, lease.token)


class _Closing:
    def __init__(self, log: SqliteLog) -> None:
        self._log = log

    def close(self) -> None:
        self._log.close(10.0)


def _base(folder: Path, events_min: int = BLOCK + 400) -> Base:
    copy = folder.with_name(f"{folder.name}-truth")
    shutil.copytree(folder, copy)
    log = SqliteLog(str(copy / "app.db"), read_only=True)
    truth = {name: list(_read(log, name)) for name in _reads(log)}
    log.close(5.0)
    shutil.rmtree(copy)
    assert len(truth["** from the beginning"]) >= events_min
    files = [each.relative_to(folder).as_posix() for each in sorted(folder.rglob("*")) if each.is_file()]
    return Base(folder, tuple(name for name in files if _matters(name)), truth)


def _matters(name: str) -> bool:
    """Return whether a file has data: locks and shared memory have none that is needed."""
    return "-leases/" not in name and not name.endswith(("-shm", ".lock"))


def _reads(log: SqliteLog) -> list[str]:
    return [f"{each} from the beginning" for each in EXPRESSIONS] + ["** from a time", "cursors", "positions", *CURSORS]


def _read(log: SqliteLog, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield what one way of reading hands out."""
    if name == "cursors":
        for cursor in log.cursors.list():
            yield cursor.name, cursor.offset, cursor.keys, cursor.incarnation
    elif name == "positions":
        log.cursors.list()  # as a node does first
        yield from log.positions.load().items()
    elif name in CURSORS:
        lease = log.cursors.claim(name, ["**"], 0)
        yield (lease.offset, lease.keys)
        yield from _events(log, "shop/**", Span(lease.offset))
        log.cursors.release(name, lease.token)
    else:
        expression, _, start = name.partition(" from ")
        yield from _events(log, expression, Span(0, None, START_NS + 4000) if start == "a time" else Span())


def _events(log: SqliteLog, expression: str, span: Span) -> Iterator[tuple[Any, ...]]:
    span = log.narrow(span)
    assert span.until is not None
    while span.after < span.until:
        page = log.read(KeySet((expression,)), span, 2000)
        events, error, _ = page.events()
        for each in events:
            headers = dict(each.headers)
            yield each.offset, each.publisher_id, each.sequence, each.published_at, each.key, each.payload, headers
        if error is not None:
            raise error
        span = span._replace(after=page.covered)


def _use(path: Path, role: str, truth: dict[str, Read], reports: list[str], wrong: list[str]) -> None:
    try:
        log = SqliteLog(str(path), read_only=role == "reader", synchronous="OFF")
    except ZbusError as error:
        reports.append(f"{role}: open: {type(error).__name__}: {error}")
        return
    except Exception as error:
        wrong.append(f"{role}: open: {type(error).__name__}: {error}")
        return
    try:
        for name in _reads(log):
            _compare(f"{role}: {name}", lambda name=name: _read(log, name), truth[name], reports, wrong)  # type: ignore[misc]
    finally:
        log.close(5.0)


def _compare(
    what: str, read: Callable[[], Iterator[tuple[Any, ...]]], want: Read, reports: list[str], wrong: list[str]
) -> None:
    """Compare what is handed out. Before an error, it must be the beginning of what should be."""
    got: Read = []
    try:
        for each in read():
            got.append(each)
    except ZbusError as error:
        reports.append(f"{what}: {type(error).__name__}: {error}")
        want = want[: len(got)]
    except Exception as error:
        wrong.append(f"{what}: {type(error).__name__}: {error}")
        return
    if got != want:
        differ = (at for at, (one, two) in enumerate(zip(got, want, strict=False)) if one != two)
        at = next(differ, min(len(got), len(want)))
        one, two = str(got[at : at + 1])[:150], str(want[at : at + 1])[:150]
        wrong.append(f"{what}: {len(got)} of {len(want)}, different from {at} on: {one}, not {two}")


def _damage(path: Path, kind: str, chosen: random.Random) -> str:
    """Damage one place of a file. Returns what was done."""
    data = bytearray(path.read_bytes())
    if path.name.endswith("-wal"):  # its end is zeros, which no one reads
        data = data.rstrip(b"\0")
    if kind == "bit" or len(data) < 2:
        at, bit = chosen.randrange(len(data)), chosen.randrange(8)
        data[at] ^= 1 << bit
        done = f"bit {bit} of byte {at}"
    elif kind == "cut":
        at = chosen.randrange(len(data))
        done = f"cut at {at} of {len(data)}"
        del data[at:]
    else:
        size = 512 if kind == "sector" else 4096
        at = chosen.randrange(-(-len(data) // size)) * size
        length = len(data[at : at + size])
        data[at : at + size] = bytes(length)
        done = f"{length} zeros at {at}"
    path.write_bytes(data)
    return done
