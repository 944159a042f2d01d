"""`zbus pub`: publish events from the command line and print the offset of each."""

from __future__ import annotations

import os
from itertools import groupby
from typing import Annotated

import msgspec
import typer

import zbus
from zbus.errors import ConfigInvalid
from zbus.headers import CONTENT_TYPE, JSON
from zbus.keys import check_key

from .loop import run
from .options import LogOption, TransportOption
from .reading import configured_log, open_networked
from .render.output import encode_json, write
from .stdin import read_all, read_lines

JSON_TYPE = {CONTENT_TYPE: JSON}


def pub(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the event, such as shop/orders/created.")],
    payload: Annotated[
        str | None,
        typer.Argument(metavar="PAYLOAD|-", help="The payload. If it is '-' or missing, stdin is read."),
    ] = None,
    log: LogOption = None,
    transport: TransportOption = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Add a header to the event. Repeatable."),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Publish each line of stdin as one event, as it arrives.")
    ] = False,
) -> None:
    """Publish an event and print its offset once it is on disk, as one JSON line per event.

    A payload that is a JSON object or array gets the header content-type=application/json, unless --header sets one.

    The log is created if it does not exist. A log has one owner: while another process owns it, publish from there.
    """
    if lines and payload not in (None, "-"):
        raise typer.BadParameter("the payloads are the lines of stdin: leave out PAYLOAD", param_hint="--lines")
    if payload is None and not lines and os.isatty(0):
        raise typer.BadParameter("give a payload, or pipe it in", param_hint="PAYLOAD")
    check_key(key)
    headers = dict(_header(each) for each in header or ())
    log = configured_log() if log is None else log
    chosen = {"transport": transport} if transport else {}
    bus = open_networked(transport) if log is None else zbus.open(log, **chosen)
    if bus.config.log is None and not bus.config.networked:
        reason = "the event would be lost: give --log LOG (or ZBUS_LOG), or --transport URL"
        raise ConfigInvalid("log", reason)
    if lines:
        run(_publish_lines(bus, key, headers))
    else:
        body = read_all(bus.config.payload_bytes_max + 1) if payload in (None, "-") else os.fsencode(payload or "")
        run(_publish(bus, key, body, headers))


async def _publish(bus: zbus.Bus, key: str, payload: bytes, headers: dict[str, str]) -> None:
    async with bus:
        publisher = await bus.publisher(key)
        offset = await publisher.publish(payload, headers=_with_type(payload, headers))
        write(_stored(int(offset), offset.publisher_id, offset.sequence))


async def _publish_lines(bus: zbus.Bus, key: str, headers: dict[str, str]) -> None:
    async with bus:
        publisher = await bus.publisher(key)
        async for lines in read_lines(bus.config.payload_bytes_max):
            for typed, group in groupby(lines, _is_json):
                offsets = await publisher.publish_many(list(group), headers=JSON_TYPE | headers if typed else headers)
                found = enumerate(offsets, publisher.sequence - len(offsets))
                write(b"".join(_stored(offset, publisher.publisher_id, sequence) for sequence, offset in found))


def _with_type(payload: bytes, headers: dict[str, str]) -> dict[str, str]:
    return JSON_TYPE | headers if _is_json(payload) else headers


def _is_json(payload: bytes) -> bool:
    """Return whether a payload is a JSON object or array. A number or a word alone may be plain text."""
    if payload.strip()[:1] not in (b"{", b"["):
        return False
    try:
        msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return False
    return True


def _stored(offset: int, publisher_id: int, sequence: int) -> bytes:
    return encode_json({"offset": int(offset), "publisher_id": publisher_id, "sequence": sequence})


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--header")
    return name, value
