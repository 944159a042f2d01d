"""The SQLite implementation of the log port: opens and checks the file, then combines writer, reader and cursors."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from zbus.errors import ConfigInvalid, LogDamaged, LogError, LogFull, LogReadOnly
from zbus.keys import KeySet
from zbus.observe.records import record, record_reason
from zbus.ports.lineage import Incarnation, Lineage
from zbus.ports.log import (
    Appended,
    AppendResult,
    Backup,
    Committed,
    Page,
    Promise,
    ProxiedWrite,
    Purged,
    Refused,
    Row,
    Span,
    identities_promise,
)
from zbus.util.backoff import Backoff
from zbus.util.process import on_fork
from zbus.util.renamed import Renamed
from zbus.util.run_id import inherit
from zbus_log.file import sqlite_driver

from .backup.make import make_backup
from .cold.tier import Cold
from .file.chain import digest_at
from .file.database import log_errors, make_engine, reading_errors, snapshot, transaction
from .file.fork_mark import read_mark
from .file.head_record import DISK_FULL, RESERVE, Head, HeadRecord
from .file.incarnations import BEFORE, extended, new_incarnation, read_incarnations, read_lineage
from .file.manifest import ColdDamaged
from .file.removed import find_gaps
from .file.tables import (
    SEALED_UNTIL,
    check_is_log,
    get_epoch,
    get_head,
    get_low_water,
    get_state,
    origin_of,
    prepare,
    set_epoch,
    set_state,
)
from .proxy.owner import ProxiedWriteServer
from .pruner import Pruner
from .purging import Purge, preview
from .read.comparison import NO_RECORD, Loss, find_loss
from .read.copied import check_copy
from .read.reader import SqliteReader, check_is_no_backup, readable
from .read.tiered_reader import TieredReader
from .retention import Pruned, Rules
from .write.cursors import SqliteCursors
from .write.positions import SqlitePositions
from .write.schema_store import SqliteSchemas
from .write.writer import Writer

if TYPE_CHECKING:
    from zbus.config import BusConfig
    from zbus.ports.log import Log

POLL_S = (0.001, 0.02)
WAIT_S = 0.1


def open_log(config: BusConfig, *, brief: bool = False) -> SqliteLog:
    """Open the log of a configuration. `brief` means for the duration of a call, for which a starting node waits."""
    assert config.log is not None
    ttl_s = config.cursor_ttl_s
    rules = Rules(
        config.retain_age_s,
        config.retain_bytes,
        config.retain_events,
        config.retain_ignore_cursors,
        keys=tuple(config.retain_keys_s.items()),
    )
    if config.log == "memory":
        # An ordinary log, on a file system in memory if one exists. It is removed when the bus is closed.
        folder = tempfile.TemporaryDirectory(prefix="zbus-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)  # noqa: S108
        return SqliteLog(
            str(Path(folder.name) / "log.db"),
            synchronous="OFF",
            rules=rules,
            dedup_s=config.dedup_s,
            cursor_ttl_s=ttl_s,
            folder=folder,
        )
    synchronous = {"fsync": "FULL", "os": "NORMAL"}[config.durability]
    return SqliteLog(
        str(Path(config.log.removeprefix("sqlite://")).expanduser()),
        read_only=config.read_only,
        synchronous=synchronous,
        accept_loss=config.accept_loss,
        rules=rules,
        dedup_s=config.dedup_s,
        cursor_ttl_s=ttl_s,
        cold=None if config.cold_dir is None else str(Path(config.cold_dir).expanduser()),
        brief=brief,
    )


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116
    except OSError:
        return None


class LogReplaced(LogDamaged):
    """Raised in a process that reads a log whose file was replaced by another one, as a restore does."""

    def __init__(self, path: str) -> None:
        reason = "another file took the place of the log, such as by zbus log restore --replace"
        super().__init__(path, reason, None, "Open the log again")
        self.args = (path,)


class SqliteLog:
    """An append-only log in one SQLite file. One process owns it; any process can read it."""

    def __init__(
        self,
        path: str,
        *,
        read_only: bool = False,
        synchronous: str = "FULL",
        accept_loss: bool = False,
        rules: Rules | None = None,
        dedup_s: float = 0.0,
        cursor_ttl_s: float | None = None,
        cold: str | None = None,
        folder: tempfile.TemporaryDirectory[str] | None = None,
        brief: bool = False,
    ) -> None:
        self.path, self.read_only, self._synchronous, self._folder = path, read_only, synchronous, folder
        self._brief = brief
        self._rules, self._dedup_s, self._cursor_ttl_s = rules or Rules(), dedup_s, cursor_ttl_s
        self._origin = 0
        self._lineage = BEFORE
        self._writer: Writer | None = None
        self._connection: Connection | None = None
        self._record: HeadRecord | None = None
        self._watching: threading.Thread | None = None
        self._proxied_writes: ProxiedWriteServer | None = None
        self._closed = threading.Event()
        self._parent: int | None = None  # of a process that was forked while it had this log open
        on_fork(self)
        if not Path(path).parent.is_dir():
            raise ConfigInvalid("log", f"the folder {str(Path(path).parent)!r} does not exist")
        self._cursors = SqliteCursors(path, self)
        self._cold = Cold(f"{path}-cold" if cold is None else cold)
        try:
            if read_only:
                self._read_engine = readable(path)
            else:
                self._own(accept_loss)
        except BaseException:
            self.close(1.0)
            raise
        self._reader = SqliteReader(path, self._read_engine)
        self._opened, self._is_replaced = _stat(path), False
        with log_errors(path), self._read_engine.connect() as connection:
            self._is_fork = read_mark(connection) is not None
        self._history = TieredReader(self._reader, self._cold)
        self._schemas = SqliteSchemas(path, self._read_engine, self._writer, self._closed)

    @property
    def cursors(self) -> SqliteCursors:
        """The cursors of durable subscriptions, stored beside this log."""
        return self._cursors

    @property
    def positions(self) -> SqlitePositions:
        """This node's positions in the logs of other nodes, stored beside this log."""
        return self._cursors.positions

    @property
    def schemas(self) -> SqliteSchemas:
        """The schemas registered for the payloads of this log."""
        return self._schemas

    @property
    def promise(self) -> Promise:
        """The guarantees of this log."""
        survives = {"FULL": "power loss", "NORMAL": "a crash of the process", "OFF": "nothing"}
        return Promise(survives[self._synchronous], "one", True, identities_promise(self._dedup_s), None)

    @property
    def log_id(self) -> int:
        """The identity of this history; 0 if the log is opened read-only."""
        return self._origin

    @property
    def writer_id(self) -> int:
        """The identity of this writer: the same as `log_id`, because one process writes this log."""
        return self._origin

    @property
    def lineage(self) -> Lineage:
        """The incarnations of this log: those of the owner, or those that are in the file now if it is read-only."""
        if self._writer is not None:
            return self._lineage
        with reading_errors(self.path), self._read_engine.connect() as connection:
            self._lineage = read_lineage(connection, self._lineage)
        return self._lineage

    def begin_incarnation(self) -> Incarnation:
        """Begin another incarnation, after the appends that are queued. Returns once it is on disk."""
        writer = self._writer
        if writer is None:
            raise LogReadOnly(self.path)
        done = threading.Event()
        outcome: list[Incarnation | BaseException] = []

        def begin() -> None:
            try:
                with log_errors(self.path, writing=True):
                    begun = writer.begin_incarnation()
                self._lineage = extended(self._lineage.incarnations, begun)
                outcome.append(begun)
            except BaseException as error:
                outcome.append(error)
                raise
            finally:
                done.set()

        writer.run(begin)
        while not done.wait(WAIT_S):
            if self._closed.is_set():
                raise LogError(f"{self.path} was closed; another incarnation may have begun")
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def digest(self, offset: int) -> bytes:
        """Return the digest of the events up to `offset`. That of the owner's head is in memory."""
        chain = None if self._writer is None else self._writer.chain
        if chain is not None:
            head, digest = chain.newest
            if offset == head:
                return digest
        with reading_errors(self.path), self._read_engine.connect() as connection, snapshot(connection):
            return digest_at(connection, offset)

    @property
    def append(self) -> Callable[[Sequence[Row], Appended, Any], None]:
        """The writer's `submit` itself, which saves a call per append."""
        return self._writer.submit if self._writer is not None else self._refuse

    def _refuse(self, rows: Sequence[Row], done: Appended, about: Any = None) -> None:
        done(AppendResult(about, Refused(LogReadOnly(self.path))))

    def tail(self, committed: Callable[[Committed], None]) -> int:
        """Call `committed` with each commit of this process, the only writer. A read-only log has no tail."""
        return self.head() if self._writer is None else self._writer.tail(committed)

    def size_bytes(self) -> int:
        """Return the size of the file and its write-ahead log."""
        total = 0
        for each in (self.path, f"{self.path}-wal"):
            try:
                total += Path(each).stat().st_size
            except OSError:
                pass  # removed just now, or not created yet
        return total

    def before(self, offset: int) -> int:
        """Return the offset before this one."""
        return max(0, offset - 1)

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        """Return the next page of a span. Raises `LogReplaced` after `watch` has noticed another file at the path."""
        if self._is_replaced:
            raise LogReplaced(self.path)
        return self._history.read(keys, span, limit)

    def narrow(self, span: Span) -> Span:
        """Return the span with its times turned into offsets, and with an end."""
        return self._history.narrow(span)

    def head(self) -> int:
        """Return the last committed offset."""
        return self._reader.head()

    def low_water(self) -> int:
        """Return the offset up to which every event was removed and is not in the cold tier either."""
        return self._history.low_water()

    def removed_until(self) -> int:
        """Return the highest offset that a purge or retention by key removed; 0 if none was."""
        return self._reader.removed_until()

    def count(self, after: int, until: int) -> int:
        """Return the number of offsets: they are dense, apart from those that an accepted loss skipped."""
        return max(0, until - after)

    def is_lost(self, offset: int) -> bool:
        """Return whether an offset belongs to a loss that was accepted, and so is never assigned again."""
        with reading_errors(self.path), self._read_engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT 1 FROM losses WHERE ? BETWEEN first AND last", (offset,))
            return found.first() is not None

    def watch(self, moved: Callable[[int], None]) -> None:
        """Poll the head, less often while it does not change: no socket connects reader and owner."""

        def run() -> None:
            last, pauses = -1, Backoff(*POLL_S, jitter=0)
            while not self._closed.wait(pauses.next()):
                try:
                    head = self._reader.head()
                except LogError:
                    head = last  # the next read raises this error; keep polling
                if head != last:
                    last = head
                    pauses.reset()
                    moved(head)
                elif self._was_replaced():
                    self._is_replaced = True
                    moved(head + 1)  # the subscriptions read, and receive the error
                    return

        self._watching = threading.Thread(target=inherit(run), name="zbus-log-watch", daemon=True)
        self._watching.start()

    def _was_replaced(self) -> bool:
        """Return whether another file has the name of this log now. Without a file, it may still be on its way."""
        now = _stat(self.path)
        return now is not None and self._opened is not None and not os.path.samestat(now, self._opened)

    def accept_proxied_writes(self, write: ProxiedWrite) -> None:
        """Execute the write requests of other processes, unless the log is in memory or read-only."""
        if self._writer is not None and self._folder is None:
            self._proxied_writes = ProxiedWriteServer(self.path, write, self.prune, self.purge)

    retain = Renamed("prune")

    def hold(self, reader: tuple[str, int] | None) -> None:
        """Let retention keep the events after an offset for a reader, such as another node, until the next call."""
        if self._writer is not None:
            self._pruner.reader = reader

    def prune(self, rules: Rules, progress: Callable[[int], None] | None = None) -> Pruned:
        """Remove the events that the rules do not keep, now. Commits continue in between."""
        found = Pruned(0, 0, None)

        def step() -> bool:
            nonlocal found
            removed, more, held_by = self._pruner.step(rules)
            found = Pruned(get_low_water(self._writing), found.removed + removed, held_by)
            if progress is not None and removed:
                progress(found.removed)
            return more

        self._run_steps(step, lambda: f"retention; {found.removed} events were removed")
        return found

    def purge(self, keys: KeySet, progress: Callable[[int], None] | None = None) -> Purged:
        """Remove all events of some keys, whatever their age, and record it in the log. Commits continue in between."""
        if self._writer is None:
            raise LogReadOnly(self.path)
        expected = preview(self.path, keys, str(self._cold.folder))
        purge: Purge | None = None

        def step() -> bool:
            nonlocal purge
            before = 0 if purge is None else purge.removed
            purge = purge or self._pruner.begin_purge(keys)
            more = self._pruner.purge_step(purge)
            if progress is not None and purge.removed > before:
                progress(purge.removed)
            if not more:
                self._owner.remove_from_wal()
            return more

        self._run_steps(step, lambda: f"a purge; {0 if purge is None else purge.removed} events were removed")
        assert purge is not None
        found = Purged(purge.removed, purge.until, expected.unacknowledged, expected.offloaded_until)
        shown = {"path": self.path, "keys": list(keys.expressions), "durables": list(found.unacknowledged)}
        record("LOG_PURGED", logging.WARNING, events=found.removed, until=found.until, **shown)
        return found

    def _run_steps(self, step: Callable[[], bool], during: Callable[[], str]) -> None:
        """Call `step` on the writer's thread until it returns False, and wait for it."""
        if self._writer is None:
            raise LogReadOnly(self.path)
        done, failed = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                with log_errors(self.path, writing=True):
                    more = step()
            except BaseException as error:
                failed.append(error)
                done.set()
                raise
            self._owner.run(run) if more else done.set()

        self._writer.run(run)
        while not done.wait(WAIT_S):
            if self._closed.is_set():
                raise LogError(f"{self.path} was closed during {during()}")
        if failed:
            raise failed[0]

    def backup(
        self,
        target: str,
        progress: Callable[[int, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> Backup:
        """Back up this log into a file or a folder. Closing the log ends it, and keeps an earlier backup as it is."""

        def check_open() -> None:
            if check is not None:
                check()
            if self._closed.is_set():
                raise LogError(f"{self.path} was closed during a backup; an earlier backup in {target} is as it was")

        check_open()
        return make_backup(self.path, target, cold=str(self._cold.folder), progress=progress, check=check_open)

    @property
    def is_fork(self) -> bool:
        """Whether this log is a fork, which must not be used with a transport."""
        return self._is_fork

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of this log, for log records and the command line."""
        return {
            "log": self.path,
            "head": self.head(),
            "low_water": self.low_water(),
            "read_only": self.read_only,
            "synchronous": self._synchronous,
            "incarnation": f"{self.lineage.current.id:x}",
            "checkpoint_failures": 0 if self._writer is None else self._writer.checkpoint_failures,
            "sqlite": sqlite_driver.sqlite_version,
        }

    def close(self, timeout_s: float) -> None:
        """Commit what was appended, then close the file. If the disk hangs, the writer's thread does so later."""
        if self._parent is not None:
            return  # everything belongs to the parent
        deadline = time.monotonic() + timeout_s
        if self._proxied_writes is not None:  # first, so that clients do not receive errors that closing causes
            self._proxied_writes.close(timeout_s / 4)
        self._closed.set()
        if self._watching is not None:
            self._watching.join(max(0.1, deadline - time.monotonic()))
        if hasattr(self, "_read_engine"):  # before the writer: the last connection removes the write-ahead log
            self._read_engine.dispose()
        if self._writer is not None:
            self._writer.close(max(0.1, deadline - time.monotonic()))
        else:  # read-only, or opening failed
            if self._connection is not None:
                self._connection.close()
            if self._record is not None:
                with suppress(OSError):  # closed in any case
                    self._record.close()
            self._connection = self._record = None
        self._cursors.close(max(0.1, deadline - time.monotonic()))
        self._cold.close()
        if hasattr(self, "_read_engine"):
            self._read_engine.dispose()  # again, for reads that began after the first call
        if self._folder is not None:
            self._folder.cleanup()

    def forked(self, parent: int) -> None:
        """Give up the log in a forked process. The file, its lock and its threads belong to the parent."""
        self._parent = parent
        self._closed = threading.Event()  # a thread that does not exist here may hold the lock of the other one
        self._closed.set()
        if self._writer is not None:
            self._writer.forked(parent)
        if self._proxied_writes is not None:
            self._proxied_writes.forked()
        if hasattr(self, "_cursors"):
            self._cursors.forked()
        if self._folder is not None:
            self._folder._finalizer.detach()  # type: ignore[attr-defined]  # it would remove the files of the parent

    @property
    def _owner(self) -> Writer:
        assert self._writer is not None
        return self._writer

    @property
    def _writing(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def _own(self, accept_loss: bool) -> None:
        """Lock and migrate the file, compare it with the head record, and start the writer."""
        path = Path(self.path)
        if path.exists() and not path.is_file():
            raise ConfigInvalid("log", f"{self.path!r} is not a file")
        if path.is_file() and path.stat().st_size and not Path(f"{path}-head").exists():
            check_engine = make_engine(self.path, read_only=True)
            try:
                with log_errors(self.path), check_engine.connect() as connection:
                    check_is_log(connection, self.path)
                    check_is_no_backup(connection, self.path)
            finally:
                check_engine.dispose()
        relaxed = self._synchronous != "FULL"
        try:
            self._record = HeadRecord(self.path, accept_loss=accept_loss, relaxed=relaxed, brief=self._brief)
        except OSError as error:  # such as a read-only file system, or missing permissions
            if error.errno in DISK_FULL:
                raise LogFull(self.path) from error
            raise LogError(
                f"{self.path} cannot be opened for writing: {error}. Nothing was opened or changed. Make the folder "
                "writable, or open the log with read_only=True"
            ) from error
        existed = Path(self.path).is_file() and Path(self.path).stat().st_size > 0
        known = self._record.current
        if not existed and known is not None and known.head > 0 and not accept_loss:
            raise LogDamaged(self.path, "the file is missing or empty", (1, known.head))
        if self._record.copied_from is not None and existed and not accept_loss:
            check_copy(self.path, self._record.copied_from, known, self._record.power_was_cut)
        with reading_errors(self.path):
            self._connection = make_engine(self.path, synchronous=self._synchronous).connect()
            prepare(self._connection, self.path)
            state = self._compare(known, accept_loss)
            if accept_loss:
                self._accept_missing_tier()
            lost = self._connection.exec_driver_sql("SELECT ifnull(max(last), 0) FROM losses").scalar_one()
            after = max(state.head, lost)
            begun = new_incarnation(after + 1)
            before = Lineage(read_incarnations(self._connection))
            self._lineage = extended(before.incarnations, begun)
        try:
            # The log stores the new incarnation with its first commit, so the record names it then too.
            self._record.update(state._replace(incarnation=before.of(state.head) or 0))
            self._record.record_file(self.path)
            self._record.sync()
        except OSError as error:
            if error.errno in DISK_FULL:
                raise LogFull(self.path) from error
            raise LogError(f"{self._record.path} cannot be written: {error}. No event was changed") from error
        self._origin = origin_of(state.epoch)
        self._read_engine = make_engine(self.path, read_only=True)
        periodic = self._prune_periodically if self._rules or self._cursor_ttl_s else None
        with reading_errors(self.path):
            self._pruner = Pruner(
                self.path,
                self._connection,
                lambda: self._owner,
                self._cursors,
                self._rules,
                self._cursor_ttl_s,
                self._dedup_s,
            )
            self._writer = Writer(
                self.path,
                self._connection,
                self._record,
                self._synchronous,
                after,
                begun,
                periodic,
                self._rules.every_events,
                self._is_whole,
            )
        if periodic is not None:
            self._writer.run(self._pruner.save_clock)  # before the first event of this process

    def _is_whole(self, first: int, last: int) -> bool:
        """Return whether no event from one offset to another is damaged, so that an index of them can be trusted."""
        engine = make_engine(self.path, read_only=True)  # its own: the log may be closing
        try:
            reader = SqliteReader(self.path, engine)
            return reader.check(max(first, reader.low_water() + 1), last) is None
        finally:
            engine.dispose()

    def _compare(self, known: Head | None, accept_loss: bool) -> Head:
        """Compare the file with the head record and return the updated record. Raises `LogDamaged` for a loss."""
        head, epoch = get_head(self._writing), get_epoch(self._writing)
        if known is None:
            if head == 0:
                return Head(epoch)
            loss: Loss | None = Loss(NO_RECORD, None)
            known = Head(epoch, head, head + RESERVE)
        else:
            loss = find_loss(self._writing, known)
            if loss is None and (gaps := self._tail_gaps(head)):
                count = sum(last - first + 1 for first, last in gaps)
                reason = f"{count} events are missing among the newest, the first at offset {gaps[0][0]}"
                loss = Loss(reason, (gaps[0][0], gaps[-1][1]))
        # Durability 'os' permits the loss of the newest events after a power cut, and no other loss.
        cut = self._record is not None and self._record.power_was_cut and (loss is None or loss.is_end)
        if loss is None and not cut:
            return known._replace(epoch=epoch, head=head, reserved=max(known.reserved, head))
        problem = None if loss is None else LogDamaged(self.path, loss.reason, loss.missing)
        if problem is not None and not accept_loss and not cut:
            raise problem
        reason = str(problem) if problem else "the newest events may be missing, as durability 'os' permits"
        path = self.path
        record_reason("LOG_TRUNCATED", logging.WARNING, code="log_truncated", reason=reason, path=path, head=head)
        return self._begin_epoch(known, head)

    def _accept_missing_tier(self) -> None:
        """Continue without the cold tier if it lacks events that were moved to it."""
        try:
            self._cold.check_holds(get_state(self._writing).offloaded_until)
        except ColdDamaged as error:
            reason, path, head = str(error), self.path, get_head(self._writing)
            record_reason("LOG_TRUNCATED", logging.WARNING, code="log_truncated", reason=reason, path=path, head=head)
            with transaction(self._writing):
                set_state(self._writing, offloaded_until=0)

    def _begin_epoch(self, known: Head, head: int) -> Head:
        """Start a new epoch after a loss. Reserved offsets are never assigned again."""
        epoch, reserved = secrets.token_bytes(16), max(known.reserved, known.head, head)
        before = get_epoch(self._writing)
        with transaction(self._writing):
            set_epoch(self._writing, epoch)
            for first, last in [*self._tail_gaps(head), (head + 1, reserved)]:
                self._writing.exec_driver_sql(
                    "INSERT OR REPLACE INTO losses (first, last, found_at) VALUES (?, ?, ?)",
                    (first, last, time.time_ns()),
                )
        self._cold.follow(before, epoch, head)
        return Head(epoch, head, reserved)

    def _tail_gaps(self, head: int) -> list[tuple[int, int]]:
        """Return the missing offsets after the last sealed block, without those that were accepted as lost."""
        sealed = self._writing.exec_driver_sql(f"SELECT {SEALED_UNTIL}").scalar_one()
        return find_gaps(self._writing, max(sealed, get_low_water(self._writing)))

    def _prune_periodically(self) -> None:
        if self._pruner.periodic_step(self._rules).more:
            self._owner.run(self._prune_periodically)


if TYPE_CHECKING:
    _port: type[Log] = SqliteLog
