"""How long does strict validation take at publish, compared with bare `model_validate_json` of a small model?

zbus: the work of `publish` for a registered schema, which looks up the checks of the key and runs them on the encoded
payload: with the model, and with its JSON Schema, as in a process without the class. The peer in both rows is the
model's own `model_validate_json` on the same bytes. Only the check is measured, in memory and without a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from time import thread_time_ns

from _harness import Measurement, Row, Sizes, alternate, compare, run_one, zbus_versions
from pydantic import BaseModel

import zbus

KEY = "shop/orders/created"
BATCH = 1000
WARM_UP_BATCHES = 20
TARGET = 1.3


class Order(BaseModel):
    """A small model."""

    id: int
    customer: str
    total: float
    paid: bool = False


BODY = Order(id=1, customer="somebody", total=12.5).model_dump_json().encode()


def rows(sizes: Sizes) -> list[Row]:
    """Measure validation with a model and with its JSON Schema."""
    return asyncio.run(_rows(sizes))


async def _rows(sizes: Sizes) -> list[Row]:
    batches, rounds = sizes.of(100, 20), sizes.of(15, 1)
    versions = {"zbus": zbus_versions(), "peer": {"pydantic": version("pydantic")}}
    found = []
    for name, schema in (("a small pydantic model", Order), ("its JSON Schema", Order.model_json_schema())):
        async with zbus.open() as bus:
            publisher = await bus.publisher(KEY)
            await bus.schemas.register("shop/*/created", schema)
            await publisher.publish(BODY)  # so that the checks are looked up before the measurement

            def held(body: bytes, bus: zbus.Bus = bus, publisher: zbus.EventPublisher = publisher) -> None:
                if bus._node.validators is not None:
                    bus._node.validators.validate(publisher.key, body)

            measured = alternate(
                rounds, partial(measure, held, batches), partial(measure, Order.model_validate_json, batches)
            )
        found.append(
            compare(
                "schema_check",
                f"a strict check of {name} at publish vs. bare `model_validate_json`",
                unit="ns",
                peer_name="pydantic",
                rounds=measured,
                target=TARGET,
                target_is="ratio at most",
                versions=versions,
                durations="of one batch of 1,000",
                payload_bytes=len(BODY),
            )
        )
    return found


def measure(check: Callable[[bytes], object], batches: int) -> Measurement:
    """Measure nanoseconds of thread time per check, in batches of a thousand."""
    durations = []
    for number in range(WARM_UP_BATCHES + batches):
        begin = thread_time_ns()
        for _ in range(BATCH):
            check(BODY)
        if number >= WARM_UP_BATCHES:
            durations.append(thread_time_ns() - begin)
    return Measurement(sorted(durations)[len(durations) // 2] / BATCH, durations)


if __name__ == "__main__":
    run_one(rows)
