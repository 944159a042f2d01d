"""Runs a program in a Python that looks like the one on Windows: `python fake_windows.py -c CODE` or `-m MODULE …`.

It has no modules and functions that only POSIX has. Other libraries are imported first: they would look for the
modules of the real Windows.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import runpy
import select
import signal
import sys
from typing import Any, NoReturn

MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty")
LIBRARIES = ("moka_py", "msgspec", "pydantic", "pydantic_settings", "rich.live", "rich.table", "sqlalchemy", "zenoh")
STANDARD = (
    "asyncio",
    "concurrent.futures.process",
    "ctypes",
    "multiprocessing",
    "ssl",
    "subprocess",
    "tempfile",
    "uuid",
)
FUNCTIONS: dict[Any, tuple[str, ...]] = {
    os: ("fdatasync", "fork", "geteuid", "getuid", "mkfifo", "pread", "pwrite", "register_at_fork", "statvfs", "uname"),
    select: ("epoll", "poll"),
    signal: ("SIGALRM", "SIGHUP", "SIGKILL", "SIGWINCH", "setitimer"),
}
CONSTANTS = ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK")


def pretend() -> None:
    """Make this process look like one on Windows."""
    for name in (*STANDARD, *LIBRARIES, "typer.main"):
        importlib.import_module(name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    for module, names in FUNCTIONS.items():
        for name in names:
            delattr(module, name)
    for name in CONSTANTS:
        delattr(os, name)
    asyncio.SelectorEventLoop.add_signal_handler = _unsupported  # type: ignore[assignment]
    os.kill = _ended  # type: ignore[assignment]
    sys.platform = "win32"


def _unsupported(*_: Any) -> NoReturn:
    raise NotImplementedError


def _ended(pid: int, number: int) -> NoReturn:
    raise AssertionError(f"os.kill({pid}, {number}) ends a process on Windows")


if __name__ == "__main__":
    pretend()
    how, what, *arguments = sys.argv[1:]
    sys.argv = [what, *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<program>", "exec"), {"__name__": "__main__"})
