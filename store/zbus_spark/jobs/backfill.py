"""Backfill: a range of the log through a function of the user's, and back onto the bus under other keys, once.

A backfill has a name, made of the log, the function, the keys and the range that were asked for, and is one write of
the sink under that name: run again, also after it was killed, it publishes nothing twice. Where no end is given it
ends at the head that the log had when it was run; to go on from there later, say where to start.
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
    """The name under which a backfill was published, its events, and whether that was done before this call."""

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
    """Publish what a function makes of some events: a DataFrame with the columns of a log, in the order of the log,
    to one with the columns `key`, `payload` and, if there are any, `headers`.

    `function` is a callable, or its name as `module:function`. `start` and `end` are included. `to` is the log to
    publish to, by default the same; then no key that is made may be one of those that are read.
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
    """The function that `module:function` names, from the folder of now or whatever is installed."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigInvalid("function", f"{name!r} is not written as module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigInvalid(
                "function", f"the module {module_name!r} needs {error.name!r}, which is missing"
            ) from error
        raise ConfigInvalid("function", f"there is no module {module_name!r}, here or installed") from error
    except Exception as error:
        reason = f"the module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigInvalid("function", reason) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigInvalid("function", f"the module {module_name!r} has no function {attribute!r}")
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # executors may not have it
    return found  # type: ignore[no-any-return]


def check_made(made: Any, title: str) -> None:
    """What a function returned can be published: a DataFrame with the right columns."""
    if not isinstance(made, DataFrame):
        raise ConfigInvalid("function", f"{title} returned {type(made).__name__}, and not a DataFrame")
    missing = [name for name in _COLUMNS[:2] if name not in made.columns]
    others = [name for name in made.columns if name not in _COLUMNS]
    if missing or others:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(others)} besides"
        raise ConfigInvalid(
            "function", f"{title} returned a DataFrame that {wrong}; it is to have key, payload[, headers]"
        )


class _Guard:
    """Refuses rows whose key is one of those that are read: the next backfill would be fed by this one."""

    def __init__(self, expressions: tuple[str, ...]) -> None:
        self._expressions = expressions

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        keys = KeySet(self._expressions)
        for batch in batches:
            for key in pc.unique(batch.column("key")).to_pylist():
                if key is not None and key in keys:
                    expression = " ".join(self._expressions)
                    reason = f"it makes the key {key!r}, which {expression!r} reads: it would feed itself"
                    raise ConfigInvalid("function", f"{reason}. Publish under other keys, or to another log")
            yield batch


def _title(function: str | Function) -> str:
    if isinstance(function, str):
        return function
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _name(log: str, title: str, expressions: tuple[str, ...], start: Position | None, end: Position | None) -> str:
    """The same for the same work on the same log, wherever that lies by now."""
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
