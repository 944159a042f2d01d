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
from .options import LogOption, TransportOption
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
    transport: TransportOption = None,
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

    It reads the log of another process (or one that nobody owns) and never writes to it; or, with a
    transport, what other nodes publish.
    """
    if log is not None and transport is not None:
        raise typer.BadParameter("read a log, or hear a transport: give one of them", param_hint="--transport")
    printer = EventPrinter()
    bus = _open(log, transport)
    try:
        run(_sub(printer, bus, expressions, start, durable, count, timeout))
    except KeyboardInterrupt:
        return  # this is how one ends it
    except TimeoutError:
        if count is not None:
            note(f"zbus: {printer.printed} of {count} events came within {timeout:g} s")
            raise typer.Exit(ERROR) from None


def _open(log: Path | None, transport: str | None) -> zbus.Bus:
    if log is not None:
        return open_to_read(log)
    bus = zbus.open(check_schemas=False, **({"transport": transport} if transport else {}))
    if bus.config.log is None and not bus.config.networked:
        reason = "without one there is nothing to read: give --log PATH (or ZBUS_LOG), or --transport URL"
        raise ConfigInvalid("log", reason)
    return bus


async def _sub(
    printer: EventPrinter,
    bus: zbus.Bus,
    expressions: list[str],
    start: Any,
    durable: str | None,
    count: int | None,
    timeout_s: float | None,
) -> None:
    async with bus, bus.subscribe(*expressions, start=start, durable=durable) as subscriber:
        with ends_with_its_reader():
            async with asyncio.timeout(timeout_s):
                await print_live(subscriber, printer, count)
