"""`zbus bridge`: bridges between transports as a process. Its first line on stdout says that events cross."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbus.errors import ConfigInvalid, ZbusError

from .options import JsonOption
from .render.output import encode_json, note, write
from .render.values import parse_age, parse_size
from .serving import serve

if TYPE_CHECKING:
    from zbus.bridge.bridge import Bridge
    from zbus.bridge.config import BridgeConfig


class Direction(StrEnum):
    """Which way events cross."""

    both = "both"
    forth = "forth"
    back = "back"


def bridge(
    between: Annotated[
        tuple[str, str] | None, typer.Option(metavar="URL URL", help="The two transports, such as nats://… zenoh://….")
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option(metavar="EXPR", help="What crosses, such as 'shop/**'; may be given again.")
    ] = None,
    direction: Annotated[Direction, typer.Option(help="forth: only from the first to the second.")] = Direction.both,
    raw: Annotated[
        bool, typer.Option("--raw", help="nats and zmq carry plain messages of programs that know nothing of zbus.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The bridge's own log: nothing is lost while a side is away."),
    ] = None,
    retain_age: Annotated[
        Any, typer.Option(parser=parse_age, metavar="AGE", help="Remove what is older from the log, such as 7d.")
    ] = None,
    retain_size: Annotated[
        Any, typer.Option(parser=parse_size, metavar="SIZE", help="Keep the log under this size, such as 10G.")
    ] = None,
    name: Annotated[str, typer.Option(help="What the bridge is called in reports.")] = "",
    mode: Annotated[str | None, typer.Option(help="peer, client or router, for the side that is zenoh.")] = None,
    listen: Annotated[
        list[str] | None, typer.Option(metavar="ENDPOINT", help="Where the zenoh side listens: tcp/127.0.0.1:7447.")
    ] = None,
    connect: Annotated[
        list[str] | None, typer.Option(metavar="ENDPOINT", help="What the zenoh side connects to.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file of several bridges, instead of the above.")
    ] = None,
    report_s: Annotated[float, typer.Option(min=0, help="How often to report; 0: never.")] = 5.0,
    json: JsonOption = False,
) -> None:
    """Carry events between two transports, keeping their identity.

    The first line on stdout is JSON: when it is there, events cross. Reports of what crossed go to stderr, or with
    --json to stdout, a line for each bridge. Ctrl-C and SIGTERM end it.

    A file holds an array of tables named "bridge", each with between, keys, and what else the options here say.
    """
    from zbus.bridge.config import BridgeConfig, load_bridges

    if config is not None:
        alone = (between, keys, raw, log, retain_age, retain_size, name, mode, listen, connect)
        if any(alone) or direction is not Direction.both:
            raise ConfigInvalid("config", "a file says all of it: give --config alone, or no file")
        configs = load_bridges(config)
    elif between is None or not keys:
        raise ConfigInvalid("between", "give --between URL URL and --keys EXPR, or --config FILE")
    else:
        given: dict[str, Any] = {"listen": listen or (), "connect": connect or (), "mode": mode, "name": name}
        given |= {"retain_age_s": retain_age, "retain_bytes": retain_size}
        path = str(log) if log is not None else None
        configs = [BridgeConfig(between=between, keys=keys, direction=direction.value, raw=raw, log=path, **given)]
    serve(_run(configs, report_s, json))


async def _run(configs: list[BridgeConfig], report_s: float, json: bool) -> None:
    from zbus.bridge.bridge import Bridge

    bridges: list[Bridge] = []
    async with AsyncExitStack() as running:
        for each in configs:
            made = Bridge.of(each)
            try:
                await running.enter_async_context(made)
            except ZbusError as error:
                error.add_note(f"bridge {made.name}")
                raise
            note(f"{made.name}: {made.promise}")
            bridges.append(made)
        ready = [{"bridge": made.name, "durable": made.durable, "keys": list(made.config.keys)} for made in bridges]
        write(encode_json({"ready": True, "bridges": ready}))
        try:
            while True:
                await asyncio.sleep(report_s or 3600)
                if report_s:
                    _report(bridges, json)
        finally:
            _report(bridges, json)


def _report(bridges: list[Bridge], json: bool) -> None:
    for made in bridges:
        stats = made.stats()
        if json:
            write(encode_json(stats))
        else:
            note(_line(stats))


def _line(stats: dict[str, Any]) -> str:
    parts = [
        f"{way} {stats[way]['crossed']:,} crossed, {stats[way]['waiting_events']:,} waiting, "
        f"lag {stats[way]['lag_ms']:,.0f} ms"
        for way in ("forth", "back")
        if way in stats
    ]
    counted = "".join(f", {reason} {number:,}" for reason, number in sorted(stats["counts"].items()))
    return (
        f"{stats['bridge']}: {'; '.join(parts)}; {stats['duplicates']:,} duplicates, "
        f"{stats['loops_prevented']:,} loops prevented{counted}"
    )
