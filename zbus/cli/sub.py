"""`zbus sub`: print events as they are published, from any process beside the owner of the log."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

import zbus

from .failures import ERROR
from .loop import run
from .options import CountOption, LogOption, StartOption, TimeoutOption, TransportOption
from .reading import open_source
from .render.output import ends_with_its_reader, note
from .render.printer import EventPrinter, print_live


def sub(
    expressions: Annotated[
        list[str],
        typer.Argument(metavar="EXPR", help="Key expressions, such as 'shop/*/created' or 'audit/**'."),
    ],
    log: LogOption = None,
    transport: TransportOption = None,
    start: StartOption = "new",
    durable: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of a durable subscription, which resumes where it stopped."),
    ] = None,
    count: CountOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Print events as they are published: readable lines on a terminal, JSON lines if piped.

    It reads a log, which another process may own, and never writes to it. With --transport it receives the events that
    other nodes publish.
    """
    printer = EventPrinter()
    bus = open_source(log, transport)
    if bus.config.log is None:
        for option, given in (("--from", start != "new"), ("--durable", durable is not None)):
            if given:
                raise typer.BadParameter("a transport has no history: read a log with --log", param_hint=option)
    try:
        run(_sub(printer, bus, expressions, start, durable, count, timeout))
    except KeyboardInterrupt:
        return  # Ctrl-C is the usual end
    except TimeoutError:
        if count is not None:
            note(f"zbus: {printer.printed} of {count} events arrived within {timeout:g} s")
            raise typer.Exit(ERROR) from None


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
