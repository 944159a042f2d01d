"""Generator of docs/reference/api.md: the public names of `zbus`, with their signatures and docstrings.

`make reference` writes the page with the others, through `reference`. `tests/project/test_reference.py` fails if the
page differs from what this generates, or if a public name is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from reference_records import GENERATED, escaped

import zbus
from zbus.schema.registry import Schemas

HEAD = """\
The public names of `zbus`. Methods are listed with the first paragraph of their docstring; the rest is in
`help(zbus.Bus.subscribe)`. Everything that is not in `zbus.__all__` is internal.

## At a glance

| you want | you write |
|---|---|
| a bus | `async with zbus.open("app.db") as bus: …`; `"memory"` for a temporary log, nothing for no log |
| to publish | `publisher = await bus.publisher(key)`, `await publisher.publish(payload)`, \
`await publisher.publish_many(payloads)` |
| a retry that stores nothing twice | `await bus.put(event)` |
| live events | `async with bus.subscribe("shop/*/created", "audit/**") as sub: …` |
| history, then live events | `bus.subscribe("shop/**", start="beginning")`, or `after=offset`, or a `datetime` |
| to resume after a crash | `bus.subscribe("shop/**", durable="billing")`, `await event.ack()` |
| a slow subscriber that loses nothing | `overflow="spill"` |
| a slow subscriber that may lose events | `overflow="drop_oldest"` (default) or `"drop_newest"`: counted, and \
reported with `SubscriberLagged` |
| publishers that wait for subscribers | `overflow="block"` |
| typed payloads | `event.decode(Order)`, `bus.subscribe(…, schema=Order)`, \
`async for event, order in sub.typed(Order)` |
| stored events only | `bus.replay("shop/**", after=…, until=…)`, `await bus.head()` |
| handlers | `@bus.on("shop/**", durable="billing")` on an `async def` |
| request/reply | `await bus.request("prices/quote", {"sku": 7}, timeout=2)`, `@bus.serve("prices/quote")` |
| another transport | `transport="nats://127.0.0.1:4222"`, `"zmq://"`, `"zenoh://127.0.0.1:7447"`, or `ZBUS_TRANSPORT` |
| to store what other nodes publish | `keep=["shop/**"]` |
| validated payloads | `await bus.schemas.register("shop/*/created", Order)` |
| cached results | `@bus.cached(invalidate_on="events/Todo/{todo_id}")` |
| events of one user | `bus.session("alice-7")` |
| statistics | `bus.stats()`, `zbus.metrics.collector(bus)`, `bus.nodes()` |
| no event loop | `zbus.blocking.open("app.db")` |"""


class Group(NamedTuple):
    """Names that belong together, and the sentences before them."""

    title: str
    text: str
    names: tuple[str, ...]


GROUPS = (
    Group(
        "Bus",
        "[Settings](settings.md) lists the fields of `BusConfig`. Guides: [Transports](../transports.md), "
        "[Handlers and requests](../handlers-and-requests.md), [Tracing](../tracing.md), [Zenoh](../zenoh.md).",
        ("open", "Bus", "BusConfig"),
    ),
    Group("Publishing", "Guide: [Publishing](../publishing.md).", ("EventPublisher", "Offset")),
    Group("Subscribing", "Guide: [Subscribing](../subscribing.md).", ("EventSubscriber", "Replay")),
    Group("Events", "Guides: [Publishing](../publishing.md), [Subscribing](../subscribing.md).", ("Event",)),
    Group("Schemas", "Guide: [Schemas](../schemas.md).", ("bus.schemas", "Schema")),
    Group("Cache", "Guide: [Cache](../cache.md).", ("Cache",)),
    Group("Scopes", "Keys in the shape of Dynamo's event plane. Guide: [Dynamo](../dynamo.md).", ("Scope",)),
    Group(
        "Sessions",
        "Guide: [Sessions](../sessions.md).",
        ("Session", "sign_session_token", "verify_session_token"),
    ),
    Group("Nodes", "`bus.nodes()` returns them. Guide: [Observability](../observability.md).", ("NodeInfo",)),
    Group("Bridge", "Guide: [Bridges](../bridges.md).", ("Bridge",)),
    Group(
        "Logging and metrics",
        "Guide: [Observability](../observability.md).",
        ("configure_logging", "JsonFormatter", "metrics", "metrics.collector"),
    ),
    Group(
        "Blocking",
        "The classes have the methods of their asynchronous counterparts, without `await`.",
        (
            "blocking",
            "blocking.open",
            "blocking.Bus",
            "blocking.Publisher",
            "blocking.Subscription",
            "blocking.Session",
            "blocking.Schemas",
        ),
    ),
    Group(
        "Testing",
        'A test opens `zbus.open("memory")`. For tests under faults, the pytest plugin `zbus.testing.plugin` has the '
        "fixture `zbus_world`, a `zbus.sim.World`. `zbus.sim` raises `InvariantBroken` if a promise was broken, "
        "`WorldStuck` if a world cannot continue, `WorldBoundary` if code calls something that cannot be simulated, "
        "and `ProcessKilled` if the process of a call is killed. Guides: [Testing](../testing.md), "
        "[Simulator](../simulator.md).",
        ("sim", "sim.run", "sim.World", "sim.SimNode", "sim.Faults", "sim.scenario"),
    ),
)
OTHERS = {"bus.schemas": Schemas}  # public objects whose class is not exported
CONSTRUCTED = {"Bridge", "sim.World"}  # the classes whose constructor users call, besides `BusConfig`
WITHOUT_MEMBERS = {"BusConfig", "JsonFormatter"}


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {"api.md": api_page()}


def api_page() -> str:
    """Return the page of all public names."""
    parts = [GENERATED, "# Python API", HEAD]
    for group in GROUPS:
        parts += [f"## {group.title}", group.text, *(part for name in group.names for part in _section(name))]
    errors = ", ".join(f"[`{name}`](errors.md#{name.lower()})" for name in sorted(error_names()))
    parts += ["## Errors", f"`ZbusError` is the base class. [Errors](errors.md) describes each one: {errors}."]
    return "\n\n".join(parts) + "\n"


def error_names() -> list[str]:
    """Return the public errors."""
    found = ((name, getattr(zbus, name)) for name in zbus.__all__)
    return [name for name, each in found if inspect.isclass(each) and issubclass(each, zbus.ZbusError)]


def _section(name: str) -> Iterator[str]:
    """Yield the heading of a name, its signature, its first paragraph, its fields and its members."""
    found = OTHERS.get(name) or attrgetter(name)(zbus)
    yield f"### {name}"
    if inspect.isfunction(found) or name in CONSTRUCTED:
        yield f"`{_signature(f'zbus.{name}', found)}`"
    yield "\n\n".join(_paragraphs(found))
    if not inspect.isclass(found) or name in WITHOUT_MEMBERS or name.startswith("blocking."):
        return
    fields = _fields(found)
    if fields:
        yield "Fields: " + ", ".join(f"`{field}`" for field in fields) + "."
    members = [_member(member, each) for member, each in vars(found).items() if not member.startswith("_")]
    if any(members):
        yield "\n".join(filter(None, members))


def _fields(cls: type) -> list[str]:
    """Return the public fields of a class, with their types if the class declares them."""
    declared = inspect.get_annotations(cls)
    names = [name for name in (*declared, *getattr(cls, "__slots__", ())) if not name.startswith("_")]
    kinds = {name: getattr(declared.get(name), "__forward_arg__", declared.get(name)) for name in names}
    return [f"{name}: {kind}" if kind is not None else name for name, kind in kinds.items()]


def _member(name: str, member: Any) -> str:
    """Return a method or a property as an item of a list, or an empty string for anything else."""
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if isinstance(member, property):
        return f"- `{name}: {member.fget.__annotations__['return']}` – {_paragraphs(member)[0]}"
    if not inspect.isfunction(function):
        return ""
    prefix = "await " if inspect.iscoroutinefunction(function) else ""
    return f"- `{prefix}{_signature(name, function)}` – {_paragraphs(function)[0]}"


def _signature(name: str, of: Any) -> str:
    """Return a call with its parameters, as the source writes their types."""
    signature = inspect.signature(of)
    parameters = [
        each.replace(annotation=_source(each.annotation), default=_default(each.default))
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    result = inspect.Signature.empty if inspect.isclass(of) else _source(signature.return_annotation)
    return name + str(signature.replace(parameters=parameters, return_annotation=result))


class _Source(str):
    """Text that a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _source(annotation: Any) -> Any:
    return _Source(annotation) if isinstance(annotation, str) else annotation


def _default(value: Any) -> Any:
    """Return the default of a parameter; an object has an address in its text, which differs in every process."""
    shown = value is inspect.Parameter.empty or not repr(value).startswith("<")
    return value if shown else _Source("…")


def _paragraphs(of: Any) -> list[str]:
    """Return the paragraphs of a docstring, each on one line and without examples."""
    paragraphs = (inspect.getdoc(of) or "").split("\n\n")
    return [escaped(" ".join(each.split())) for each in paragraphs if not each.startswith((" ", ">>>"))]
