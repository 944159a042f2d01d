"""`zbus bridge`: a process that runs one or more bridges. It prints one JSON line when the bridges are running."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbus.errors import ConfigInvalid, ZbusError

from .options import JsonOption, MaxAgeOption, MaxBytesOption, ReportIntervalOption
from .render.output import encode_json, note, write
from .serving import serve

if TYPE_CHECKING:
    from zbus.bridge.bridge import Bridge
    from zbus.bridge.config import BridgeConfig


class Direction(StrEnum):
    """Direction in which a bridge forwards events."""

    both = "both"
    forward = "forward"
    reverse = "reverse"


def _two_urls(urls: tuple[str, str] | None) -> tuple[str, str] | None:
    if urls and any(each.startswith("-") for each in urls):
        raise typer.BadParameter("--between takes two URLs, such as nats://127.0.0.1:4222 zenoh://127.0.0.1:7447")
    return urls


def bridge(
    between: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="URL URL", callback=_two_urls, help="URLs of the two transports, such as nats://… zenoh://…."
        ),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option(metavar="EXPR", help="Forward keys that match, such as 'shop/**'. Repeatable.")
    ] = None,
    direction: Annotated[
        Direction,
        typer.Option(help="Forward both ways, or only from the first transport to the second, or in reverse."),
    ] = Direction.both,
    raw: Annotated[
        bool, typer.Option("--raw", help="Exchange plain messages, without the zbus envelope, on nats and zmq.")
    ] = False,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="LOG", help="Store events in this log (path or URL), so that none is lost while a side is down."
        ),
    ] = None,
    max_age: MaxAgeOption = None,
    max_bytes: MaxBytesOption = None,
    max_events: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep at most N events in the log.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the bridge in reports.")] = "",
    mode: Annotated[str | None, typer.Option(help="Mode of the zenoh side: peer, client or router.")] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ENDPOINT", help="Listen here on the zenoh side, such as tcp/127.0.0.1:7447."),
    ] = None,
    connect: Annotated[
        list[str] | None, typer.Option(metavar="ENDPOINT", help="Connect the zenoh side to this endpoint.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read the bridges from a TOML file instead of the options above."),
    ] = None,
    report_interval: ReportIntervalOption = 5.0,
    json: JsonOption = False,
) -> None:
    """Forward events between two transports. Events keep their identity.

    Prints one JSON line on stdout when the bridges are running. Reports go to stderr, or to stdout as JSON with --json,
    one line per bridge. Ctrl-C and SIGTERM stop the process.

    The file contains an array of tables named "bridge". Their keys are the settings of a bridge, such as between and
    keys.
    """
    from zbus.bridge.config import BridgeConfig, load_bridges

    if config is not None:
        alone = (between, keys, raw, log, max_age, max_bytes, max_events, name, mode, listen, connect)
        if any(alone) or direction is not Direction.both:
            raise ConfigInvalid(
                "config", "--config excludes the other options: the file has the settings of every bridge"
            )
        configs = load_bridges(config)
    elif between is None or not keys:
        raise ConfigInvalid("between", "give --between URL URL and --keys EXPR, or --config FILE")
    else:
        given: dict[str, Any] = {"listen": listen or (), "connect": connect or (), "mode": mode, "name": name}
        given |= {"retain_age_s": max_age, "retain_bytes": max_bytes, "retain_events": max_events}
        configs = [BridgeConfig(between=between, keys=keys, direction=direction.value, raw=raw, log=log, **given)]
    serve(_run(configs, report_interval, json))


async def _run(configs: list[BridgeConfig], report_interval_s: float, json: bool) -> None:
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
                await asyncio.sleep(report_interval_s or 3600)
                if report_interval_s:
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
        f"{way} {stats[way]['forwarded']:,} forwarded, {stats[way]['pending_events']:,} pending, "
        f"lag {stats[way]['lag_ms']:,.0f} ms"
        for way in ("forward", "reverse")
        if way in stats
    ]
    counted = "".join(f", {reason} {number:,}" for reason, number in sorted(stats["counts"].items()))
    return (
        f"{stats['bridge']}: {'; '.join(parts)}; {stats['duplicates']:,} duplicates, "
        f"{stats['loops_prevented']:,} loops prevented{counted}"
    )
