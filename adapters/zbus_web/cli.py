"""`zbus serve`: a node with its log, HTTP on loopback, and the console. The first line on stdout has the URL."""

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
from zbus.cli.failures import locked_hint
from zbus.cli.render.output import encode_json, note, write
from zbus.cli.serving import serve as run_until_stopped
from zbus.errors import ConfigInvalid

if TYPE_CHECKING:
    from .http.settings import WebSettings

__all__ = ["app"]

# A read-only bus has no network and keeps no events of other nodes, even if the environment configures the log's owner
# that way.
READER: dict[str, Any] = {"read_only": True, "mode": "embedded", "listen": (), "connect": (), "keep": "own"}

app = new_app()


@app.command()
def serve(
    log: Annotated[
        str | None, typer.Argument(envvar="ZBUS_LOG", metavar="LOG", help="Path or URL of the log, such as app.db.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Listen on this address (default: 127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Listen on this port; 0 chooses a free one (default: 7480).")
    ] = None,
    demo: Annotated[bool, typer.Option(help="Publish sample traffic. Without LOG, use a temporary log.")] = False,
    read_only: Annotated[
        bool, typer.Option(help="Open a log that another process owns, without publishing to it.")
    ] = False,
    token_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Accept the token in the first line of this file. It may do everything."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Accept this Host name in addition to the address and localhost."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="ZBUS_CONFIG", help="Read the settings of the bus, and the table [web], from this TOML file."
        ),
    ] = None,
) -> None:
    """Serve a log over HTTP: event streams, publishing, pages of the log, metrics and the console.

    The first line on stdout is JSON with the URL, written when the server is ready. Other machines can reach the
    server only with --host, and then it requires a token. Ctrl-C and SIGTERM stop it.
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
        raise ConfigInvalid("demo", "sample traffic cannot be published to a read-only log")
    run_until_stopped(_serve(log, settings, config, demo=demo, read_only=read_only))


async def _serve(log: str | None, settings: WebSettings, config: Path | None, *, demo: bool, read_only: bool) -> None:
    from .demo import play
    from .server.running import serve as serve_http

    async with AsyncExitStack() as open_things:
        if log is None and demo:
            folder = open_things.enter_context(tempfile.TemporaryDirectory(prefix="zbus-demo-"))
            log = str(Path(folder) / "demo.db")
        bus = _bus(log, config, read_only)
        with locked_hint(f"only read it here: zbus serve {log or bus.config.log} --read-only"):
            await open_things.enter_async_context(bus)
        server = await open_things.enter_async_context(serve_http(bus, settings))
        ready = {
            "ready": True,
            "url": server.url,
            "log": bus.config.log,
            "pid": os.getpid(),
            "tokens": len(settings.tokens),
        }
        write(encode_json(ready))
        note(f"serving {bus.config.log} at {server.url}; press Ctrl-C to stop")
        await (play(bus) if demo else asyncio.Event().wait())


def _bus(log: str | None, config: Path | None, read_only: bool) -> zbus.Bus:
    given: dict[str, Any] = dict(READER) if read_only else {}
    bus = zbus.open(log, config=config, **given)
    if bus.config.log is None:
        raise ConfigInvalid("log", "the server needs a log: zbus serve LOG, or set ZBUS_LOG, or try --demo")
    return bus
