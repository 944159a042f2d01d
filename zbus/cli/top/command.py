"""`zbus top`: rates, lag and drops, live in a terminal; lines where they are piped, JSON for programs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.live import Live

from zbus.cli.options import TransportOption
from zbus.cli.reading import configured_log, open_networked, open_to_read
from zbus.cli.render.output import encode_json, ends_with_its_reader, is_terminal, show, write
from zbus.cli.serving import serve
from zbus.errors import ConfigInvalid

from .bus import BusFrames
from .frame import Frame
from .keyboard import keys
from .screen import line, screen
from .url import UrlFrames

ONCE_COLUMNS, ONCE_LINES = 120, 60  # of a single frame there is more to see than fits on a screen


class FrameSource(Protocol):
    """Where frames come from."""

    def frames(self) -> AsyncGenerator[Frame, None]:
        """One after the other, about one a second."""


def top(
    log: Annotated[
        Path | None, typer.Argument(metavar="LOG", help="The log to follow, beside its owner; default: ZBUS_LOG.")
    ] = None,
    transport: TransportOption = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running `zbus serve`, such as http://127.0.0.1:7480.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --url: a file whose first line is a token of the server.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="How often to look; a server tells each second.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A JSON object for each frame, on one line.")] = False,
) -> None:
    """Watch a bus: what is published, delivered and dropped, the busiest keys, who is behind, and who is there.

    On a terminal it fills the screen, and q ends it; piped, it prints a line for each frame. A log is only read: what
    happens inside its owner (deliveries, drops, commits) can be seen with --url alone, and is shown as - otherwise.
    """
    source = _source(log, transport, url, token_file, interval)
    if json or once or not is_terminal():
        serve(_print(source, _as_json if json else _as_table if once else _as_line, once))
    else:
        serve(_watch(source))


def _source(
    log: Path | None, transport: str | None, url: str | None, token_file: Path | None, interval_s: float
) -> FrameSource:
    if [log, transport, url].count(None) < 2:
        raise typer.BadParameter("follow a log, hear a transport, or ask a server: give one of them")
    if token_file is not None and url is None:
        raise typer.BadParameter("a token is for a server: give --url URL", param_hint="--token-file")
    if url is not None:
        return UrlFrames(url, None if token_file is None else _token(token_file))
    log = log or (configured_log() if transport is None else None)
    if log is not None:
        return BusFrames(open_to_read(log), str(log), interval_s)
    bus = open_networked(transport, node="zbus top")
    if not bus.config.networked:
        raise ConfigInvalid("log", "there is nothing to look at: give LOG (or ZBUS_LOG), --transport URL or --url URL")
    name = (transport or "transport").partition("://")[0]  # a URL may hold a password
    return BusFrames(bus, name, interval_s)


def _token(path: Path) -> str:
    try:
        found = (path.read_text().splitlines() or [""])[0].strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds no text"
        raise ConfigInvalid("token_file", f"{path}: {reason}") from None
    if not found or not found.isascii() or not found.isprintable():
        raise ConfigInvalid("token_file", f"{path}: its first line is no token")
    return found


async def _print(source: FrameSource, print_one: Callable[[Frame], None], once: bool) -> None:
    with ends_with_its_reader():
        async with aclosing(source.frames()) as frames:
            async for frame in frames:
                print_one(frame)
                if once:
                    return


async def _watch(source: FrameSource) -> None:
    """The screen, until q or Ctrl-C."""
    console = Console(markup=False, emoji=False, highlight=False)
    ended = asyncio.Event()
    last: Frame | None = None

    with keys(lambda key: ended.set() if key in "qQ" else None) as has_keyboard:
        hint = "q quits" if has_keyboard else "Ctrl-C quits"
        with Live("waiting for the first figures …", console=console, screen=True, auto_refresh=False) as live:

            def draw() -> None:
                if last is not None:
                    live.update(screen(last, console.width, console.height, hint), refresh=True)

            async def follow() -> None:
                nonlocal last
                async with aclosing(source.frames()) as frames:
                    async for frame in frames:
                        last = frame
                        draw()

            live.refresh()
            with _resized(draw):
                following = asyncio.create_task(follow())
                quitting = asyncio.create_task(ended.wait())
                try:
                    await asyncio.wait((following, quitting), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (following, quitting):
                        task.cancel()
                    results = await asyncio.gather(following, quitting, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]


@contextmanager
def _resized(draw: Callable[[], None]) -> Iterator[None]:
    """Draw anew when the terminal has another size."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, draw)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


def _as_json(frame: Frame) -> None:
    write(encode_json(frame))


def _as_line(frame: Frame) -> None:
    write(f"{line(frame)}\n".encode(errors="backslashreplace"))


def _as_table(frame: Frame) -> None:
    show(screen(frame, ONCE_COLUMNS, ONCE_LINES, "", wide=False))
