"""Owner side of proxied writes: executes write requests from other processes, because only the owner may write.

The owner's bus publishes the rows like its own, so that subscribers, durable subscriptions and other nodes receive
them. One thread waits for requests in the kernel, without cost while none arrive, and without a socket. It passes rows
on and writes results, while the log continues to commit.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from zbus.errors import LogError, ZbusError
from zbus.keys import KeySet
from zbus.observe.records import record, record_reason
from zbus.observe.throttle import Throttle
from zbus.ports.log import ProxiedWrite, Purged
from zbus.util.backoff import Backoff
from zbus.util.run_id import inherit
from zbus_log.file.old_folder import OldFolder
from zbus_log.retention import Pruned, Rules

from .write_files import (
    PRUNE,
    PURGE,
    RESULT,
    ROWS,
    WAKE,
    Call,
    call_of,
    decode_keys,
    decode_rows,
    decode_rules,
    encode_result,
    write_file,
    writes_folder,
)

RETRY_S = (0.05, 5.0)  # the shortest and the longest pause before a result is written again
CHECK_S = 3.0  # how often to check that the folder still exists


class ProxiedWriteServer:
    """Executes write requests from its construction until it is closed. It calls `write` on its own thread."""

    def __init__(
        self,
        log_path: str,
        write: ProxiedWrite,
        prune: Callable[[Rules], Pruned],
        purge: Callable[[KeySet], Purged],
    ) -> None:
        self._log_path, self._write, self._prune_log, self._purge_log = log_path, write, prune, purge
        self._folder = writes_folder(log_path)
        self._in_progress: dict[Call, str] = {}  # the request that is executed now
        self._failed: dict[Call, ZbusError] = {}  # requests that were already in the folder fail with the same error
        self._results: deque[tuple[str, Sequence[Any] | ZbusError]] = deque()
        self._backoff = Backoff(*RETRY_S)
        self._pause_s = CHECK_S
        self._throttle = Throttle()
        self._closed = False
        self._waiting = select.poll()
        self._fifo: int | None = None
        self._fifo_use = threading.Lock()  # the number of a closed file descriptor may be reused for another file
        self._thread = threading.Thread(target=inherit(self._run), name="zbus-log-writes", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Write the results that are known and accept no more requests. Waiting clients execute the rest themselves."""
        self._closed = True
        self._wake()
        self._thread.join(timeout_s)

    def forked(self) -> None:
        """Close the FIFO in a forked process, or clients would believe that an owner reads it."""
        self._closed = True
        if self._fifo is not None:
            os.close(self._fifo)
            self._fifo = None

    def _wake(self) -> None:
        """Wake the thread. Does not block; may be called from any thread, including the event loop's."""
        with self._fifo_use:
            if self._fifo is not None:
                with suppress(BlockingIOError):
                    os.write(self._fifo, b"\0")

    def _done(self, name: str, result: Sequence[int] | ZbusError) -> None:
        """Queue the result of a request to store rows. May be called from any thread."""
        self._finish(name, result if isinstance(result, ZbusError) else (len(result), max(result, default=0)))

    def _finish(self, name: str, result: Sequence[Any] | ZbusError) -> None:
        self._results.append((name, result))
        self._wake()

    # Everything below runs on the server's own thread, except `_remove`.

    def _run(self) -> None:
        self._check_old_folder()
        try:
            self._open()
        except OSError as error:
            # The log itself works. Only other processes cannot write to it while this process owns it.
            path, reason = self._log_path, str(error)
            record_reason("LOG_PROXIED_WRITES_OFF", logging.WARNING, code="proxied_writes_off", reason=reason, log=path)
            return
        try:
            while not self._closed:
                if self._has_folder():
                    self._start_requests()
                self._waiting.poll(1000 * self._pause_s)
                with suppress(BlockingIOError):  # before the folder is listed: a later request wakes this thread again
                    os.read(self._reading, 1 << 16)
                self._write_results()
            self._write_results()
        finally:
            self._use(None)
            with suppress(OSError):
                (self._folder / WAKE).unlink(missing_ok=True)
                self._folder.rmdir()  # fails if requests are left, which keeps them

    def _check_old_folder(self) -> None:
        """Remove the folder of an older zbus if it is empty; otherwise report that its requests are not executed."""
        old = OldFolder(self._log_path)
        try:
            old.remove_if_empty()
            reason, code = old.describe(), "old_requests_left"
        except OSError as error:
            reason, code = str(error), "old_folder_unusable"
        if reason is not None:
            record_reason("LOG_OLD_WRITES_LEFT", logging.WARNING, code=code, reason=reason, log=self._log_path)

    def _open(self) -> None:
        path = self._folder / WAKE
        self._folder.mkdir(exist_ok=True)
        if path.exists() and not stat.S_ISFIFO(path.stat().st_mode):
            path.unlink()
        with suppress(FileExistsError):  # an owner that was killed left it
            os.mkfifo(path, 0o666)
        # Open it for writing too. Otherwise it would be at its end whenever the last client closes it.
        self._use(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def _use(self, fifo: int | None) -> None:
        """Wait for bytes from this FIFO from now on, and close the one before."""
        with self._fifo_use:
            before, self._fifo = self._fifo, fifo
            if before is not None:
                self._waiting.unregister(before)
                os.close(before)
            if fifo is not None:
                self._waiting.register(fifo, select.POLLIN)

    @property
    def _reading(self) -> int:
        assert self._fifo is not None
        return self._fifo

    def _has_folder(self) -> bool:
        """Create the folder and its FIFO again if they were removed: without them no client can wake this thread."""
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._reading), (self._folder / WAKE).stat()):
                return True
        if self._throttle.due("folder"):
            reason = f"{self._folder} was removed or replaced; it is created again"
            code, path = "writes_folder_removed", self._log_path
            record_reason("LOG_PROXIED_WRITES_OFF", logging.WARNING, code=code, reason=reason, log=path)
        return self._attempt(self._open)

    def _start_requests(self) -> None:
        """Start the oldest request of each call, and remove the files of processes that have ended."""
        try:
            paths = sorted(self._folder.iterdir())
        except OSError as error:
            self._report(error)
            return
        names = {path.name for path in paths}
        calls = {call: call.is_alive for call in map(call_of, names) if call is not None}
        # A request that is gone was withdrawn, and a call without files has ended.
        self._in_progress = {call: name for call, name in self._in_progress.items() if name in names}
        self._failed = {call: error for call, error in self._failed.items() if call in calls}
        for path in paths:
            call = call_of(path.name)
            if call is None:
                continue
            has_result = path.with_suffix(RESULT).name in names  # then its client removes both
            if not calls[call]:
                self._attempt(partial(path.unlink, missing_ok=True))
            elif path.suffix in (ROWS, PRUNE, PURGE) and call not in self._in_progress and not has_result:
                self._in_progress[call] = path.name
                self._start(path, call)

    def _start(self, path: Path, call: Call) -> None:
        if call in self._failed:
            self._finish(path.name, self._failed[call])
            return
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return  # the client withdrew it
        except OSError as error:
            self._report(error)
            self._finish(path.name, LogError(f"the owner of {self._log_path} cannot read {path} ({error}); not stored"))
            return
        try:
            if path.suffix == ROWS:
                self._write(decode_rows(data), partial(self._done, path.name), partial(os.path.exists, path))
            else:
                # It may take long, and rows must not wait for it.
                is_prune = path.suffix == PRUNE
                task: Callable[[], Pruned | Purged] = (
                    partial(self._prune_log, decode_rules(data))
                    if is_prune
                    else partial(self._purge_log, decode_keys(data))
                )
                removing = partial(self._remove, path.name, task)
                threading.Thread(target=inherit(removing), name="zbus-log-prune", daemon=True).start()
        except ZbusError as error:
            self._finish(path.name, error)

    def _remove(self, name: str, task: Callable[[], Pruned | Purged]) -> None:
        """Apply retention rules, or purge keys, on a thread of its own."""
        result: Pruned | Purged | ZbusError
        try:
            result = task()
        except ZbusError as error:
            result = error
        except Exception as error:
            result = LogError(f"{self._log_path}: the removal of events failed: {error!r}")
        if not self._closed:
            self._finish(name, result)

    def _write_results(self) -> None:
        """Write the results that are known. Those that cannot be written are kept, and their calls have to wait."""
        kept: list[tuple[str, Sequence[Any] | ZbusError]] = []
        while self._results:
            name, result = self._results.popleft()
            call = call_of(name)
            assert call is not None
            if isinstance(result, ZbusError):
                self._failed[call] = result
            if self._attempt(partial(self._write_result, self._folder / name, result)):
                self._in_progress.pop(call, None)
            else:
                kept.append((name, result))
        self._results.extendleft(reversed(kept))
        if not kept:
            self._backoff.reset()
        self._pause_s = min(CHECK_S, self._backoff.next()) if kept else CHECK_S

    def _write_result(self, request: Path, result: Sequence[Any] | ZbusError) -> None:
        if request.exists():  # otherwise the client withdrew it and does not wait
            write_file(request.with_suffix(RESULT), encode_result(result))
            self._attempt(partial(request.unlink, missing_ok=True))

    def _attempt(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except OSError as error:
            self._report(error)
            return False
        return True

    def _report(self, error: OSError) -> None:
        if self._throttle.due((type(error), error.errno)):
            record("LOG_PROXIED_WRITE_FAILED", logging.WARNING, error, log=self._log_path)
