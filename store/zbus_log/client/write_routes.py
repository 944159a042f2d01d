"""The two ways into a log: as its owner, for a while, or by errands to the process that owns it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from zbus.errors import ConfigInvalid, EventInvalid, LogError, LogLocked, ZbusError
from zbus.keys import check_key
from zbus.ports.log import Outcome, Row, Stored, WriteDone
from zbus.publish.entry import check_rows
from zbus.schema.validators import Validators, make_checks
from zbus_log.file.head_record import owner_pid
from zbus_log.log import SqliteLog, open_log
from zbus_log.proxy.write_files import (
    ANSWER,
    RETAIN,
    ROWS,
    decode_answer,
    decode_rows,
    encode_rules,
    new_stem,
    wake,
    write_whole,
    writes_folder,
)
from zbus_log.retention import Pruned, Rules

POLL_S = (0.001, 0.02)
REACH_S = 30.0  # for an owner that takes errands, or for one that does not to go
CLOSE_S = 30.0


class Put(NamedTuple):
    """What `put` stored: how many events (those that were in the log already count too), and the highest offset."""

    events: int
    last_offset: int


class OwnerRejectsProxiedWrites(LogLocked):
    """The process that owns the log does not write for others. Nothing was written through it."""

    def __init__(self, path: str, pid: int, waited_s: float) -> None:
        super().__init__(path, pid)
        self.args = (path, pid, waited_s)
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"{self.path} is owned by process {self.pid}, which takes no errands and did not let go of it within "
            f"{self.waited_s:g} s; nothing more was written: a running bus takes them, or let that process end first"
        )


class OwnerGone(Exception):
    """Whoever was to answer does not own the log any more."""


class WriteRoute(Protocol):
    """How something gets into the log: by this process, or by the one that owns it."""

    def send(self, data: bytes) -> Any:
        """Begin to store encoded rows; what is returned is to be given to `answer`."""

    def answer(self, sent: Any) -> Put:
        """Wait until they are stored. Raises `OwnerGone` where that is not known."""

    def retain(self, rules: Rules, progress: Callable[[int], None] | None) -> Pruned:
        """Remove what the rules do not let stay."""


@contextmanager
def way_to(given: str | os.PathLike[str], timeout_s: float) -> Iterator[WriteRoute]:
    """The way to the log that is open now; waits for one, as an owner may come or go at any moment."""
    from zbus.config import load_config  # not before: it takes a while to import

    path = str(Path(given).expanduser())
    if path == "memory":
        raise ConfigInvalid("log", "a log in memory belongs to one bus alone: nobody else can write to it")
    began = time.monotonic()
    while True:
        pid = owner_pid(path) if Path(f"{path}-head").exists() else None
        if pid is None:
            try:
                config = load_config(log=path, read_only=False)  # as a node that starts here would
                log = open_log(config)
            except LogLocked as error:
                pid = error.pid
            else:
                try:
                    yield _DirectRoute(log, config.payload_bytes_max, timeout_s, config.check_schemas)
                finally:
                    log.close(CLOSE_S)
                return
        if wake(writes_folder(path)):
            asking = _ProxiedRoute(path, timeout_s)
            try:
                yield asking
            finally:
                asking.withdraw()
            return
        if time.monotonic() - began > min(REACH_S, timeout_s):
            raise OwnerRejectsProxiedWrites(path, pid, min(REACH_S, timeout_s))
        time.sleep(POLL_S[1])


class _DirectRoute:
    """This process owns the log for a while, and does the errands of others meanwhile: they need not wait for it."""

    def __init__(self, log: SqliteLog, payload_bytes_max: int, timeout_s: float, check_schemas: bool) -> None:
        self._log, self._payload_bytes_max, self._timeout_s = log, payload_bytes_max, timeout_s
        self._check_schemas = check_schemas
        log.accept_proxied_writes(self._take)

    @cached_property
    def _checks(self) -> Validators | None:
        """Not before there are rows: retention needs none, nor the library that checks."""
        return make_checks(self._log.schemas.load(), lambda name, events: None) if self._check_schemas else None

    def _take(self, rows: Sequence[Row], done: WriteDone) -> None:
        try:
            check_rows(rows, check_key, self._payload_bytes_max, self._checks)
        except EventInvalid as error:
            done(error)
        else:
            self._log.append(rows, lambda answer: done(_answer(answer.outcome)), None)

    def send(self, data: bytes) -> SimpleQueue[Any]:
        answers: SimpleQueue[Any] = SimpleQueue()
        try:
            self._take(decode_rows(data), answers.put)
        except EventInvalid as error:
            answers.put(error)
        return answers

    def answer(self, sent: SimpleQueue[Any]) -> Put:
        try:
            answer = sent.get(timeout=self._timeout_s)
        except Empty:
            raise LogError(
                f"{self._log.path}: no commit within {self._timeout_s:g} s; the outcome is unknown"
            ) from None
        if isinstance(answer, ZbusError):
            raise answer
        return Put(len(answer), max(answer, default=0))

    def retain(self, rules: Rules, progress: Callable[[int], None] | None) -> Pruned:
        return self._log.retain(rules, progress)


class _ProxiedRoute:
    """Another process owns the log, and does errands."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._folder = writes_folder(path)
        self._left: set[Path] = set()

    def send(self, data: bytes) -> Path:
        return self._leave(ROWS, data)

    def answer(self, sent: Path) -> Put:
        return Put(*self._wait(sent))

    def retain(self, rules: Rules, progress: Callable[[int], None] | None) -> Pruned:
        return Pruned(*self._wait(self._leave(RETAIN, encode_rules(rules))))

    def withdraw(self) -> None:
        """Leave nothing behind: what is not answered is not wanted any more."""
        with suppress(OSError):
            for errand in self._left:
                errand.unlink(missing_ok=True)
                errand.with_suffix(ANSWER).unlink(missing_ok=True)

    def _leave(self, kind: str, data: bytes) -> Path:
        errand = self._folder / (new_stem() + kind)
        self._left.add(errand)
        try:
            write_whole(errand, data)
        except FileNotFoundError:  # the owner left, and took the folder with it
            raise OwnerGone from None
        except OSError as error:
            raise LogError(f"{errand} cannot be written ({error}); nothing of it was stored") from error
        if not wake(self._folder):
            raise OwnerGone
        return errand

    def _wait(self, errand: Path) -> list[Any]:
        answer, pause_s, began = errand.with_suffix(ANSWER), POLL_S[0], time.monotonic()
        while True:
            # Before looking for the answer: the last one of an owner that leaves counts.
            taken, lies_there = wake(self._folder, b""), errand.exists()
            with suppress(FileNotFoundError):
                data = answer.read_bytes()
                errand.unlink(missing_ok=True)
                answer.unlink()
                self._left.discard(errand)
                return decode_answer(data)
            if not taken:
                raise OwnerGone
            if not lies_there:
                raise LogError(
                    f"the owner of {self._path} removed an errand unanswered, as it sees no process {os.getpid()}: "
                    "both must see the same processes. Nothing of it was stored"
                )
            if time.monotonic() - began > self._timeout_s:
                raise LogError(
                    f"the owner of {self._path} did not answer within {self._timeout_s:g} s; the outcome is unknown"
                )
            time.sleep(pause_s)
            pause_s = min(POLL_S[1], pause_s * 1.5)


def _answer(outcome: Outcome) -> Sequence[int] | ZbusError:
    return outcome.offsets if isinstance(outcome, Stored) else outcome.error
