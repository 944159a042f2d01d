"""`zbus_spark.payload`: typed columns, and no row lost if a payload is invalid."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field
from spark_support import spark, write_log

import zbus_spark
from zbus.errors import ConfigInvalid


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Line(BaseModel):
    sku: str
    number: Annotated[int, Field(ge=1)] = 1


class Order(BaseModel):
    id: int
    amount: float
    paid: bool = False
    at: dt.datetime | None = None
    day: dt.date | None = None
    price: Decimal | None = None
    uuid: UUID | None = None
    colour: Colour = Colour.RED
    size: Literal["s", "m"] = "s"
    lines: list[Line] = []
    tags: dict[str, str] = {}


def test_payloads_become_typed_columns_and_bad_ones_keep_their_reason(log_path: Path) -> None:
    whole = {
        "id": 1,
        "amount": 2.5,
        "paid": True,
        "at": "2026-01-02T03:04:05Z",
        "day": "2026-01-02",
        "price": "9.95",
        "uuid": "6f9619ff-8b86-d011-b42d-00c04fc964ff",
        "colour": "blue",
        "size": "m",
        "lines": [{"sku": "a"}, {"sku": "b", "number": 3}],
        "tags": {"x": "y"},
    }
    bad = [b"not json", b'{"id": "x", "amount": 1}', b"\xff\xfe", b"", json.dumps({"id": 1 << 70, "amount": 1})]
    write_log(log_path, [("shop/orders/created", each) for each in [whole, *bad, {"id": 2, "amount": 3}]])

    found = zbus_spark.payload(spark().read.format("zbus").load(str(log_path)), Order).orderBy("offset").collect()

    assert len(found) == 7
    first = found[0]
    assert (first.id, first.amount, first.paid, first.invalid) == (1, 2.5, True, None)
    assert first.at == dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC).astimezone().replace(tzinfo=None)
    assert (first.day, first.price, first.uuid) == (dt.date(2026, 1, 2), Decimal("9.95"), whole["uuid"])
    assert (first.colour, first.size, first.tags) == ("blue", "m", {"x": "y"})
    assert [(each.sku, each.number) for each in first.lines] == [("a", 1), ("b", 3)]
    assert [row.id for row in found[1:6]] == [None] * 5
    assert all(row.invalid for row in found[1:6])
    assert found[2].invalid.startswith("id: ")
    assert "out of range for its column" in found[5].invalid
    assert [bytes(row.payload) for row in found[1:4]] == bad[:3]
    assert (found[6].id, found[6].colour, found[6].invalid) == (2, "red", None)


def test_a_field_named_like_a_column_needs_a_prefix(log_path: Path) -> None:
    class Clash(BaseModel):
        key: str

    write_log(log_path, [("a/b", {"key": "k"})])
    frame = spark().read.format("zbus").load(str(log_path))

    with pytest.raises(ConfigInvalid, match="columns key exist already: give a prefix"):
        zbus_spark.payload(frame, Clash)
    (row,) = zbus_spark.payload(frame, Clash, prefix="order_").collect()
    assert (row.key, row.order_key, row.order_invalid) == ("a/b", "k", None)


@pytest.mark.parametrize("annotation", [object, int | str, list[object], dict[int, str], Literal[1, "a"]], ids=str)
def test_an_unsupported_type_is_named_in_the_error(annotation: object, log_path: Path) -> None:
    model = type("Odd", (BaseModel,), {"__annotations__": {"field": annotation}})
    write_log(log_path, [("a/b", b"{}")])

    with pytest.raises(ConfigInvalid, match=r"Spark has no type for Odd\.field"):
        zbus_spark.payload(spark().read.format("zbus").load(str(log_path)), model)
