"""Backfill: pass a range of the log through a user's function and publish the result under other keys, exactly once.

A backfill is one write of the sink under a name that is derived from the log, the function, the keys and the requested
range: if it is run again, even after it was killed, nothing is published twice. Without an end, it ends at the head
that the log has when it starts; to continue from there later, give a start.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from zbus.errors import ConfigInvalid
from zbus.keys import KeySet
from zbus_log.file.tables import get_epoch
from zbus_log.read.reader import readable
from zbus_spark.commit import published
from zbus_spark.failures import spark_errors
from zbus_spark.reading import Position, read

from .named_writes import write

Function = Callable[[DataFrame], DataFrame]

_NAME_BYTES = 12
_COLUMNS = ("key", "payload", "headers")


class Backfilled(NamedTuple):
    """The name of a backfill, the number of its events, and whether it was published before this call."""

    sink_id: str
    events: int
    done_before: bool


def backfill(
    spark: SparkSession,
    log: str | Path,
    function: str | Function,
    *,
    key: str | Iterable[str],
    start: Position | None = None,
    end: Position | None = None,
    sink_id: str | None = None,
    to: str | Path | None = None,
    cold: str | Path | None = None,
) -> Backfilled:
    """Pass some events through a function and publish its result.

    `function` takes a DataFrame with the columns of a log, in the order of the log, and returns one with the columns
    `key`, `payload` and optionally `headers`. It is a callable, or its name as `module:function`. `start` and `end` are
    included. `to` is the log to publish to, by default the same; then `function` must not return keys that `key` reads.
    """
    expressions = KeySet([key] if isinstance(key, str) else key).expressions
    made_by = find(function) if isinstance(function, str) else function
    target = Path(log if to is None else to).expanduser().absolute()
    name = sink_id or _name(str(log), _title(function), expressions, start, end)
    before = published(target, name)
    if before is not None:
        return Backfilled(name, before, True)
    with spark_errors():
        events = read(spark, log, key=expressions, start=start, end=end, cold=cold).orderBy("offset")
        made = made_by(events)
        check_made(made, _title(function))
        if target == Path(log).expanduser().absolute():
            made = made.mapInArrow(_Guard(expressions), made.schema)
        return Backfilled(name, write(made, target, name), False)


def find(name: str) -> Function:
    """Return the function named `module:function`, from the current folder or an installed package."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigInvalid("function", f"{name!r} must be written as module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigInvalid(
                "function", f"the module {module_name!r} needs {error.name!r}, which is missing"
            ) from error
        reason = f"there is no module {module_name!r}, neither in the current folder nor installed"
        raise ConfigInvalid("function", reason) from error
    except Exception as error:
        reason = f"the module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigInvalid("function", reason) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigInvalid("function", f"the module {module_name!r} has no function {attribute!r}")
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # executors may not have the module
    return found  # type: ignore[no-any-return]


def check_made(made: Any, title: str) -> None:
    """Raise `ConfigInvalid` if a function did not return a DataFrame with the columns of the sink."""
    if not isinstance(made, DataFrame):
        raise ConfigInvalid("function", f"{title} returned {type(made).__name__}, not a DataFrame")
    missing = [name for name in _COLUMNS[:2] if name not in made.columns]
    others = [name for name in made.columns if name not in _COLUMNS]
    if missing or others:
        wrong = f"without {', '.join(missing)}" if missing else f"with additional columns: {', '.join(others)}"
        raise ConfigInvalid("function", f"{title} returned a DataFrame {wrong}; it must have key, payload[, headers]")


class _Guard:
    """Rejects rows whose key matches the expressions that are read: the next backfill would read them."""

    def __init__(self, expressions: tuple[str, ...]) -> None:
        self._expressions = expressions

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        keys = KeySet(self._expressions)
        for batch in batches:
            for key in pc.unique(batch.column("key")).to_pylist():
                if key is not None and key in keys:
                    expression = " ".join(self._expressions)
                    reason = f"it returns the key {key!r}, which {expression!r} reads: it would read its own output"
                    raise ConfigInvalid("function", f"{reason}. Publish under other keys, or to another log")
            yield batch


def _title(function: str | Function) -> str:
    if isinstance(function, str):
        return function
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _name(log: str, title: str, expressions: tuple[str, ...], start: Position | None, end: Position | None) -> str:
    """Return a name that is equal for the same work on the same log, even if the file was moved."""
    origin = log if "://" in log else _epoch(log)
    work = "\n".join((origin, title, *sorted(expressions), f"{start}", f"{end}"))
    return f"backfill {title} {blake2b(work.encode(), digest_size=_NAME_BYTES).hexdigest()}"[-200:]


def _epoch(log: str) -> str:
    engine = readable(os.fspath(log))
    try:
        with engine.connect() as connection:
            return get_epoch(connection).hex()
    finally:
        engine.dispose()
