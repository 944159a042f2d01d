"""`zbus monitor`: look into the stream of events: filters, full payloads of some keys, schemas, and records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

import zbus
from zbus.cli.failures import ERROR
from zbus.cli.options import CountOption, LogOption, StartOption, TimeoutOption, TransportOption
from zbus.cli.reading import open_to_hear
from zbus.cli.render.dump import dump
from zbus.cli.render.eventline import json_line, printable, readable_head, readable_line
from zbus.cli.render.output import ends_with_its_reader, note
from zbus.cli.render.printer import EventPrinter, print_live
from zbus.cli.serving import serve
from zbus.errors import ConfigInvalid
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.records import RECORDS

from .filters import EventFilter, parse_pattern, parse_publisher, parse_tag
from .verdicts import SchemaChecker

QUEUE_EVENTS = 10_000


class MonitorPrinter(EventPrinter):
    """Prints what passes: in full what is to be dumped, a line of everything else, and what its schema says."""

    def __init__(
        self, wanted: EventFilter, dumped: Sequence[str], as_json: bool | None, verdicts: SchemaChecker
    ) -> None:
        super().__init__(False if dumped and not as_json else as_json)
        self._wanted, self._verdicts = wanted, verdicts
        self._dumped = KeySet(dumped) if dumped else None

    async def prepare(self) -> None:
        """Look at the schemas again, now and then."""
        await self._verdicts.look()

    def add(self, event: Event) -> None:
        """Print an event, if it passes."""
        if event.key.startswith(RECORDS):
            self._add_record(event)
        elif self._wanted.passes(event):
            verdict = self._verdicts.of(event)
            if self.as_json:
                self.print(json_line(event, **({} if verdict is None else {"schema": verdict})))
            else:
                self._add_text(event, verdict)
            self.printed += 1

    def _add_text(self, event: Event, verdict: dict[str, Any] | None) -> None:
        full = self._dumped is not None and event.key in self._dumped
        line = readable_head(event) if full else readable_line(event)
        if verdict is not None:
            line.append(*_said(verdict))
        self.print(line)
        if full:
            publisher = f"publisher {event.publisher_id} sequence {event.sequence}"
            self.print(Text(f"  {publisher}, {len(event.payload):,} bytes", "dim"))
            for each in dump(event.payload):
                self.print(Text(f"  {each}"))

    def _add_record(self, event: Event) -> None:
        """A record is no event of the application's: no filter is for it, and it is not counted."""
        if self.as_json:
            self.print(json_line(event))
        else:
            self.print(Text("record ", "yellow").append_text(readable_line(event)))


def monitor(
    expressions: Annotated[
        list[str] | None,
        typer.Argument(metavar="EXPR", help="Key expressions, such as 'shop/*/created'; default: '**'."),
    ] = None,
    log: LogOption = None,
    transport: TransportOption = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only with this header; NAME alone: any value.")
    ] = None,
    publisher: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only of this publisher; given again: or of that one.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only where this is found in the payload; (?i) ignores case.")
    ] = None,
    dumped: Annotated[
        list[str] | None,
        typer.Option("--dump", metavar="EXPR", help="Show the full payload of these keys: JSON, text, or hex."),
    ] = None,
    system_events: Annotated[
        bool, typer.Option("--system-events", help="Also show the system events of nodes. Needs --transport.")
    ] = False,
    start: StartOption = "new",
    count: CountOption = None,
    timeout: TimeoutOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="JSON lines; the default where stdout is no terminal and nothing is dumped.")
    ] = False,
) -> None:
    """Watch events as they are published: filtered, payloads in full where asked for, each held to its schema.

    It reads the log of another process (or one that nobody owns) and never writes to it; or, with a transport, it
    hears what other nodes publish. Where a schema is registered for a key, it tells whether the payload fits.
    """
    if json and dumped:
        raise typer.BadParameter("JSON lines have every payload in full: leave out --dump", param_hint="--json")
    tags, publishers = [parse_tag(each) for each in header or ()], [parse_publisher(each) for each in publisher or ()]
    wanted = EventFilter(tags, publishers, None if grep is None else parse_pattern(grep))
    bus = open_to_hear(log, transport)
    if system_events and not bus.config.networked:
        raise ConfigInvalid("system-events", "a log does not contain them: give --transport URL")
    printer = MonitorPrinter(wanted, dumped or (), json or None, SchemaChecker(bus))
    keys = [*(expressions or ["**"]), *([f"{RECORDS}**"] if system_events else [])]
    try:
        serve(_monitor(printer, bus, keys, start, count, timeout))
    except TimeoutError:
        if count is not None:
            note(f"zbus: {printer.printed} of {count} events came within {timeout:g} s")
            raise typer.Exit(ERROR) from None


async def _monitor(
    printer: MonitorPrinter,
    bus: zbus.Bus,
    keys: Sequence[str],
    start: Any,
    count: int | None,
    timeout_s: float | None,
) -> None:
    async with bus, bus.subscribe(*keys, start=start, queue_events=QUEUE_EVENTS) as subscriber:
        with ends_with_its_reader():
            async with asyncio.timeout(timeout_s):
                await print_live(subscriber, printer, count)


def _said(verdict: dict[str, Any]) -> tuple[str, str]:
    """The words for a verdict, and their colour."""
    schema = f"{printable(verdict['expression'])} v{verdict['version']}"
    if verdict["valid"]:
        return f" [fits {schema}]", "green"
    return f" [does not fit {schema}: {printable(verdict['reason'])}]", "bold red"
