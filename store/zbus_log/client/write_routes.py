"""The two routes for writing to a log: as its owner during the call, or through the process that owns it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zbus.errors import ConfigInvalid, LogError, LogLocked, ZbusError
from zbus.keys import KeySet, check_key
from zbus.ports.log import IsWanted, Outcome, Purged, Row, Stored, WriteDone, identity_conflict
from zbus.publish.entry import check_rows
from zbus.schema.validators import Validators, make_validators
from zbus.util.backoff import Backoff
from zbus.util.runtime import REAL
from zbus_log.file.head_record import owner_pid
from zbus_log.log import SqliteLog, open_log
from zbus_log.proxy.write_files import (
    PRUNE,
    PURGE,
    RESULT,
    ROWS,
    decode_result,
    decode_rows,
    encode_keys,
    encode_rules,
    new_call,
    new_stem,
    wake,
    write_file,
    writes_folder,
)
from zbus_log.retention import Pruned, Rules

POLL_S = (0.001, 0.02)
REACH_S = 30.0  # how long to wait until the owner accepts proxied writes or releases the log
CLOSE_S = 30.0


class Put(NamedTuple):
    """Result of `put`: the number of events, including those that were already stored, and the highest offset."""

    events: int
    last_offset: int


class OwnerRejectsProxiedWrites(LogLocked):
    """Raised when the process that owns the log does not accept proxied writes. Nothing was written through it."""

    def __init__(self, path: str, pid: int, waited_s: float) -> None:
        super().__init__(path, pid)
        self.args = (path, pid, waited_s)
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"{self.path} is owned by process {self.pid}, which does not accept proxied writes and did not release it "
            f"within {self.waited_s:g} s; nothing more was written. Run a bus in that process, or stop it first"
        )


class OwnerGone(Exception):
    """Raised when the process that received a request does not own the log any more."""


class WriteRoute(Protocol):
    """A way to write to the log: by this process, or by the process that owns it."""

    def send(self, data: bytes) -> Any:
        """Start to store encoded rows. Returns a handle for `result`.

        They are stored only if all rows that were sent before are stored.
        """

    def result(self, sent: Any) -> Put:
        """Wait until the rows are stored. Raises `OwnerGone` if the outcome is unknown."""

    def prune(self, rules: Rules, progress: Callable[[int], None] | None) -> Pruned:
        """Remove the events that the rules do not keep."""

    def purge(self, keys: KeySet, progress: Callable[[int], None] | None) -> Purged:
        """Remove all events of some keys."""


@contextmanager
def route_to(given: str | os.PathLike[str], timeout_s: float) -> Iterator[WriteRoute]:
    """Return the route that is available now; waits for one, because an owner may start or stop at any time.

    Raises `OwnerRejectsProxiedWrites` if neither route becomes available in time.
    """
    from zbus.config import load_config  # here, because the import is slow

    path = str(Path(given).expanduser())
    if path == "memory":
        raise ConfigInvalid("log", "a log in memory belongs to one bus; other processes cannot write to it")
    began = time.monotonic()
    while True:
        pid = owner_pid(path) if Path(f"{path}-head").exists() else None
        if pid is None:
            try:
                config = load_config(log=path, read_only=False)  # the settings of a node that starts here
                log = open_log(config, brief=True)
            except LogLocked as error:
                pid = error.pid
            else:
                try:
                    yield _DirectRoute(log, config.payload_bytes_max, timeout_s, config.validate_schemas)
                finally:
                    log.close(CLOSE_S)
                return
        if pid == os.getpid() and _on_event_loop():
            raise LogError(
                f"{path}: this process owns the log, and its event loop cannot wait for itself; nothing more was "
                "written. Use bus.put, or call this on a thread, as asyncio.to_thread(zbus_log.put, …)"
            )
        if wake(writes_folder(path)):
            proxied = _ProxiedRoute(path, timeout_s)
            try:
                yield proxied
            finally:
                proxied.withdraw_all()
            return
        if time.monotonic() - began > min(REACH_S, timeout_s):
            raise OwnerRejectsProxiedWrites(path, pid, min(REACH_S, timeout_s))
        time.sleep(POLL_S[1])


class _DirectRoute:
    """This process owns the log during the call. It also executes the write requests of other processes."""

    def __init__(self, log: SqliteLog, payload_bytes_max: int, timeout_s: float, validate_schemas: bool) -> None:
        self._log, self._payload_bytes_max, self._timeout_s = log, payload_bytes_max, timeout_s
        self._check_schemas = validate_schemas
        self._last: Future[Sequence[int] | ZbusError] | None = None
        log.accept_proxied_writes(self._write)

    @cached_property
    def _validators(self) -> Validators | None:
        """Created with the first rows: retention needs neither the schemas nor the validation library."""
        return (
            make_validators(self._log.schemas.load(), lambda name, events: None, REAL) if self._check_schemas else None
        )

    def _write(self, rows: Sequence[Row], done: WriteDone, is_wanted: IsWanted | None = None) -> None:
        check_rows(rows, check_key, self._payload_bytes_max, self._validators)
        self._log.append(rows, lambda result: done(_offsets_or_error(rows, result.outcome)), None)

    def send(self, data: bytes) -> Future[Sequence[int] | ZbusError]:
        rows, sent = decode_rows(data), Future[Sequence[int] | ZbusError]()
        if self._last is not None:
            self.result(self._last)  # nothing is stored after rows that were not
        self._write(rows, sent.set_result)
        self._last = sent
        return sent

    def result(self, sent: Future[Sequence[int] | ZbusError]) -> Put:
        try:
            result = sent.result(self._timeout_s)
        except TimeoutError:
            raise LogError(
                f"{self._log.path}: no commit within {self._timeout_s:g} s; the outcome is unknown"
            ) from None
        if isinstance(result, ZbusError):
            raise result
        return Put(len(result), max(result, default=0))

    def prune(self, rules: Rules, progress: Callable[[int], None] | None) -> Pruned:
        return self._log.prune(rules, progress)

    def purge(self, keys: KeySet, progress: Callable[[int], None] | None) -> Purged:
        return self._log.purge(keys, progress)


class _ProxiedRoute:
    """Another process owns the log and accepts proxied writes."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._folder = writes_folder(path)
        self._call = new_call()
        self._requests: set[Path] = set()

    def send(self, data: bytes) -> Path:
        return self._request(ROWS, data)

    def result(self, sent: Path) -> Put:
        return Put(*self._wait(sent))

    def prune(self, rules: Rules, progress: Callable[[int], None] | None) -> Pruned:
        return Pruned(*self._wait(self._request(PRUNE, encode_rules(rules))))

    def purge(self, keys: KeySet, progress: Callable[[int], None] | None) -> Purged:
        removed, until, durables, offloaded_until = self._wait(self._request(PURGE, encode_keys(keys)))
        return Purged(removed, until, tuple(durables), offloaded_until)

    def withdraw_all(self) -> None:
        """Remove the requests without a result, because the caller no longer waits for them."""
        for request in list(self._requests):
            self._withdraw(request)

    def _withdraw(self, request: Path) -> None:
        """Remove a request, and then its result: a request without a result would be executed."""
        self._requests.discard(request)
        with suppress(OSError):
            request.unlink(missing_ok=True)
            request.with_suffix(RESULT).unlink(missing_ok=True)

    def _request(self, kind: str, data: bytes) -> Path:
        request = self._folder / (new_stem(self._call) + kind)
        self._requests.add(request)
        try:
            write_file(request, data)
        except FileNotFoundError:  # the owner closed the log and removed the folder
            raise OwnerGone from None
        except OSError as error:
            raise LogError(f"{request} cannot be written ({error}); none of its rows were stored") from error
        if not wake(self._folder):
            raise OwnerGone
        return request

    def _wait(self, request: Path) -> list[Any]:
        result, pauses, began = request.with_suffix(RESULT), Backoff(*POLL_S, jitter=0), time.monotonic()
        while True:
            # Check this before looking for the result: an owner writes its last results before it closes the FIFO.
            accepted, exists = wake(self._folder, b""), request.exists()
            try:
                data = result.read_bytes()
            except FileNotFoundError:
                pass
            except OSError as error:
                raise LogError(f"{result} cannot be read ({error}); the outcome is unknown") from error
            else:
                self._withdraw(request)
                return decode_result(data)
            if not accepted:
                raise OwnerGone
            if not exists:
                raise LogError(
                    f"the owner of {self._path} removed a write request without a result, because it does not see "
                    f"process {os.getpid()}; none of its rows were stored. Run both in the same PID namespace"
                )
            if time.monotonic() - began > self._timeout_s:
                raise LogError(
                    f"the owner of {self._path} did not reply within {self._timeout_s:g} s; the outcome is unknown"
                )
            time.sleep(pauses.next())


def _offsets_or_error(rows: Sequence[Row], outcome: Outcome) -> Sequence[int] | ZbusError:
    if not isinstance(outcome, Stored):
        return outcome.error
    return outcome.offsets if (conflict := identity_conflict(rows, outcome)) is None else conflict


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
