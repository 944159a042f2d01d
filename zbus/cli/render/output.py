"""Where output goes: data to stdout, prose and progress to stderr. A reader that goes away ends a command quietly."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

STDOUT = 1
PIPED_COLUMNS = 1000  # rows of a table are not to be folded for a program

_encode = msgspec.json.Encoder().encode
_writing = False


def is_terminal() -> bool:
    """Whether a person reads stdout."""
    return os.isatty(STDOUT)


def write(data: bytes) -> None:
    """All of `data` to stdout, now. Past Python's buffer, which would try again at exit what failed here."""
    global _writing
    rest = memoryview(data)
    try:
        _writing = True
        while rest:
            rest = rest[os.write(STDOUT, rest) :]
    except BrokenPipeError:
        _end_quietly()
    finally:
        _writing = False


def is_writing() -> bool:
    """Whether this very moment waits for whoever reads stdout."""
    return _writing


def encode_json(value: Any) -> bytes:
    """One value as one line of JSON."""
    return _encode(value) + b"\n"


def show(thing: Any) -> None:
    """Something of rich's, such as a table, to stdout; without colours and folding where that is no terminal."""
    # Data may hold what rich would take for markup.
    console = Console(width=None if is_terminal() else PIPED_COLUMNS, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(thing)
    write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()).encode())


def note(text: str) -> None:
    """One line of prose for people."""
    os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def progress(unit: str) -> Progress:
    """A progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """End the current task when whoever reads stdout is gone, also while there is nothing to write."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if task is None or not stat.S_ISFIFO(os.fstat(STDOUT).st_mode):
        yield
        return
    gone = False

    def end() -> None:
        nonlocal gone
        gone = True
        loop.remove_reader(STDOUT)
        task.cancel()

    # Nothing can be read from this end of a pipe, so the loop calls `end` only when the other end is closed.
    loop.add_reader(STDOUT, end)
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            _end_quietly()
        raise
    finally:
        loop.remove_reader(STDOUT)


def _end_quietly() -> NoReturn:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.close(nowhere)
    raise typer.Exit(0)
