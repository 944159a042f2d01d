"""`zbus serve`: a node with its log, HTTP on loopback, and the console. Its first line on stdout says where."""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import zbus
from zbus.cli.apps import new_app
from zbus.cli.render.output import encode_json, note, write
from zbus.cli.serving import serve as run_until_told
from zbus.errors import ConfigInvalid

if TYPE_CHECKING:
    from .http.settings import WebSettings

__all__ = ["app"]

# A reader's bus has no network and keeps no events of other nodes, even if the environment configures the owner so.
READER: dict[str, Any] = {"read_only": True, "mode": "embedded", "listen": (), "connect": (), "keep": "own"}

app = new_app()


@app.command()
def serve(
    log: Annotated[
        Path | None, typer.Argument(envvar="ZBUS_LOG", metavar="LOG", help="The log: a SQLite file of zbus.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port; 0: any that is free; default: 7480.")
    ] = None,
    demo: Annotated[bool, typer.Option(help="Publish sample traffic; without LOG in a log that ends with it.")] = False,
    read_only: Annotated[
        bool, typer.Option(help="Show a log that another process owns; nothing is published.")
    ] = False,
    token_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A file whose first line is a token that may do everything."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name under which browsers reach it.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="ZBUS_CONFIG", help="A TOML file: the bus, and the table [web].")
    ] = None,
) -> None:
    """Serve a log over HTTP: feeds, publishing, pages, figures and the console. Ctrl-C and SIGTERM end it.

    The first line on stdout is JSON with the URL: when it is there, it answers. Other machines can reach it only with
    --host, and then it asks for a token.
    """
    from .http.settings import load_settings

    given: dict[str, Any] = {"host": host, "port": port}
    if allowed_host:
        given["allowed_hosts"] = tuple(allowed_host)
    if token_file:
        given["tokens"] = [
            {"name": each.stem or "token", "token_file": each, "operate": True} for each in dict.fromkeys(token_file)
        ]
    settings = load_settings(config, **{name: value for name, value in given.items() if value is not None})
    settings.check_reachable()
    for token in settings.tokens:
        token.secret()
    if demo and read_only:
        raise ConfigInvalid("demo", "a log that is only read takes no sample traffic")
    run_until_told(_serve(log, settings, config, demo=demo, read_only=read_only))


async def _serve(log: Path | None, settings: WebSettings, config: Path | None, *, demo: bool, read_only: bool) -> None:
    from .demo import play
    from .server.running import serving

    async with AsyncExitStack() as open_things:
        if log is None and demo:
            log = Path(open_things.enter_context(tempfile.TemporaryDirectory(prefix="zbus-demo-"))) / "demo.db"
        bus = _bus(log, config, read_only)
        await open_things.enter_async_context(bus)
        server = await open_things.enter_async_context(serving(bus, settings))
        told = {
            "ready": True,
            "url": server.url,
            "log": bus.config.log,
            "pid": os.getpid(),
            "tokens": len(settings.tokens),
        }
        write(encode_json(told))
        note(f"{server.url} serves {bus.config.log}; Ctrl-C ends it")
        await (play(bus) if demo else asyncio.Event().wait())


def _bus(log: Path | None, config: Path | None, read_only: bool) -> zbus.Bus:
    given: dict[str, Any] = dict(READER) if read_only else {}
    bus = zbus.open(log, config=config, **given)
    if bus.config.log is None:
        raise ConfigInvalid("log", "a server needs one: zbus serve LOG, or ZBUS_LOG, or --demo for a look around")
    return bus
