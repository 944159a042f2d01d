"""`zbus router`: a Zenoh router process. Its first line on stdout says where it listens."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from zbus.bus import Bus

from .render.output import encode_json, note, write
from .serving import serve


def router(
    listen: Annotated[
        list[str] | None, typer.Option(metavar="ENDPOINT", help="Where nodes connect; default: tcp/127.0.0.1:7447.")
    ] = None,
    connect: Annotated[
        list[str] | None, typer.Option(metavar="ENDPOINT", help="Other routers to connect to; may be given again.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of zenoh, such as tls_ca=ca.pem.")
    ] = None,
) -> None:
    """Carry events between Zenoh nodes. It keeps no log; Ctrl-C and SIGTERM end it.

    The first line on stdout is JSON with where it listens: when it is there, nodes can connect.
    """
    options = {}
    for each in option or ():
        name, equals, value = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"{name!r} is not written like NAME=VALUE")
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
