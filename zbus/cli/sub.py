"""`zbus sub`: print events as they are published, from any process beside the owner of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    with reporting_timeout(printer, count, timeout):
        try:
            run(print_subscription(bus, printer, expressions, count, timeout, start=start, durable=durable))
        except KeyboardInterrupt:
            return  # Ctrl-C is the usual end


async def print_subscription(
    bus: zbus.Bus,
    printer: EventPrinter,
    expressions: Sequence[str],
    count: int | None,
    timeout_s: float | None,
    **options: Any,
) -> None:
    """Open a bus, subscribe with `options`, and print at most `count` events. Raises `TimeoutError`."""
    async with bus, bus.subscribe(*expressions, **options) as subscriber:
        with ends_with_its_reader():
            async with asyncio.timeout(timeout_s):
                await print_live(subscriber, printer, count)


@contextmanager
def reporting_timeout(printer: EventPrinter, count: int | None, timeout_s: float | None) -> Iterator[None]:
    """End the command when the time is over: with an error if fewer than `count` events arrived."""
    try:
        yield
    except TimeoutError:
        if count is not None:
            note(f"zbus: {printer.printed} of {count} events arrived within {timeout_s:g} s")
            raise typer.Exit(ERROR) from None
