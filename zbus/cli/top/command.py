"""`zbus top`: live rates, lag and drops, as a full screen on a terminal, as lines if piped, or as JSON."""

from __future__ import annotations

import asyncio
import signal
import sys
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

ONCE_COLUMNS, ONCE_LINES = 120, 60  # a single frame is not limited to the size of a screen


class FrameSource(Protocol):
    """A source of frames."""

    def frames(self) -> AsyncGenerator[Frame, None]:
        """Yield about one frame per second."""


def top(
    log: Annotated[
        str | None, typer.Argument(metavar="LOG", help="Path or URL of the log to follow. Default: ZBUS_LOG.")
    ] = None,
    transport: TransportOption = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of a running `zbus serve`, such as http://127.0.0.1:7480.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File whose first line is a token of the server at --url.")
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            min=0.1, max=3600, metavar="SECONDS", help="Time between frames. A server at --url sends one per second."
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per frame.")] = False,
) -> None:
    """Watch a bus: rates of published, delivered and dropped events, the busiest keys, cursor lag, and nodes.

    On a terminal it uses the full screen and quits on q. If piped, it prints one line per frame. The deliveries, drops
    and commits of the log's owner are only available with --url, and are shown as - otherwise.
    """
    source = _source(log, transport, url, token_file, interval)
    if json or once or not is_terminal():
        serve(_print(source, _as_json if json else _as_table if once else _as_line, once))
    else:
        serve(_watch(source))


def _source(
    log: str | None, transport: str | None, url: str | None, token_file: Path | None, interval_s: float
) -> FrameSource:
    if [log, transport, url].count(None) < 2:
        raise typer.BadParameter("give only one of LOG, --transport and --url")
    if token_file is not None and url is None:
        raise typer.BadParameter("--token-file needs --url URL", param_hint="--token-file")
    if url is not None:
        return UrlFrames(url, None if token_file is None else _token(token_file))
    if log is None and transport is None:
        log = configured_log()
    if log is not None:
        return BusFrames(open_to_read(log), log, interval_s)
    bus = open_networked(transport, node="zbus top")
    if not bus.config.networked:
        raise ConfigInvalid("log", "there is nothing to watch: give LOG (or ZBUS_LOG), --transport URL or --url URL")
    name = (transport or "transport").partition("://")[0]  # a URL may contain a password
    return BusFrames(bus, name, interval_s)


def _token(path: Path) -> str:
    try:
        found = (path.read_text().splitlines() or [""])[0].strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigInvalid("token_file", f"{path}: {reason}") from None
    if not found or not found.isascii() or not found.isprintable():
        raise ConfigInvalid("token_file", f"{path}: its first line must be a token of printable ASCII characters")
    return found


async def _print(source: FrameSource, print_one: Callable[[Frame], None], once: bool) -> None:
    with ends_with_its_reader():
        async with aclosing(source.frames()) as frames:
            async for frame in frames:
                print_one(frame)
                if once:
                    return


async def _watch(source: FrameSource) -> None:
    """Show the screen until q or Ctrl-C."""
    console = Console(markup=False, emoji=False, highlight=False)
    ended = asyncio.Event()
    last: Frame | None = None

    with keys(lambda key: ended.set() if key in "qQ" else None) as has_keyboard:
        hint = "q quits" if has_keyboard else "Ctrl-C quits"
        with Live("waiting for the first metrics …", console=console, screen=True, auto_refresh=False) as live:

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
    """Redraw when the terminal is resized."""
    loop = asyncio.get_running_loop()
    if sys.platform == "win32":  # it has no such signal
        yield
        return
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
