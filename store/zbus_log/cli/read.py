"""`zbus log tail` and `zbus log replay`: print the last events of a log, or any range of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import zbus
from zbus.cli.loop import run
from zbus.cli.reading import open_to_read
from zbus.cli.render.output import ends_with_its_reader, note
from zbus.cli.render.printer import EventPrinter, print_live, print_stored
from zbus.cli.render.values import parse_position
from zbus.introspection import of

from .options import KeyOption, LogArgument, check_is_there

LOOK_BACK = 4  # offsets to search per requested event; doubled until enough events are found


def tail(
    log: LogArgument,
    number: Annotated[int, typer.Option("-n", "--number", min=0, metavar="N", help="Print the last N events.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events as they are stored.")
    ] = False,
    key: KeyOption = None,
) -> None:
    """Print the last events of a log and, with --follow, new events as they are stored."""
    check_is_there(log)
    try:
        run(_tail(log, number, follow, key or ["**"]))
    except KeyboardInterrupt:
        if not follow:
            raise


def replay(
    log: LogArgument,
    key: KeyOption = None,
    after: Annotated[
        Any,
        typer.Option(
            parser=parse_position, metavar="POSITION", help="Start after this offset, ISO time, or age such as -10m."
        ),
    ] = "0",
    until: Annotated[
        Any, typer.Option(parser=parse_position, metavar="POSITION", help="Stop at this offset, ISO time or age.")
    ] = None,
    skip_corrupt: Annotated[
        bool, typer.Option("--skip-corrupt", help="Skip events that fail their checksum, and print how many.")
    ] = False,
) -> None:
    """Print stored events: readable lines on a terminal, JSON lines if piped."""
    check_is_there(log)
    run(_replay(log, key or ["**"], after, until, skip_corrupt))


async def _replay(log: Path, keys: list[str], after: Any, until: Any, skip_corrupt: bool) -> None:
    async with open_to_read(log) as bus:
        events = bus.replay(*keys, after=after, until=until, skip_corrupt=skip_corrupt)
        await print_stored(events, EventPrinter())
        if skipped := bus.stats().get("corrupt_skipped"):
            note(f"zbus: {skipped} corrupt events were skipped; zbus log verify {log} lists them")


async def _tail(log: Path, number: int, follow: bool, keys: list[str]) -> None:
    async with open_to_read(log) as bus:
        head, printer = await bus.head(), EventPrinter()
        for event in await _last(bus, keys, number, head):
            printer.add(event)
        printer.flush()
        if follow:
            async with bus.subscribe(*keys, start=head + 1) as subscriber:
                with ends_with_its_reader():
                    await print_live(subscriber, printer)


async def _last(bus: zbus.Bus, keys: list[str], number: int, head: int) -> list[zbus.Event]:
    """Return the last events of some keys. It searches further back until it finds enough or reaches the start."""
    low_water = await (reader := of(bus).reader).run(reader.required("tail").low_water)
    found: list[zbus.Event] = []
    reach = LOOK_BACK * number
    while number:
        after = max(low_water, head - reach)
        found = [event async for event in bus.replay(*keys, after=after, until=head)]
        if len(found) >= number or after == low_water:
            break
        reach *= 2
    return found[-number:] if number else []
