"""Scenarios that are declared in a TOML file, for `zbus sim run` and `zbus sim routes`: nodes, bridges, faults, events.

The file is validated completely before anything runs: unknown names, key expressions, the settings of each node and
bridge, and references to nodes, transports and subscriptions that do not exist. An error names the field, such as
`node.2.subscribe.1.keys`.
"""

from __future__ import annotations

import asyncio
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from zbus.bridge.config import BridgeConfig
from zbus.config import BusConfig, Contradiction, config_errors
from zbus.deliver.overflow import Overflow
from zbus.deliver.subscriber import EventSubscriber, check_options
from zbus.errors import (
    ConfigInvalid,
    KeyInvalid,
    LogError,
    LogRequired,
    PayloadInvalid,
    SchemaError,
    SubscriberLagged,
    TransportError,
)
from zbus.event import Event
from zbus.keys import KeySet, check_expression, check_key
from zbus.schema.json_schema import compile_schema
from zbus.sim.bus import SimBus
from zbus.sim.errors import InvariantBroken
from zbus.sim.faults import KINDS, NONE, Faults
from zbus.sim.node import SimNode
from zbus.sim.route_rules import net_name
from zbus.sim.world import CONVERGE_S, LIMIT_S, TRANSPORT, World

SETTLE_S = 1.0  # in which the nodes learn of each other's subscriptions
RETRY_S = 0.1
TYPES = {"bytes": bytes, "str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict}

Received = Event | PayloadInvalid  # an event, or the error that a subscriber gets in place of one
OnReceived = Callable[[str, Received], None]  # gets the name of the subscription


def _checked_log(value: object) -> object:
    if not isinstance(value, (bool, str)) or value == "":
        raise ValueError("must be true, false, or the name of a log")
    return value


def _several(value: object) -> object:
    """Return a list for a single number."""
    return (value,) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


LogName = Annotated[bool | str, BeforeValidator(_checked_log)]
Probability = Annotated[float, Field(ge=0, le=1)]
Probabilities = Annotated[tuple[Probability, ...], BeforeValidator(_several), Field(min_length=1)]
Delays = Annotated[tuple[Annotated[float, Field(gt=0, le=3600)], ...], BeforeValidator(_several), Field(min_length=1)]


class Table(BaseModel):
    """A table of the file. `gathers` names a field that collects the settings of another part of zbus."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    gathers: ClassVar[str] = ""
    gathered: ClassVar[tuple[str, ...]] = ()  # the names that it collects
    gathered_noun: ClassVar[str] = ""  # for errors; empty: the names

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("must be a table")
        own = [field.alias or name for name, field in cls.model_fields.items() if name != cls.gathers]
        for name in given:
            if name not in own and name not in cls.gathered:
                known = ", ".join([*own, *([cls.gathered_noun] if cls.gathered_noun else cls.gathered)])
                raise Contradiction(str(name), f"there is no such setting; known are: {known}")
        if not cls.gathers:
            return given
        found = {name: value for name, value in given.items() if name in own}
        return found | {cls.gathers: {name: value for name, value in given.items() if name not in own}}


class DeclaredPublisher(Table):
    """A publisher of `zbus sim run`: it publishes `per_s` events per second on average."""

    key: str
    per_s: float = Field(1.0, gt=0, le=10_000)
    size_bytes: int = Field(100, ge=0, le=256 * 1024 * 1024)

    @field_validator("key")
    @classmethod
    def _valid_key(cls, value: str) -> str:
        with _as_value_error(KeyInvalid):
            return check_key(value)

    async def run(self, bus: SimBus, chance: Random, until_s: float) -> None:
        """Publish until a time. A publish that fails is given up."""
        publisher, loop, number = await bus.publisher(self.key), asyncio.get_running_loop(), 0
        while loop.time() < until_s:
            await asyncio.sleep(chance.uniform(0.2, 1.8) / self.per_s)
            number += 1
            with suppress(LogError, TransportError):
                await publisher.publish(f"{number}".encode().ljust(self.size_bytes)[: self.size_bytes])


class DeclaredSubscription(Table):
    """A subscription of a node. Options as for `bus.subscribe`; `schema` is the name of a Python type."""

    keys: tuple[str, ...] = Field(min_length=1)
    name: str = Field("", max_length=200)
    durable: str | None = Field(None, min_length=1)
    start: Literal["new", "beginning"] = "new"
    overflow: Overflow | None = None
    queue_events: int = Field(1000, ge=1)
    schema_: Literal["bytes", "str", "int", "float", "bool", "list", "dict"] | None = Field(None, alias="schema")

    @field_validator("keys", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"must be a list of key expressions, such as [{value!r}]")
        return value

    @field_validator("keys")
    @classmethod
    def _expressions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        with _as_value_error(KeyInvalid):
            return KeySet(value).expressions

    def check(self, has_log: bool) -> None:
        """Raise `ConfigInvalid` or `LogRequired` if the options contradict each other, as `bus.subscribe` does."""
        check_options(has_log, self.start, None, self.durable, self.queue_events, self.overflow)

    async def read(self, bus: SimBus, opened: Callable[[], None], received: Callable[[Received], None]) -> None:
        """Open the subscription, and read it until the bus is closed."""
        async with self._open(bus) as subscription:
            opened()
            while True:
                try:
                    event = await subscription.next()
                except SubscriberLagged:
                    continue
                except PayloadInvalid as error:
                    received(error)
                    continue
                except LogError:  # of the disk: what it has is read later
                    await asyncio.sleep(RETRY_S)
                    continue
                if event is None:
                    return
                received(event)

    def _open(self, bus: SimBus) -> EventSubscriber:
        return bus.subscribe(
            *self.keys,
            start=self.start,
            durable=self.durable,
            queue_events=self.queue_events,
            overflow=self.overflow,
            schema=None if self.schema_ is None else TYPES[self.schema_],
        )


class DeclaredSchema(Table):
    """A JSON Schema that a node registers, as `bus.schemas.register` does."""

    expression: str
    schema_: dict[str, Any] = Field(alias="schema")
    mode: Literal["strict", "permissive"] = "strict"

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            compile_schema(check_expression(self.expression), self.schema_)
        except KeyInvalid as error:
            raise Contradiction("expression", str(error)) from None
        except (SchemaError, ConfigInvalid) as error:
            raise Contradiction("schema", str(error)) from None
        return self


class DeclaredNode(Table):
    """A node: its log, its settings (as for `zbus.open`), its publishers and its subscriptions."""

    gathers = "settings"
    gathered = tuple(name for name in BusConfig.model_fields if name not in ("log", "node"))
    gathered_noun = "the settings of zbus.open"

    name: str = Field(min_length=1, max_length=200)
    log: LogName = False
    clock_ahead_s: float = 0.0
    publish: tuple[DeclaredPublisher, ...] = ()
    subscribe: tuple[DeclaredSubscription, ...] = ()
    schemas: tuple[DeclaredSchema, ...] = ()
    settings: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        with _as_contradiction():
            config = BusConfig.exactly(log=_path(self.name, self.log), **self.settings)
        for url in self.transports:
            if "://" not in url:
                field = "transports" if config.transports else "transport"
                raise Contradiction(field, f"{url!r} must be a URL, such as {TRANSPORT}")
        for number, each in enumerate(self.subscribe, 1):
            with _as_contradiction(f"subscribe.{number}."):
                each.check(config.log is not None)
        names = [each.durable for each in self.subscribe if each.durable is not None]
        for number, each in enumerate(self.subscribe, 1):
            if names.count(each.durable or "") > 1:
                raise Contradiction(f"subscribe.{number}.durable", f"node {self.name!r} uses {each.durable!r} twice")
        return self

    @property
    def transports(self) -> Sequence[str]:
        """The URLs of its transports."""
        return tuple(self.settings.get("transports") or (self.settings.get("transport", TRANSPORT),))

    async def start(self, world: World, opened: Callable[[str], None], received: OnReceived) -> SimNode:
        """Start the node. Its program opens and reads the subscriptions, again after each restart."""

        async def program(bus: SimBus) -> None:
            await self.register(bus)
            await asyncio.gather(*(read(bus, each) for each in self.named()))

        async def read(bus: SimBus, named: Named) -> None:
            name = named.name
            await named.subscription.read(bus, lambda: opened(name), lambda each: received(name, each))

        log, ahead_s = self.log or None, self.clock_ahead_s
        return await world.node(self.name, log=log, program=program, clock_ahead_s=ahead_s, **self.settings)

    async def register(self, bus: SimBus) -> None:
        """Register the schemas. A node without a log loses them with each restart."""
        for each in self.schemas:
            await bus.schemas.register(each.expression, each.schema_, mode=each.mode)

    def named(self) -> list[Named]:
        """Return the subscriptions with their names."""
        return [
            Named(each.name or each.durable or f"{self.name}#{number}", self.name, each)
            for number, each in enumerate(self.subscribe, 1)
        ]


class Named(NamedTuple):
    """A subscription, with its name and its node."""

    name: str
    node: str
    subscription: DeclaredSubscription


class DeclaredBridge(Table):
    """A bridge between two transports. Options as for `zbus.Bridge`."""

    gathers = "settings"
    gathered = ("between", "keys", "direction", "payload_bytes_max", "retain_age_s", "retain_bytes", "retain_events")

    name: str = Field(min_length=1, max_length=200)
    log: LogName = False
    settings: dict[str, Any]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        with _as_contradiction():
            BridgeConfig(name=self.name, log=_path(self.name, self.log), **self.settings)
        return self

    @property
    def between(self) -> Sequence[str]:
        """The URLs of its two transports."""
        return tuple(self.settings["between"])

    async def start(self, world: World) -> None:
        """Start the bridge."""
        await world.bridge(self.name, log=self.log or None, **self.settings)


class DeclaredEvent(Table):
    """A sample event of `zbus sim routes`. Its key may be invalid: the report then shows why it was refused."""

    source: str = Field(alias="from")
    key: str
    payload: Any = ""
    headers: dict[str, str] = {}
    expect: tuple[str, ...] | None = None


class DeclaredFaults(Table):
    """The faults of `zbus sim run`: for each kind a number, or the smallest and the largest number."""

    gathers = "numbers"
    gathered = tuple(KINDS)

    drop: Probabilities = tuple(Faults.drop)
    duplicate: Probabilities = tuple(Faults.duplicate)
    delay_s: Delays = tuple(Faults.delay_s)
    for_s: tuple[Annotated[float, Field(gt=0)], float] = Faults.for_s
    numbers: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for kind, given in self.numbers.items():
            numbers = given if isinstance(given, list) else [given, given]
            whole = all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
            if not whole or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
                raise Contradiction(kind, "must be a number, or the smallest and the largest, such as [0, 2]")
        if self.for_s[0] > self.for_s[1]:
            raise Contradiction("for_s", "must be the shortest and the longest duration, such as [0.05, 6.0]")
        return self

    def faults(self) -> Faults:
        """Return the faults that a seed draws from."""
        return Faults(drop=self.drop, duplicate=self.duplicate, delay_s=self.delay_s, for_s=self.for_s, **self.numbers)


class Declared(Table):
    """A scenario, as its file declares it. `load_declared` reads one."""

    name: str = ""  # of the scenario; empty: the name of the file
    seconds: float = Field(30.0, gt=0, le=86_400)
    converge_s: float = Field(CONVERGE_S, gt=0, le=86_400)
    faults: DeclaredFaults | None = None
    node: tuple[DeclaredNode, ...] = Field(min_length=1)
    bridge: tuple[DeclaredBridge, ...] = ()
    event: tuple[DeclaredEvent, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        places: list[tuple[str, DeclaredNode | DeclaredBridge]] = []
        places += [(f"node.{number}", each) for number, each in enumerate(self.node, 1)]
        places += [(f"bridge.{number}", each) for number, each in enumerate(self.bridge, 1)]
        _check_unique((f"{place}.name", each.name) for place, each in places)
        _check_unique((f"{place}.log", _path(each.name, each.log)) for place, each in places)
        _check_unique(
            (f"node.{number}.subscribe.{at}.name", named.name)
            for number, node in enumerate(self.node, 1)
            for at, named in enumerate(node.named(), 1)
        )
        used = [net_name(url) for each in self.node for url in each.transports]
        ends = [net_name(url) for each in self.bridge for url in each.between]
        for number, bridge in enumerate(self.bridge, 1):
            for url in map(net_name, bridge.between):
                if url not in used and ends.count(url) == 1:
                    raise Contradiction(f"bridge.{number}.between", f"no node and no other bridge uses {url}")
        nodes, subscriptions = [each.name for each in self.node], [each.name for each in self.subscriptions]
        for number, event in enumerate(self.event, 1):
            _check_known(f"event.{number}.from", "node", event.source, nodes)
            for name in event.expect or ():
                _check_known(f"event.{number}.expect", "subscription", name, subscriptions)
        return self

    @property
    def subscriptions(self) -> list[Named]:
        """The subscriptions of all nodes, with their names."""
        return [named for node in self.node for named in node.named()]

    @property
    def limit_s(self) -> float:
        """The virtual seconds after which the scenario is given up."""
        return self.seconds + 2 * self.converge_s + LIMIT_S

    async def start(self, world: World, received: OnReceived = lambda name, received: None) -> None:
        """Start the bridges and the nodes. Returns when all subscriptions are open, and known on the network."""
        opened: dict[str, None] = {}
        for bridge in self.bridge:
            await bridge.start(world)
        for node in self.node:
            await node.start(world, lambda name: opened.update({name: None}), received)
        await world.until(lambda: len(opened) == len(self.subscriptions) or world.ledger.violations, self.converge_s)
        if world.ledger.violations:  # a program has failed, and the rest would wait for it
            raise InvariantBroken(world.seed, world.ledger.violations)
        await world.run(SETTLE_S)

    def check_publishers(self) -> None:
        """Raise `ConfigInvalid` if no node publishes anything, so that a run with faults would test nothing."""
        if not any(node.publish for node in self.node):
            reason = "no node publishes; only `zbus sim routes` publishes the sample events of [[event]]"
            raise ConfigInvalid("node.publish", reason)

    async def play(self, world: World) -> None:
        """Let the publishers publish, and the faults happen. The ledger of the world checks the invariants."""
        await self.start(world)
        until_s = world.now + self.seconds
        for node in self.node:
            for number, publisher in enumerate(node.publish, 1):
                chance = world.source(f"publish/{node.name}/{number}")
                world.nodes[node.name].also(_publishing(node, publisher, chance, until_s))
        await world.play(NONE if self.faults is None else self.faults.faults(), self.seconds)


def load_declared(path: str | os.PathLike[str]) -> Declared:
    """Load a scenario from a TOML file. Raises `ConfigInvalid` with the field if it is wrong."""
    file = Path(path)
    try:
        found = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigInvalid("scenario", f"{file}: {error}") from error
    with config_errors("scenario", within=str(file)):
        return Declared.model_validate({"name": file.stem} | found)


def _publishing(
    node: DeclaredNode, publisher: DeclaredPublisher, chance: Random, until_s: float
) -> Callable[[SimBus], Any]:
    async def program(bus: SimBus) -> None:
        await node.register(bus)
        await publisher.run(bus, chance, until_s)

    return program


def _path(name: str, log: bool | str) -> str | None:
    return f"{name}.db" if log is True else log or None


@contextmanager
def _as_contradiction(within: str = "") -> Iterator[None]:
    """Let the validator of a table name the field of a `ConfigInvalid` that a part of zbus raises."""
    try:
        yield
    except ConfigInvalid as error:
        raise Contradiction(f"{within}{error.field}", error.reason) from None
    except LogRequired as error:
        raise Contradiction("log", str(error)) from None


@contextmanager
def _as_value_error(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        raise ValueError(str(error)) from None


def _check_unique(named: Iterator[tuple[str, str | None]]) -> None:
    seen: dict[str, str] = {}
    for field, name in named:
        if name is not None and name in seen:
            raise Contradiction(field, f"{name!r} is already used by {seen[name].rpartition('.')[0]}")
        if name is not None:
            seen[name] = field


def _check_known(field: str, noun: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise Contradiction(field, f"there is no {noun} {name!r}; known are: {', '.join(known) or 'none'}")
