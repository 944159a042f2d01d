"""`zbus router`: a Zenoh router process. It prints one JSON line with its endpoints when it is running."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from zbus.bus import Bus

from .render.output import encode_json, note, write
from .serving import serve


def router(
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ENDPOINT", help="Listen on this endpoint. Default: tcp/127.0.0.1:7447. Repeatable."),
    ] = None,
    connect: Annotated[
        list[str] | None, typer.Option(metavar="ENDPOINT", help="Connect to this router. Repeatable.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Set an option of the zenoh transport, such as tls_ca=ca.pem. Repeatable."
        ),
    ] = None,
) -> None:
    """Forward events between Zenoh nodes, without a log. Ctrl-C and SIGTERM stop it.

    Prints one JSON line with its endpoints on stdout when nodes can connect.
    """
    options = {}
    for each in option or ():
        name, equals, value = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"{each!r} is not NAME=VALUE")
        options[name] = value
    serve(_router(tuple(listen or ("tcp/127.0.0.1:7447",)), tuple(connect or ()), options))


async def _router(listen: tuple[str, ...], connect: tuple[str, ...], options: dict[str, str]) -> None:
    from zbus.config import BusConfig

    config = BusConfig.exactly(mode="router", listen=listen, connect=connect, options=options)
    async with Bus(config) as bus:
        zid = str(bus.zenoh.zid())
        write(encode_json({"ready": True, "zid": zid, "listen": list(listen), "connect": list(connect)}))
        note(f"router {zid} listens on {', '.join(listen)}")
        await asyncio.Event().wait()
