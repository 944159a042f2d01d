"""The owner's end of errands: what other processes want written is written by the one that may.

A log has one owner. Its bus takes rows from elsewhere like its own, so that subscribers, durable names and other
nodes see them as any others. One thread waits for them in the kernel, at no cost while nobody comes; no socket is
opened for it, since embedded means embedded. It hands rows over and writes answers, and commits go on meanwhile.
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
from zbus.observe.records import record, record_reason
from zbus.ports.log import Answered, Row
from zbus_log.retention import Pruned, Rules

from .write_files import (
    ANSWER,
    RETAIN,
    ROWS,
    WAKE,
    Submitter,
    decode_rows,
    decode_rules,
    encode_answer,
    errands_folder,
    submitter_of,
    write_whole,
)

TAKEN_MAX = 3  # errands under way at a time: they may meet in one commit, and publishers here wait for that


class ProxiedWriteServer:
    """Takes errands from the moment it is made until it is closed. `take` is called on its thread."""

    def __init__(
        self,
        log_path: str,
        take: Callable[[Sequence[Row], Answered], None],
        retain: Callable[[Rules], Pruned],
    ) -> None:
        self._log_path, self._take, self._retain = log_path, take, retain
        self._folder = errands_folder(log_path)
        self._taken: set[str] = set()
        self._results: deque[tuple[str, Sequence[Any] | ZbusError]] = deque()
        self._closed = False
        self._fifo: int | None = None
        self._fifo_use = threading.Lock()  # a number of a file that was closed may be another file's
        self._thread = threading.Thread(target=self._run, name="zbus-log-errands", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Answer what is done and take no more. What is left, those who wait for it do themselves."""
        self._closed = True
        self._wake()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        """From any thread, the event loop's too: it never waits."""
        with self._fifo_use:
            if self._fifo is not None:
                with suppress(BlockingIOError):
                    os.write(self._fifo, b"\0")

    def _done(self, name: str, result: Sequence[int] | ZbusError) -> None:
        """The rows of an errand are stored, or refused; from any thread."""
        answer = result if isinstance(result, ZbusError) else (len(result), max(result, default=0))
        self._results.append((name, answer))
        self._wake()

    # Everything below runs on the thread of errands.

    def _run(self) -> None:
        try:
            fifo = self._open()
        except OSError as error:
            # The log works as ever; only others cannot have anything written while this process owns it.
            path, reason = self._log_path, str(error)
            record_reason("LOG_PROXIED_WRITES_OFF", logging.WARNING, code="proxied_writes_off", reason=reason, log=path)
            return
        waiting = select.poll()
        waiting.register(fifo, select.POLLIN)
        try:
            while not self._closed:
                self._attempt(self._look)
                waiting.poll()
                os.read(fifo, 1 << 16)  # before looking, so that whoever comes later wakes us again
                self._answer_all()
            self._answer_all()
        finally:
            with self._fifo_use:
                self._fifo = None
                os.close(fifo)
            with suppress(OSError):
                (self._folder / WAKE).unlink(missing_ok=True)
                self._folder.rmdir()  # stays where somebody's errand still lies in it

    def _open(self) -> int:
        path = self._folder / WAKE
        self._folder.mkdir(exist_ok=True)
        if path.exists() and not stat.S_ISFIFO(path.stat().st_mode):
            path.unlink()
        with suppress(FileExistsError):  # left by an owner that was killed
            os.mkfifo(path, 0o666)
        # Open for writing too: otherwise it would be at its end whenever the last of the others goes.
        fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with self._fifo_use:
            self._fifo = fifo
        return fifo

    def _look(self) -> None:
        """Take what lies there, oldest first, and remove what the dead left."""
        alive: dict[Submitter, bool] = {}
        for path in sorted(self._folder.iterdir()):
            submitter = submitter_of(path.name)
            if submitter is None:
                continue
            if submitter not in alive:
                alive[submitter] = submitter.lives
            if not alive[submitter]:
                path.unlink(missing_ok=True)
            elif path.suffix in (ROWS, RETAIN) and path.name not in self._taken and len(self._taken) < TAKEN_MAX:
                self._begin(path)

    def _begin(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return  # withdrawn
        self._taken.add(path.name)
        try:
            if path.suffix == ROWS:
                self._take(decode_rows(data), partial(self._done, path.name))
            else:
                # It takes as long as there is to remove, and rows are not to wait for it.
                removing = partial(self._remove, path.name, decode_rules(data))
                threading.Thread(target=removing, name="zbus-log-retain", daemon=True).start()
        except ZbusError as error:
            self._results.append((path.name, error))
            self._wake()

    def _remove(self, name: str, rules: Rules) -> None:
        """On a thread of its own."""
        result: Pruned | ZbusError
        try:
            result = self._retain(rules)
        except ZbusError as error:
            result = error
        except Exception as error:
            result = LogError(f"{self._log_path}: retention failed: {error!r}")
        if not self._closed:
            self._results.append((name, result))
            self._wake()

    def _answer_all(self) -> None:
        while self._results:
            name, result = self._results.popleft()
            self._attempt(partial(self._answer, self._folder / name, result))
            self._taken.discard(name)  # one that could not be answered is done again, which changes nothing

    def _answer(self, errand: Path, result: Sequence[Any] | ZbusError) -> None:
        if errand.exists():  # else it was withdrawn, and nobody waits
            write_whole(errand.with_suffix(ANSWER), encode_answer(result))
            errand.unlink(missing_ok=True)

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            record("LOG_PROXIED_WRITE_FAILED", logging.WARNING, error, log=self._log_path)
