"""`zbus sub`: print the events of some keys as they are published, from another process than the log's owner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

import zbus
from zbus.errors import ConfigInvalid

from .failures import ERROR
from .loop import run
from .options import LogOption
from .output import ends_with_its_reader, note
from .printer import EventPrinter, print_live
from .reading import open_to_read
from .values import parse_start


def sub(
    expressions: Annotated[
        list[str],
        typer.Argument(metavar="EXPR", help="Key expressions, such as 'shop/*/created' or 'audit/**'."),
    ],
    log: LogOption = None,
    start: Annotated[
        Any,
        typer.Option(
            "--from",
            parser=parse_start,
            metavar="START",
            help="Where to start: new, beginning, an offset, an ISO time, or an age such as -10m.",
        ),
    ] = "new",
    durable: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Keep the position under this name, and resume after it the next time."),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after so many events.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="End after this time; exit code 1 if --count was not reached."),
    ] = None,
) -> None:
    """Print events as they are published: a JSON line for each when piped, readable lines on a terminal.

    It reads the log of another process (or one that nobody owns) and never writes to it.
    """
    printer = EventPrinter()
    try:
        run(_sub(printer, expressions, log, start, durable, count, timeout))
    except KeyboardInterrupt:
        return  # this is how one ends it
    except TimeoutError:
        if count is not None:
            note(f"zbus: {printer.printed} of {count} events came within {timeout:g} s")
            raise typer.Exit(ERROR) from None


async def _sub(
    printer: EventPrinter,
    expressions: list[str],
    log: Path | None,
    start: Any,
    durable: str | None,
    count: int | None,
    timeout_s: float | None,
) -> None:
    bus = zbus.open() if log is None else open_to_read(log)
    if bus.config.log is None and bus.config.mode == "embedded":
        raise ConfigInvalid("log", "without one there is nothing to read: give --log PATH, or set ZBUS_LOG")
    async with bus, bus.subscribe(*expressions, start=start, durable=durable) as subscriber:
        with ends_with_its_reader():
            async with asyncio.timeout(timeout_s):
                await print_live(subscriber, printer, count)
