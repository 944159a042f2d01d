"""`zbus monitor`: live events with filters, full payloads, schema validation and system events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from zbus.cli.options import CountOption, LogOption, StartOption, TimeoutOption, TransportOption
from zbus.cli.reading import open_source
from zbus.cli.render.dump import dump
from zbus.cli.render.eventline import json_line, printable, readable_head, readable_line
from zbus.cli.render.printer import EventPrinter
from zbus.cli.serving import serve
from zbus.cli.sub import print_subscription, reporting_timeout
from zbus.errors import ConfigInvalid
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.records import RECORDS

from .filters import EventFilter, parse_pattern, parse_publisher, parse_tag
from .verdicts import SchemaChecker

QUEUE_EVENTS = 10_000


class MonitorPrinter(EventPrinter):
    """Prints the events that pass the filter, in full or as one line, with the result of their schema."""

    def __init__(
        self, wanted: EventFilter, dumped: Sequence[str], as_json: bool | None, verdicts: SchemaChecker
    ) -> None:
        super().__init__(False if dumped and not as_json else as_json)
        self._wanted, self._verdicts = wanted, verdicts
        self._dumped = KeySet(dumped) if dumped else None

    async def prepare(self) -> None:
        """Reload the schemas if that is due."""
        await self._verdicts.look()

    def add(self, event: Event) -> None:
        """Print an event if it passes the filter."""
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
            line.append(*_described(verdict))
        self.print(line)
        if full:
            publisher = f"publisher {event.publisher_id} sequence {event.sequence}"
            self.print(Text(f"  {publisher}, {len(event.payload):,} bytes", "dim"))
            for each in dump(event.payload):
                self.print(Text(f"  {each}"))

    def _add_record(self, event: Event) -> None:
        """Print a system event. Filters do not apply to it, and it does not count."""
        if self.as_json:
            self.print(json_line(event))
        else:
            self.print(Text("record ", "yellow").append_text(readable_line(event)))


def monitor(
    expressions: Annotated[
        list[str] | None,
        typer.Argument(metavar="EXPR", help="Key expressions, such as 'shop/*/created'. Default: '**'."),
    ] = None,
    log: LogOption = None,
    transport: TransportOption = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Only show events with this header. NAME matches any value."),
    ] = None,
    publisher: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only show events of this publisher. Repeatable.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only show events whose payload matches; (?i) ignores case.")
    ] = None,
    dumped: Annotated[
        list[str] | None,
        typer.Option("--dump", metavar="EXPR", help="Show full payloads of matching keys as JSON, text or hex."),
    ] = None,
    system_events: Annotated[
        bool, typer.Option("--system-events", help="Also show the system events of nodes. Needs --transport.")
    ] = False,
    start: StartOption = "new",
    count: CountOption = None,
    timeout: TimeoutOption = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON lines. Default if stdout is not a terminal and --dump is not given."),
    ] = False,
) -> None:
    """Watch live events, with filters, optional full payloads and schema validation.

    It reads a log, which another process may own, and never writes to it. With --transport it receives the events that
    other nodes publish. If a schema is registered for a key, each event shows whether its payload is valid.
    """
    if json and dumped:
        raise typer.BadParameter("JSON lines contain the full payloads: leave out --dump", param_hint="--json")
    tags, publishers = [parse_tag(each) for each in header or ()], [parse_publisher(each) for each in publisher or ()]
    wanted = EventFilter(tags, publishers, None if grep is None else parse_pattern(grep))
    bus = open_source(log, transport)
    if system_events and not bus.config.networked:
        raise ConfigInvalid("system-events", "a log does not contain them: give --transport URL")
    printer = MonitorPrinter(wanted, dumped or (), json or None, SchemaChecker(bus))
    keys = [*(expressions or ["**"]), *([f"{RECORDS}**"] if system_events else [])]
    with reporting_timeout(printer, count, timeout):
        serve(print_subscription(bus, printer, keys, count, timeout, start=start, queue_events=QUEUE_EVENTS))


def _described(verdict: dict[str, Any]) -> tuple[str, str]:
    """Return the text of a schema result, and its colour."""
    schema = f"{printable(verdict['expression'])} v{verdict['version']}"
    if verdict["valid"]:
        return f" [valid: {schema}]", "green"
    return f" [invalid: {schema}: {printable(verdict['reason'])}]", "bold red"
