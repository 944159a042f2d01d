"""`zbus nodes`: the nodes on a transport, their keys and subscriptions, and when each was last seen."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer
from rich.table import Table

import zbus
from zbus.errors import ConfigInvalid

from .loop import run
from .options import JsonOption, TransportOption
from .reading import open_networked
from .render.output import encode_json, note, show, write

NAMES_SHOWN = 4


def nodes(
    transport: TransportOption = None,
    wait: Annotated[
        float, typer.Option(min=0.1, max=600, metavar="SECONDS", help="Seconds to wait for announcements.")
    ] = 1.5,
    json: JsonOption = False,
) -> None:
    """List the nodes on a transport. Nodes announce themselves as soon as they see a new node."""
    bus = open_networked(transport, node="zbus nodes")
    if not bus.config.networked:
        raise ConfigInvalid("transport", "this bus has no network: give --transport URL")
    found = run(_listen(bus, wait))
    if json:
        for node in found:
            write(encode_json(node._asdict()))
    elif found:
        show(_table(found))
    else:
        note(f"zbus: no nodes found within {wait:g} s")


async def _listen(bus: zbus.Bus, wait_s: float) -> list[zbus.NodeInfo]:
    async with bus:
        await asyncio.sleep(wait_s)
        return [node for node in bus.nodes() if not node.is_self]


def _table(found: list[zbus.NodeInfo]) -> Table:
    table = Table(box=None, header_style="")
    for column in ("NAME", "NODE", "BUS", "LOG", "TRUST", "SEEN", "PUBLISHES", "SUBSCRIBES", "SERVES"):
        table.add_column(column)
    for node in found:
        seen = f"{max(0.0, (time.time_ns() - node.last_seen) / 1e9):.1f} s ago" if node.alive else "gone"
        lists = [_some(names) for names in (node.publishes, node.subscribes, node.serves)]
        log = "yes" if node.has_log else "no"
        table.add_row(node.name, node.id, ", ".join(node.buses), log, node.trust, seen, *lists)
    return table


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "") or "-"
