"""A terminal for a command: a pty that is the controlling terminal of its process, and what was shown on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

WAIT_S = 60.0
COMMAND = [sys.executable, "-m", "zbus"]
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("ZBUS_") and name not in ("NO_COLOR", "CI")
} | {"TERM": "xterm-256color", "PYTHONUTF8": "1"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Terminal:
    """`with Terminal("top", log) as terminal: terminal.wait_for("zbus top")`."""

    def __init__(self, *arguments: object, rows: int = 24, columns: int = 100) -> None:
        self._ours, self.theirs = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.theirs)
        self.raw = b""
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT | {"COLUMNS": "", "LINES": ""},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._ours)
        os.close(self.theirs)

    @property
    def text(self) -> str:
        """What was shown so far, without colours and movements."""
        return plain(self.raw)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, found: str | Callable[[str], Any], since: int = 0) -> str:
        """Read until what was shown after the first `since` bytes has a text, or fulfils a condition."""
        deadline = time.monotonic() + WAIT_S
        while True:
            shown = plain(self.raw[since:])
            if found in shown if isinstance(found, str) else found(shown):
                return shown
            assert time.monotonic() < deadline, f"not shown: {found!r}; there is: {shown[-4000:]}"
            if not self._read(0.2) and self.process.poll() is not None and not self._read(0):
                raise AssertionError(f"it ended with {self.process.returncode}: {shown[-4000:]}")

    def wait(self) -> int:
        """Read to the end of the process; its exit code."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end; there is: {self.text[-4000:]}"
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def _read(self, timeout_s: float) -> bytes:
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return b""
        chunk = os.read(self._ours, 65536)
        self.raw += chunk
        return chunk


def plain(raw: bytes) -> str:
    return _ESCAPES.sub("", raw.decode(errors="replace"))
