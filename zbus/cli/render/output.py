"""Output: data to stdout, messages and progress to stderr. A command exits with 0 if the reader of stdout closes it."""

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
PIPED_COLUMNS = 1000  # wide enough that rich does not wrap the rows of a table

_encode = msgspec.json.Encoder().encode
_writing = False


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return os.isatty(STDOUT)


def write(data: bytes) -> None:
    """Write `data` to stdout immediately, without Python's buffer, which would retry a failed write at exit."""
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
    """Return whether a write to stdout is in progress, which blocks while the reader does not read."""
    return _writing


def encode_json(value: Any) -> bytes:
    """Return one value as a line of JSON."""
    return _encode(value) + b"\n"


def show(thing: Any) -> None:
    """Write a rich renderable, such as a table, to stdout. It has no colours and no wrapping unless on a terminal."""
    # The data may contain text that rich would interpret as markup.
    console = Console(width=None if is_terminal() else PIPED_COLUMNS, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(thing)
    write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()).encode())


def note(text: str) -> None:
    """Write one message to stderr."""
    os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def progress(unit: str) -> Progress:
    """Return a progress bar on stderr, which is hidden if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Exit when the reader of stdout closes it, even if there is nothing to write."""
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

    # The write end of a pipe becomes readable only when its read end is closed.
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
