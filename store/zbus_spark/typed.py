"""Payloads as typed columns: JSON validated by a pydantic model, with the reason for each invalid payload."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa
from pydantic import BaseModel, ValidationError
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_type

from zbus.errors import ConfigInvalid

M = TypeVar("M", bound=BaseModel)

INVALID = "invalid"
_SIMPLE: dict[Any, t.DataType] = {
    bool: t.BooleanType(),
    int: t.LongType(),
    float: t.DoubleType(),
    str: t.StringType(),
    bytes: t.BinaryType(),
    datetime: t.TimestampType(),
    date: t.DateType(),
    Decimal: t.DecimalType(38, 18),
    UUID: t.StringType(),
}


def payload(frame: DataFrame, model: type[M], *, prefix: str = "") -> DataFrame:
    """Add a column for each field of `model`, decoded from the JSON in `payload`, and the column `invalid`.

    If a payload is not valid against the model, its fields are null and `invalid` has the reason; no row is dropped.
    `prefix` is put before each name, for models whose fields have the names of columns of the log. Raises
    `ConfigInvalid` if a column exists already, or if Spark has no type for a field.
    """
    kind = _struct(model, model.__name__)
    added = [f"{prefix}{name}" for name in [*kind.names, INVALID]]
    if taken := sorted(set(added) & set(frame.columns)):
        raise ConfigInvalid("prefix", f"the columns {', '.join(taken)} exist already: give a prefix")
    both = t.StructType([t.StructField("value", kind), t.StructField(INVALID, t.StringType())])
    arrow_udf: Any = f.arrow_udf  # type: ignore[attr-defined]  # missing only in Spark's stubs
    decode = arrow_udf(_decoder(model, to_arrow_type(both, timezone="UTC")), both)
    decoded = frame.withColumn("_zbus_decoded", decode("payload"))
    fields = [f.col(f"_zbus_decoded.value.`{name}`").alias(f"{prefix}{name}") for name in kind.names]
    return decoded.select(*frame.columns, *fields, f.col(f"_zbus_decoded.{INVALID}").alias(f"{prefix}{INVALID}"))


def _decoder(model: type[BaseModel], kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    """Return a function from payloads to values and reasons, which runs on the executors."""

    def decode(payloads: pa.Array) -> pa.Array:
        found = [_decode(model, each) for each in payloads.to_pylist()]
        try:
            return pa.array(found, kind)
        except (pa.ArrowException, OverflowError, ValueError):  # a value is out of range: find its row
            return pa.array([_fitting(each, kind) for each in found], kind)

    return decode


def _decode(model: type[BaseModel], data: bytes) -> dict[str, Any]:
    try:
        return {"value": _plain(model.model_validate_json(data).model_dump()), INVALID: None}
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return {"value": None, INVALID: f"{where}: {first['msg']}" if where else first["msg"]}


def _plain(value: Any) -> Any:
    """Return a value that Arrow can convert."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, UUID) else value


def _fitting(found: dict[str, Any], kind: pa.DataType) -> dict[str, Any]:
    try:
        pa.array([found], kind)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        return {"value": None, INVALID: f"value out of range for its column: {error}"}
    return found


def _struct(model: type[BaseModel], where: str) -> t.StructType:
    fields = model.model_fields.items()
    return t.StructType([t.StructField(name, _type(field.annotation, f"{where}.{name}")) for name, field in fields])


def _type(annotation: Any, where: str) -> t.DataType:
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0], where)
    if origin in (typing.Union, types.UnionType):
        some = [each for each in arguments if each is not type(None)]
        if len(some) == 1:
            return _type(some[0], where)
    if origin in (list, set, frozenset, tuple) and {*arguments[1:]} <= {Ellipsis} and arguments:
        return t.ArrayType(_type(arguments[0], where))
    if origin is dict and arguments[0] is str:
        return t.MapType(t.StringType(), _type(arguments[1], where))
    if origin is typing.Literal:
        return _one_type({type(each) for each in arguments}, where)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _one_type({type(each.value) for each in annotation}, where)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _struct(annotation, where)
    raise ConfigInvalid("model", f"Spark has no type for {where}: {annotation}")


def _one_type(kinds: set[type], where: str) -> t.DataType:
    if len(kinds) != 1:
        raise ConfigInvalid("model", f"Spark has no type for {where}: its values have several types")
    return _type(kinds.pop(), where)
