"""`zbus schema`: what is registered for the payloads of a log, and whether its events fit."""

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
from zbus.cli.failures import ERROR
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
from zbus_log.file.database import log_errors, make_engine
from zbus_log.file.tables import keys
from zbus_log.log import SqliteLog

from .options import LogArgument, check_is_there, opened

PAGE_EVENTS = 2048

app = new_app()

ExpressionArgument = Annotated[str, typer.Argument(metavar="EXPR", help="A key expression, as it was registered.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A JSON Schema.", exists=True, dir_okay=False)]


@app.command("list")
def list_(
    log: LogArgument,
    every: Annotated[bool, typer.Option("--all", help="Every version, also of those that were removed.")] = False,
    json: JsonOption = False,
) -> None:
    """List the schemas in force: expression, version, mode, hash, and since when."""
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
    version: Annotated[int | None, typer.Option(min=1, metavar="N", help="An older one than that in force.")] = None,
) -> None:
    """Print the JSON Schema of an expression."""
    with opened(log, read_only=True) as found:
        schema = _find(found.schemas.load(), expression, version)
    write(msgspec.json.format(msgspec.json.encode(schema.schema), indent=2) + b"\n")


@app.command()
def check(
    log: LogArgument,
    expression: Annotated[
        str | None, typer.Argument(metavar="[EXPR", help="Check a schema for this expression …", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE]", help="… in this file.", exists=True, dir_okay=False, show_default=False),
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=0, help="Print so many of the events that do not fit.")
    ] = 10,
) -> None:
    """Hold every stored event against the schemas in force; or, with EXPR and FILE, say whether a schema could follow.

    Exit code 1 if an event does not fit, or if the schema would be refused. A JSON line on stdout for each of the first
    events that do not fit.
    """
    with opened(log, read_only=True) as found:
        versions = found.schemas.load()
        if expression is not None:
            if file is None:
                raise typer.BadParameter("give EXPR and FILE, or neither", param_hint="FILE")
            _check_next(versions, expression, file)
            return
        checks = make_validators(versions, lambda name, events: None)
        if checks is None:
            note(f"{log} has no schemas: every event fits")
            return
        checked, wrong = _check_events(found, checks, list(active_schemas(versions)), limit)
    note(f"{checked:,} events were checked; {sum(wrong.values()):,} do not fit")
    for each, events in wrong.items():
        note(f"  {each}: {events:,}")
    if wrong:
        raise typer.Exit(ERROR)


@app.command()
def export(
    log: LogArgument,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="The title; default: the log's name.")] = None,
) -> None:
    """Print an AsyncAPI 3.0 document of the whole bus: a channel for each key and for each expression with a schema."""
    with opened(log, read_only=True) as found:
        schemas = list(active_schemas(found.schemas.load()).values())
        document = asyncapi(title or log.stem, _keys(log), schemas)
    write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


@app.command()
def register(
    log: LogArgument,
    expression: ExpressionArgument,
    file: FileArgument,
    mode: Annotated[str, typer.Option(metavar="MODE", help="strict, or permissive.")] = "strict",
    force: Annotated[bool, typer.Option("--force", help="Also where it refuses what was accepted before.")] = False,
) -> None:
    """Register a JSON Schema in a log that no running process owns; one that does registers it itself."""
    check_is_there(log)
    with zbus.blocking.open(config=zbus.BusConfig.exactly(log=str(log))) as bus:
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
    """What registering would say, without registering."""
    expression = check_expression(expression)
    schema, _ = to_json_schema(expression, file.read_bytes())
    compile_schema(expression, schema)
    before = active_schemas(versions).get(expression)
    if before is None:
        note(f"{expression!r} has no schema yet: this would be the first")
    elif before.hash == hash_of(canonical(expression, schema)):
        note(f"this is version {before.version}, which is in force")
    elif reasons := differences(before.schema, schema):
        raise SchemaConflict(expression, before.version, before.hash, reasons)
    else:
        note(f"it accepts all that version {before.version} accepts, and may follow it")


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
            return [key.decode() if isinstance(key, bytes) else key for key in connection.scalars(select(keys.c.key))]
    finally:
        engine.dispose()
