"""Every path on which an event is published, behind one call, and a bus on which each step can be made to reject."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from inside import node_of
from mesh_fakes import FakeFabric

import zbus
import zbus_log
from zbus import plugins
from zbus.ports.log import Row
from zbus_web.http.settings import WebSettings
from zbus_web.server.app import create_app

KEY = "shop/orders"
GOOD, BAD, LARGE = b'{"id": 1}', b"[]", b"[" * 200
HEADERS_BAD = {"": "x"}
SCHEMA = {"type": "object"}
PAYLOAD_BYTES_MAX = 100
GIVEN_ID = 7  # the publisher of paths whose events have an identity already
DEADLINE_S = 30.0
STEPS = ("open", "read_only", "access", "key", "payload", "headers", "schema", "backpressure")

Send = Callable[["Rig", bytes, "dict[str, str] | None"], Awaitable[Any]]


class Denied(zbus.ZbusError):
    """Access is denied."""


class Denies:
    """Access rules that permit nothing."""

    def check_publish(self, key: str) -> None:
        raise Denied("access is denied")


class RefusingFabric(FakeFabric):
    """A transport that cannot carry some keys."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused = refused

    def check(self, key: str) -> None:
        if key.endswith(self.refused):
            raise zbus.KeyInvalid(key, "this transport cannot carry it")


class FakePorts:
    """Opens the log as always, and fake transports: "refuses" one that carries no `KEY`."""

    open_log, open_tracing = staticmethod(plugins.open_log), staticmethod(plugins.open_tracing)

    def __init__(self) -> None:
        self.fabrics: list[RefusingFabric] = []

    def open_fabric(self, config: Any, url: str, session: Any) -> RefusingFabric:
        self.fabrics.append(RefusingFabric(KEY) if url == "refuses" else RefusingFabric("carried/by/none"))
        return self.fabrics[-1]


class Rig:
    """An open bus with fake transports, a publisher, and a subscriber that sees everything."""

    def __init__(self, bus: zbus.Bus, log: Path | str | None) -> None:
        self.bus, self.log, self.node = bus, log, node_of(bus)
        self.entry = self.node.entry
        self.key, self.given = KEY, 0
        self.publishers: dict[str, zbus.EventPublisher] = {}
        self.seen = bus.subscribe("**", queue_events=1_000_000)
        self.kept: list[zbus.Event] = []
        self.full: zbus.EventSubscriber | None = None
        app = create_app(bus, WebSettings())
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")

    async def publisher(self) -> zbus.EventPublisher:
        """The publisher of the key: one for all events, so that its sequences show a gap."""
        if self.key not in self.publishers:
            self.publishers[self.key] = await self.bus.publisher(self.key)
        return self.publishers[self.key]

    async def violate(self, steps: Iterable[str]) -> tuple[bytes, dict[str, str] | None]:
        """Let these steps reject. Returns the payload and headers to send."""
        if "schema" in steps:
            await self.bus.schemas.register(f"**/{KEY}", SCHEMA)
        if "backpressure" in steps:
            await self.fill()
        if "key" in steps:
            await self.node.link("refuses")
        if "access" in steps:
            self.entry.access = Denies()
        if "read_only" in steps:
            self.entry.read_only = "app.db"
            self.entry.recheck()
        if "open" in steps:
            await self.bus.aclose()
        payload = LARGE if "payload" in steps else BAD if "schema" in steps else GOOD
        return payload, HEADERS_BAD if "headers" in steps else None

    async def restore(self) -> None:
        """Let everything be accepted again, but for a bus that was closed."""
        self.entry.read_only = self.entry.access = None
        for link in self.node.network.links[1:] if self.node.network is not None else ():
            await self.node.network.remove(link, 1.0)
        if self.full is not None:
            await self.full.aclose()

    async def fill(self, events: int = 1) -> None:
        """Open a subscription that must not drop, and fill it."""
        self.full = self.bus.subscribe(f"**/{KEY}", "filler", queue_events=events, overflow="block")
        for _ in range(events):
            await (await self.bus.publisher("filler")).publish(GOOD)
        await until(lambda: self.entry.backpressure.blocked)

    async def free(self) -> None:
        """Read what fills it."""
        assert self.full is not None
        while self.full.queued:
            await anext(self.full)

    async def stored(self) -> list[zbus.Event]:
        """The events that were published to the key so far, in order, without the ones that fill a subscription."""
        return [event for event in await self.everything() if event.key == self.key]

    async def everything(self) -> list[zbus.Event]:
        if self.log is not None and not self.node.is_closing:
            return [event async for event in self.bus.replay()]
        self.kept += [await anext(self.seen) for _ in range(self.seen.queued)]
        return list(self.kept)


@asynccontextmanager
async def rig(log: Path | str | None, **settings: Any) -> AsyncIterator[Rig]:
    """A bus on which every path can be tried."""
    bus = zbus.open(log, **{"payload_bytes_max": PAYLOAD_BYTES_MAX, "durability": "os"} | settings)
    node_of(bus)._ports = FakePorts()
    async with bus:
        found = Rig(bus, log)
        async with found.client:
            yield found


# The paths. Each sends one event to `rig.key`.


async def publish(rig: Rig, payload: Any, headers: dict[str, str] | None) -> None:
    await (await rig.publisher()).publish(payload, headers=headers)


async def publish_many(rig: Rig, payload: Any, headers: dict[str, str] | None) -> None:
    await (await rig.publisher()).publish_many([payload], headers=headers)


async def put(rig: Rig, payload: Any, headers: dict[str, str] | None) -> None:
    await rig.bus.put(zbus.Event(GIVEN_ID, rig.given, 1, rig.key, payload, headers or {}))
    rig.given += 1


async def session_publish(rig: Rig, payload: Any, headers: dict[str, str] | None) -> None:
    await rig.bus.session("s").publish(rig.key, payload, headers=headers)


async def session_publish_many(rig: Rig, payload: Any, headers: dict[str, str] | None) -> None:
    await rig.bus.session("s").publish_many(rig.key, [payload], headers=headers)


async def proxied(rig: Rig, payload: bytes, headers: dict[str, str] | None) -> None:
    encoded = msgspec.msgpack.encode(headers) if headers else None
    row = Row(GIVEN_ID, rig.given, 1, rig.key, payload, encoded)
    await asyncio.to_thread(zbus_log.put, rig.log, [[row]], timeout_s=DEADLINE_S)
    rig.given += 1


async def post(rig: Rig, payload: bytes, headers: dict[str, str] | None, more: dict[str, str] | None = None) -> None:
    sent = {f"x-zbus-header-{name}": value for name, value in (headers or {}).items()} | (more or {})
    answer = await rig.client.post(f"/events/{rig.key}", content=payload, headers=sent)
    if answer.status_code not in (200, 201):
        raise HttpRefused(answer.json()["error"]["code"])


async def post_once(rig: Rig, payload: bytes, headers: dict[str, str] | None) -> None:
    await post(rig, payload, headers, {"idempotency-key": f"{rig.given}"})
    rig.given += 1


class HttpRefused(Exception):
    """An answer that is not a success."""


IN_PROCESS: dict[str, Send] = {
    "publish": publish,
    "publish_many": publish_many,
    "put": put,
    "session.publish": session_publish,
    "session.publish_many": session_publish_many,
}
PATHS: dict[str, Send] = IN_PROCESS | {"proxied write": proxied, "POST": post, "POST, idempotent": post_once}
GIVEN = {"put": range(1000), "proxied write": range(1000), "POST, idempotent": [0] * 1000}  # sequences that we give

_CODES = {"bus_closed": "open", "failed": "access", "invalid_key": "key", "event_too_large": "payload"}
_CODES |= {"log_read_only": "read_only", "schema_violated": "schema", "invalid_event": "headers"}
_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (zbus.BusClosed, "open"),
    (zbus.LogReadOnly, "read_only"),
    (Denied, "access"),
    (zbus.KeyInvalid, "key"),
    (zbus.EventTooLarge, "payload"),
    (zbus.SchemaInvalid, "schema"),
    (zbus.EventInvalid, "headers"),
)


async def rejected_by(sending: Awaitable[Any], rig: Rig | None = None) -> str:
    """The step that rejected the event; "" if it was stored, "backpressure" if it waits, which is then cancelled."""
    task = asyncio.ensure_future(sending)
    waiters = rig.entry.backpressure._waiters if rig is not None else ()
    before = len(waiters)
    await until(lambda: task.done() or len(waiters) > before)
    if not task.done():
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return "backpressure"
    except HttpRefused as error:
        return _CODES.get(str(error), str(error))
    except zbus.ZbusError as error:
        if isinstance(error, zbus.LogError) and "access is denied" in str(error):
            return "access"  # errors of tests have no type in another process
        return next((step for kind, step in _ERRORS if isinstance(error, kind)), repr(error))
    return ""


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():
            await asyncio.sleep(0.002)
