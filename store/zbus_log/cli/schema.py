"""`zbus schema`: the schemas of a log, and validation of its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.table import Table
from sqlalchemy import select

import zbus
from zbus.cli.apps import new_app
from zbus.cli.failures import ERROR, locked_hint
from zbus.cli.options import JsonOption
from zbus.cli.render.eventline import iso_time
from zbus.cli.render.output import encode_json, note, progress, show, write
from zbus.errors import ConfigInvalid, SchemaConflict
from zbus.event import Event
from zbus.keys import KeySet, check_expression
from zbus.ports.log import Schema, Span
from zbus.schema.asyncapi import asyncapi
from zbus.schema.compatibility import differences
from zbus.schema.json_schema import canonical, compile_schema, hash_of, to_json_schema
from zbus.schema.validators import REMOVED, Validators, active_schemas, make_validators
from zbus.util.runtime import REAL
from zbus_log.file.database import log_errors, make_engine
from zbus_log.file.tables import keys
from zbus_log.log import SqliteLog

from .options import LogArgument, check_is_there, opened

PAGE_EVENTS = 2048

app = new_app()

ExpressionArgument = Annotated[
    str, typer.Argument(metavar="EXPR", help="Key expression under which the schema is registered.")
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="File with a JSON Schema.", exists=True, dir_okay=False)
]


@app.command("list")
def list_(
    log: LogArgument,
    every: Annotated[bool, typer.Option("--all", help="List every version, including removed schemas.")] = False,
    json: JsonOption = False,
) -> None:
    """List the active schemas: expression, version, mode, hash, and time of registration."""
    with opened(log, read_only=True) as found:
        versions = found.schemas.load()
    listed = [_as_json(each) for each in (versions if every else active_schemas(versions).values())]
    if json:
        write(b"".join(map(encode_json, listed)))
    elif listed:
        table = Table("expression", "version", "mode", "hash", "registered")
        for each in listed:
            table.add_row(each["expression"], str(each["version"]), each["mode"], each["hash"], each["registered_at"])
        show(table)
    else:
        note(f"{log} has no schemas")


@app.command("show")
def show_(
    log: LogArgument,
    expression: ExpressionArgument,
    version: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Print this version instead of the active one.")
    ] = None,
) -> None:
    """Print the JSON Schema of an expression."""
    with opened(log, read_only=True) as found:
        schema = _find(found.schemas.load(), expression, version)
    write(msgspec.json.format(msgspec.json.encode(schema.schema), indent=2) + b"\n")


@app.command()
def check(
    log: LogArgument,
    expression: Annotated[
        str | None,
        typer.Argument(metavar="EXPR", help="Check a new schema for this expression …", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="… which is in this file.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=0, metavar="N", help="Print at most N invalid events.")
    ] = 10,
) -> None:
    """Validate all stored events against the active schemas; or, with EXPR and FILE, check a new schema.

    Prints the first invalid events, one JSON line each. The exit code is 1 if an event is invalid, or if the new schema
    is not compatible with the active one.
    """
    with opened(log, read_only=True) as found:
        versions = found.schemas.load()
        if expression is not None:
            if file is None:
                raise typer.BadParameter("give EXPR and FILE, or neither", param_hint="FILE")
            _check_next(versions, expression, file)
            return
        checks = make_validators(versions, lambda name, events: None, REAL)
        if checks is None:
            note(f"{log} has no schemas: every event is valid")
            return
        checked, wrong = _check_events(found, checks, list(active_schemas(versions)), limit)
    checked_events = "1 event was" if checked == 1 else f"{checked:,} events were"
    invalid = sum(wrong.values())
    note(f"{checked_events} checked; {invalid:,} {'is' if invalid == 1 else 'are'} invalid")
    for each, events in wrong.items():
        note(f"  {each}: {events:,}")
    if wrong:
        raise typer.Exit(ERROR)


@app.command()
def export(
    log: LogArgument,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Title of the document. Default: the name of the log.")
    ] = None,
) -> None:
    """Print an AsyncAPI 3.0 document of the bus, with a channel for each key and each expression that has a schema."""
    with opened(log, read_only=True) as found:
        schemas = list(active_schemas(found.schemas.load()).values())
        document = asyncapi(title or log.stem, _keys(log), schemas)
    write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


@app.command()
def register(
    log: LogArgument,
    expression: ExpressionArgument,
    file: FileArgument,
    mode: Annotated[str, typer.Option(metavar="MODE", help="Validation mode: strict or permissive.")] = "strict",
    force: Annotated[
        bool, typer.Option("--force", help="Register it even if it rejects payloads that the active schema accepts.")
    ] = False,
) -> None:
    """Register a JSON Schema in a log. If a running process owns the log, register it in that process instead."""
    check_is_there(log)
    with (
        locked_hint("register the schema in that process, or stop it first"),
        zbus.blocking.open(config=zbus.BusConfig.exactly(log=str(log))) as bus,
    ):
        schema = bus.schemas.register(expression, file.read_bytes(), mode=cast("Any", mode), force=force)
    write(encode_json(_as_json(schema)))


def _as_json(schema: Schema) -> dict[str, Any]:
    fields = schema._asdict()
    del fields["schema"], fields["registered_at_ns"]
    return fields | {"registered_at": iso_time(schema.registered_at_ns)}


def _find(versions: Sequence[Schema], expression: str, version: int | None) -> Schema:
    known = [each for each in versions if each.expression == check_expression(expression)]
    if version is not None:
        known = [each for each in known if each.version == version]
    elif known and known[-1].mode == REMOVED:
        known = []
    if not known:
        raise ConfigInvalid("EXPR", f"there is no such schema for {expression!r}; zbus schema list LOG shows them")
    return known[-1]


def _check_next(versions: Sequence[Schema], expression: str, file: Path) -> None:
    """Print the result of registering the schema, without registering it."""
    expression = check_expression(expression)
    schema, _ = to_json_schema(expression, file.read_bytes())
    compile_schema(expression, schema)
    before = active_schemas(versions).get(expression)
    if before is None:
        note(f"{expression!r} has no schema yet: this would be version 1")
    elif before.hash == hash_of(canonical(expression, schema)):
        note(f"this is version {before.version}, the active version")
    elif reasons := differences(before.schema, schema):
        raise SchemaConflict(expression, before.version, before.hash, reasons)
    else:
        note(f"compatible: it accepts everything that version {before.version} accepts")


def _check_events(log: SqliteLog, checks: Validators, expressions: list[str], limit: int) -> tuple[int, dict[str, int]]:
    wrong: dict[str, int] = {}
    checked = printed = 0
    with progress("events") as bar:
        task = bar.add_task("checking", total=log.head())
        for event in _events(log, expressions, lambda at: bar.update(task, completed=at)):
            checked += 1
            reason = checks.first_reason(event.key, event.payload)
            if reason is not None:
                schema, why = reason
                wrong[schema.expression] = wrong.get(schema.expression, 0) + 1
                if printed < limit:
                    printed += 1
                    fields = {"offset": event.offset, "key": event.key, "expression": schema.expression, "reason": why}
                    write(encode_json(fields | {"expected_hash": schema.hash}))
    return checked, wrong


def _events(log: SqliteLog, expressions: list[str], covered: Any) -> Iterator[Event]:
    wanted, span = KeySet(expressions), log.narrow(Span(log.low_water()))
    while span.until is not None and span.after < span.until:
        page = log.read(wanted, span, PAGE_EVENTS)
        events, error, _ = page.events()
        yield from events
        if error is not None:
            raise error
        span = span._replace(after=page.covered)
        covered(page.covered)


def _keys(log: Path) -> list[str]:
    engine = make_engine(str(log), read_only=True)
    try:
        with log_errors(str(log)), engine.connect() as connection:
            return list(connection.scalars(select(keys.c.key)))
    finally:
        engine.dispose()
