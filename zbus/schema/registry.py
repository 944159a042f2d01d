"""The schema registry, `bus.schemas`: schemas for the payloads of some keys, validated from registration on.

    await bus.schemas.register("shop/*/created", Order)

The log stores every version of a schema, and it is active again when the log is opened: as the model if the program
registers it again, as a JSON Schema in a process without that class. A change that would reject payloads that were
valid before is rejected, unless it is forced.
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
    """A schema to register."""

    schema: dict[str, Any]
    hash: str
    validate: Validate
    is_model: bool


class Host(Protocol):
    """The parts of the node that the registry uses."""

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
    """The schemas of one bus. If several expressions match a key, a payload is validated against all of them."""

    def __init__(self, host: Host, runtime: Runtime) -> None:
        self._host, self._runtime, self._time_ns = host, runtime, runtime.time_ns
        self._versions: dict[str, list[Schema]] = {}
        self._active: dict[str, Schema] = {}
        self._ready: Ready = {}
        self._throttle = Throttle(monotonic=runtime.monotonic)
        self._changing = asyncio.Lock()

    def list(self) -> Sequence[Schema]:
        """Return the active schemas, by expression."""
        return [self._active[expression] for expression in sorted(self._active)]

    def get(self, expression: str) -> Schema | None:
        """Return the active schema registered for exactly this expression, or None."""
        return self._active.get(check_expression(expression))

    def versions(self, expression: str) -> Sequence[Schema]:
        """Return every version registered for this expression, oldest first, even if the schema was removed."""
        return tuple(self._versions.get(check_expression(expression), ()))

    async def register(self, expression: str, schema: Any, *, mode: Mode = "strict", force: bool = False) -> Schema:
        """Validate the payloads of `expression` against a pydantic model, a JSON Schema dict or JSON text from now on.

            await bus.schemas.register("shop/*/created", Order)               # invalid payloads are rejected
            await bus.schemas.register("legacy/**", text, mode="permissive")  # invalid payloads are stored and logged

        Registering the same schema and mode again adds no version; a model then does the validation. Returns once the
        schema is on disk. Raises `SchemaConflict` if it rejects payloads that the active schema accepts, unless
        `force`, and `SchemaError` if it is not a valid JSON Schema; nothing is changed then. If cancelled, the schema
        may or may not have been registered; if it was, it is active.
        """
        expression = check_expression(expression)
        if mode not in (STRICT, PERMISSIVE):
            raise ConfigInvalid("mode", f"must be 'strict' or 'permissive', not {mode!r}")
        self._check_open()
        given = await self._host.run(_prepare, expression, schema)
        return await self._serialized(lambda: self._register(expression, given, mode, force))

    async def remove(self, expression: str) -> None:
        """Stop validating the payloads of `expression`. Its versions stay in the log.

        Raises `SchemaError` if no schema is registered. If cancelled, the schema may or may not have been removed.
        """
        expression = check_expression(expression)
        self._check_open()
        await self._serialized(lambda: self._remove(expression))

    async def load(self) -> None:
        """Load the schemas from the log. Opening a bus does this; call it again on a read-only bus to see changes.

        Raises `ConfigInvalid` if the validation library is not installed. If cancelled, nothing is changed.
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

    async def _serialized(self, change: Callable[[], Awaitable[T]]) -> T:
        """Run one change at a time, and each to its end, even if the caller is cancelled."""

        async def run() -> T:
            async with self._changing:
                return await change()

        changing = asyncio.get_running_loop().create_task(run())
        changing.add_done_callback(_retrieve_error)
        return await asyncio.shield(changing)

    async def _register(self, expression: str, given: _Given, mode: Mode, force: bool) -> Schema:
        before, made, validate = self._active.get(expression), None, given.validate
        if before is not None and before.hash != given.hash and not force:
            reasons = await self._host.run(differences, before.schema, given.schema)
            if reasons:
                raise SchemaConflict(expression, before.version, before.hash, reasons)
        if before is not None and before.hash == given.hash:
            made = before if before.mode == mode else None
            if not given.is_model:  # keep using a model that was registered before
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
            raise SchemaError(expression, "no schema is registered")
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
        """Activate these schemas, all at once."""
        self._active, self._ready = schemas, ready
        if self._host.validates:
            found = [Validator(each, ready[expression, each.hash]) for expression, each in schemas.items()]
            made = Validators(found, self._host.count, self._throttle, self._runtime) if found else None
            self._host.validate_with(made)

    def _check_open(self) -> None:
        if not self._host.is_open:
            raise BusClosed("change a schema")


def _prepare(expression: str, schema: Any) -> _Given:
    """Convert and compile a schema. Runs on a thread."""
    found, model = to_json_schema(expression, schema)
    validate = compile_schema(expression, found)  # even for a model, because other processes use its JSON Schema
    digest = hash_of(canonical(expression, found))
    return _Given(found, digest, validate if model is None else compile_model(model), model is not None)


def _compile(schemas: dict[str, Schema], ready: Ready) -> Ready:
    """Compile the schemas that are not in `ready` yet. Runs on a thread."""
    return {
        (expression, each.hash): ready.get((expression, each.hash)) or compile_schema(expression, each.schema)
        for expression, each in schemas.items()
    }


def _retrieve_error(changing: asyncio.Task[Any]) -> None:
    """Mark an error as retrieved, because the caller may have been cancelled."""
    if not changing.cancelled():
        changing.exception()
