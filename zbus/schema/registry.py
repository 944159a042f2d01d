"""`bus.schemas`: what the payloads of some keys must look like, registered once and held to from then on.

    await bus.schemas.register("shop/*/created", Order)

What is registered is kept in the log, every version of it, and is in force again when the log is opened: by the model
where the program registers it again, by its JSON Schema in a process that has no such class. A change that would
refuse what was accepted before is itself refused, unless it is forced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from zbus.errors import BusClosed, ConfigInvalid, LogReadOnly, SchemaConflict, SchemaError
from zbus.keys import check_expression
from zbus.observe.throttle import Throttle
from zbus.ports.log import Log, Schema
from zbus.util.runtime import Runtime

from .compatibility import differences
from .json_schema import Validate, canonical, compile_model, compile_schema, hash_of, to_json_schema
from .validators import PERMISSIVE, REMOVED, STRICT, Validator, Validators, active_schemas

T = TypeVar("T")
Mode = Literal["strict", "permissive"]
Ready = dict[tuple[str, str], Validate]  # by expression and hash


class _Given(NamedTuple):
    """A schema that somebody wants registered."""

    schema: dict[str, Any]
    hash: str
    validate: Validate
    is_model: bool


class Host(Protocol):
    """What the registry needs from the node."""

    @property
    def log(self) -> Log | None:
        """Where schemas are stored."""

    @property
    def is_open(self) -> bool:
        """Whether the bus is open."""

    @property
    def validates(self) -> bool:
        """Whether events are validated on this bus."""

    @property
    def run(self) -> Callable[..., asyncio.Future[Any]]:
        """`await run(call, *args)`: run a blocking call on a thread."""

    @property
    def count(self) -> Callable[[str, int], None]:
        """Add to a counter."""

    def validate_with(self, validators: Validators | None) -> None:
        """Validate events against these schemas from now on."""


class Schemas:
    """The schemas of one bus. Where several expressions match a key, a payload must fit all of them."""

    def __init__(self, host: Host, runtime: Runtime) -> None:
        self._host, self._time_ns = host, runtime.time_ns
        self._versions: dict[str, list[Schema]] = {}
        self._active: dict[str, Schema] = {}
        self._ready: Ready = {}
        self._throttle = Throttle(monotonic=runtime.monotonic)
        self._changing = asyncio.Lock()

    def list(self) -> Sequence[Schema]:
        """The schemas in force, by expression."""
        return [self._active[expression] for expression in sorted(self._active)]

    def get(self, expression: str) -> Schema | None:
        """The schema in force for exactly this expression; None where there is none."""
        return self._active.get(check_expression(expression))

    def versions(self, expression: str) -> Sequence[Schema]:
        """Every version that was registered for this expression, oldest first, also where it was removed."""
        return tuple(self._versions.get(check_expression(expression), ()))

    async def register(self, expression: str, schema: Any, *, mode: Mode = "strict", force: bool = False) -> Schema:
        """Hold the payloads of `expression` to a pydantic model or a JSON Schema (a dict, or JSON text) from now on.

            await bus.schemas.register("shop/*/created", Order)               # others are refused at publish
            await bus.schemas.register("legacy/**", text, mode="permissive")  # others are stored, and recorded

        The same schema and mode again is no new version; a model is then used for the checks. Raises `SchemaConflict`
        where it refuses what the one in force accepts, unless `force`; `SchemaError` for what is no JSON Schema. Either
        way nothing changed. Returns once it is on disk. Cancelled, it is registered or not, and in force if it is.
        """
        expression = check_expression(expression)
        if mode not in (STRICT, PERMISSIVE):
            raise ConfigInvalid("mode", f"{mode!r} is none of 'strict', 'permissive'")
        self._check_open()
        given = await self._host.run(_prepare, expression, schema)
        return await self._alone(lambda: self._register(expression, given, mode, force))

    async def remove(self, expression: str) -> None:
        """Hold the payloads of `expression` to nothing from now on. Its versions stay in the log.

        Raises `SchemaError` where nothing is registered. Cancelled, it is removed or not.
        """
        expression = check_expression(expression)
        self._check_open()
        await self._alone(lambda: self._remove(expression))

    async def load(self) -> None:
        """Read what is registered in the log; opening does this, and a bus that only reads may do it again.

        Raises `ConfigInvalid` where the library that checks is not installed. Cancelled, nothing changed.
        """
        log = self._host.log
        if log is None:
            return
        stored = await self._host.run(log.schemas.load)
        versions: dict[str, list[Schema]] = {}
        for each in stored:
            versions.setdefault(each.expression, []).append(each)
        schemas = active_schemas(stored)
        ready = await self._host.run(_compile, schemas, self._ready) if self._host.validates else {}
        self._versions = versions
        self._apply(schemas, ready)

    async def _alone(self, change: Callable[[], Awaitable[T]]) -> T:
        """One change after the other, each to its end: a caller that is cancelled leaves nothing half done."""

        async def run() -> T:
            async with self._changing:
                return await change()

        changing = asyncio.get_running_loop().create_task(run())
        changing.add_done_callback(_look_at_error)
        return await asyncio.shield(changing)

    async def _register(self, expression: str, given: _Given, mode: Mode, force: bool) -> Schema:
        before, made, validate = self._active.get(expression), None, given.validate
        if before is not None and before.hash != given.hash and not force:
            reasons = await self._host.run(differences, before.schema, given.schema)
            if reasons:
                raise SchemaConflict(expression, before.version, before.hash, reasons)
        if before is not None and before.hash == given.hash:
            made = before if before.mode == mode else None
            if not given.is_model:  # then a model that was registered before is the better check
                validate = self._ready.get((expression, given.hash), validate)
        if made is None:
            made = Schema(expression, self._next_version(expression), mode, given.hash, given.schema, self._time_ns())
            await self._keep(made)
        schemas = self._active | {expression: made}
        ready = {key: each for key, each in self._ready.items() if key[0] != expression}
        self._apply(schemas, ready | {(expression, given.hash): validate})
        return made

    async def _remove(self, expression: str) -> None:
        before = self._active.get(expression)
        if before is None:
            raise SchemaError(expression, "there is none")
        version = self._next_version(expression)
        await self._keep(before._replace(version=version, mode=REMOVED, registered_at_ns=self._time_ns()))
        schemas = {each: schema for each, schema in self._active.items() if each != expression}
        self._apply(schemas, {key: each for key, each in self._ready.items() if key[0] != expression})

    def _next_version(self, expression: str) -> int:
        return len(self._versions.get(expression, ())) + 1

    async def _keep(self, made: Schema) -> None:
        log = self._host.log
        if log is not None:
            if log.read_only:
                raise LogReadOnly(log.path)
            await self._host.run(log.schemas.store, made)
        self._versions.setdefault(made.expression, []).append(made)

    def _apply(self, schemas: dict[str, Schema], ready: Ready) -> None:
        """Let these be in force, at once and together."""
        self._active, self._ready = schemas, ready
        if self._host.validates:
            checks = [Validator(each, ready[expression, each.hash]) for expression, each in schemas.items()]
            self._host.validate_with(Validators(checks, self._host.count, self._throttle) if checks else None)

    def _check_open(self) -> None:
        if not self._host.is_open:
            raise BusClosed("change a schema")


def _prepare(expression: str, schema: Any) -> _Given:
    """On a thread: what was handed in, as it will be kept and checked."""
    found, model = to_json_schema(expression, schema)
    validate = compile_schema(expression, found)  # also where a model is there: another process will have to
    digest = hash_of(canonical(expression, found))
    return _Given(found, digest, validate if model is None else compile_model(model), model is not None)


def _compile(schemas: dict[str, Schema], ready: Ready) -> Ready:
    """On a thread: what checks these schemas. What was compiled before stays."""
    return {
        (expression, each.hash): ready.get((expression, each.hash)) or compile_schema(expression, each.schema)
        for expression, each in schemas.items()
    }


def _look_at_error(changing: asyncio.Task[Any]) -> None:
    """Whoever waited for it may have been cancelled; its error is then nobody's."""
    if not changing.cancelled():
        changing.exception()
