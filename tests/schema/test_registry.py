"""`bus.schemas`: registration, storage in the log, validation at publish, and every error of these."""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from pydantic import BaseModel, field_validator

import zbus
from zbus.ports.log import Row
from zbus.schema.json_schema import HASH_DIGITS
from zbus_log import put

KEY, EXPRESSION = "shop/orders/created", "shop/*/created"
DRAFT = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


class Order(BaseModel):
    id: int
    note: str = ""


class Wider(Order):
    price: float | None = None


class Narrower(Order):
    price: float


class Own(BaseModel):
    id: int

    @field_validator("id")
    @classmethod
    def _even(cls, value: int) -> int:
        if value == 13:
            raise KeyError("a validator that raises what it should not")
        assert value % 2 == 0, "odd"
        return value


async def stored(bus: zbus.Bus) -> list[bytes]:
    return [event.payload async for event in bus.replay("**")]


def records(caplog: pytest.LogCaptureFixture, name: str = "EVENT_INVALID_SCHEMA") -> list[dict[str, Any]]:
    found = [getattr(each, "zbus", {}) for each in caplog.records]
    return [each for each in found if each.get("record") == name]


# Registering.


@pytest.mark.parametrize("schema", [Order, DRAFT, json.dumps(DRAFT), json.dumps(DRAFT).encode()])
async def test_a_schema_is_a_model_or_a_json_schema_as_a_dict_or_as_text(log_path: Path, schema: Any) -> None:
    async with zbus.open(log_path) as bus:
        made = await bus.schemas.register(EXPRESSION, schema)

        assert (made.expression, made.version, made.mode) == (EXPRESSION, 1, "strict")
        assert len(made.hash) == HASH_DIGITS
        assert made.schema["properties"]["id"]["type"] == "integer"
        assert made.registered_at_ns > 0
        assert bus.schemas.list() == [made]
        assert bus.schemas.get(EXPRESSION) == made
        assert bus.schemas.get("shop/**") is None


async def test_the_hash_is_that_of_the_meaning_and_not_of_how_it_was_written() -> None:
    async with zbus.open() as bus:
        first = await bus.schemas.register("a", json.dumps(DRAFT, indent=4))
        second = await bus.schemas.register("b", dict(reversed(DRAFT.items())))
        third = await bus.schemas.register("c", {**DRAFT, "required": []})

    assert first.hash == second.hash != third.hash


async def test_schemas_are_in_force_again_when_the_log_is_opened_without_the_model(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        made = await bus.schemas.register(EXPRESSION, Order)

    async with zbus.open(log_path) as bus:
        assert bus.schemas.list() == [made]
        publisher = await bus.publisher(KEY)
        await publisher.publish({"id": 1})
        with pytest.raises(zbus.SchemaInvalid) as caught:
            await publisher.publish({"id": "one"})
        assert await stored(bus) == [b'{"id":1}']
    assert caught.value.expected_hash == made.hash


async def test_a_bus_that_only_reads_knows_the_schemas_and_registers_none(log_path: Path) -> None:
    async with zbus.open(log_path) as owner:
        made = await owner.schemas.register(EXPRESSION, Order)
        async with zbus.open(log_path, read_only=True) as reader:
            assert reader.schemas.list() == [made]
            with pytest.raises(zbus.LogReadOnly):
                await reader.schemas.register("other/**", Order)
            second = await owner.schemas.register("other/**", Order)
            assert reader.schemas.list() == [made]
            await reader.schemas.load()
            assert reader.schemas.list() == [second, made]


async def test_the_same_again_is_no_new_version_and_brings_the_model(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        made = await bus.schemas.register(EXPRESSION, Own)

    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher(KEY)
        await publisher.publish({"id": 1})  # the JSON Schema does not distinguish odd and even
        assert await bus.schemas.register(EXPRESSION, Own) == made
        assert bus.schemas.versions(EXPRESSION) == (made,)
        with pytest.raises(zbus.SchemaInvalid, match="odd"):
            await publisher.publish({"id": 1})
        assert await bus.schemas.register(EXPRESSION, made.schema) == made
        with pytest.raises(zbus.SchemaInvalid, match="odd"):  # and the model stays
            await publisher.publish({"id": 1})


async def test_every_version_is_kept_and_the_newest_is_in_force(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        first = await bus.schemas.register(EXPRESSION, Order)
        second = await bus.schemas.register(EXPRESSION, Wider)
        third = await bus.schemas.register(EXPRESSION, Wider, mode="permissive")

    async with zbus.open(log_path) as bus:
        assert bus.schemas.versions(EXPRESSION) == (first, second, third)
        assert bus.schemas.list() == [third]
        assert [each.version for each in (first, second, third)] == [1, 2, 3]


async def test_an_incompatible_schema_is_refused_with_reasons_unless_it_is_forced(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        made = await bus.schemas.register(EXPRESSION, Order)
        publisher = await bus.publisher(KEY)
        with pytest.raises(zbus.SchemaConflict) as caught:
            await bus.schemas.register(EXPRESSION, Narrower)

        assert caught.value.reasons == ("$: now required: price",)
        assert (caught.value.version, caught.value.expected_hash) == (1, made.hash)
        assert bus.schemas.list() == [made]
        await publisher.publish(Order(id=1))

        forced = await bus.schemas.register(EXPRESSION, Narrower, force=True)
        assert forced.version == 2
        with pytest.raises(zbus.SchemaInvalid, match="price"):
            await publisher.publish(Order(id=1))
    async with zbus.open(log_path) as bus:
        assert bus.schemas.list() == [forced]


async def test_a_removed_schema_rejects_nothing_and_anything_may_follow_it(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        first = await bus.schemas.register(EXPRESSION, Order)
        await bus.schemas.remove(EXPRESSION)
        assert (bus.schemas.list(), node_of(bus).validators) == ([], None)
        await (await bus.publisher(KEY)).publish(b"anything")
        with pytest.raises(zbus.SchemaError, match="no schema is registered"):
            await bus.schemas.remove(EXPRESSION)

    async with zbus.open(log_path) as bus:
        assert bus.schemas.list() == []
        assert [each.mode for each in bus.schemas.versions(EXPRESSION)] == ["strict", "removed"]
        again = await bus.schemas.register(EXPRESSION, Narrower)
        assert (first.version, again.version) == (1, 3)


async def test_without_a_log_schemas_last_as_long_as_the_bus() -> None:
    async with zbus.open() as bus:
        await bus.schemas.register(EXPRESSION, Order)
        publisher = await bus.publisher(KEY)
        assert await publisher.publish(Order(id=1)) == 0
        with pytest.raises(zbus.SchemaInvalid):
            await publisher.publish(b"{}")
        with pytest.raises(zbus.SchemaConflict):
            await bus.schemas.register(EXPRESSION, Narrower)


async def test_two_who_register_at_once_get_two_versions_or_one(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        same = await asyncio.gather(*[bus.schemas.register(EXPRESSION, Order) for _ in range(5)])
        assert {each.version for each in same} == {1}
        both = await asyncio.gather(
            bus.schemas.register(EXPRESSION, Wider),
            bus.schemas.register(EXPRESSION, Order, mode="permissive", force=True),
        )
        assert sorted(each.version for each in both) == [2, 3]


async def test_a_registration_that_is_cancelled_is_whole_or_not_there(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        log = node_of(bus).need_log("")
        writer = log._writer  # type: ignore[attr-defined]
        go_on = threading.Event()
        writer.run(lambda: go_on.wait(10))
        async with asyncio.timeout(10):
            while not writer._inbox.empty():  # it waits for us now
                await asyncio.sleep(0.002)
            registering = asyncio.create_task(bus.schemas.register(EXPRESSION, Order))
            while writer._inbox.empty():  # it is with the writer
                await asyncio.sleep(0.002)
        registering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await registering
        go_on.set()
        async with asyncio.timeout(10):
            while not bus.schemas.list():
                await asyncio.sleep(0.005)
        assert [each.version for each in log.schemas.load()] == [1]


async def test_a_closed_bus_registers_nothing(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        pass
    with pytest.raises(zbus.BusClosed):
        await bus.schemas.register(EXPRESSION, Order)


# Invalid schemas.


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "an object"),
        (b"\xff", "not JSON"),
        ('{"minimum": NaN}', "not JSON"),
        (7, "int must be a pydantic model"),
        (int, "int must be a pydantic model"),
        ({"type": "objekt"}, "not a valid JSON Schema"),
        ({"type": 5}, "not a valid JSON Schema"),
        ({"pattern": "("}, "not a valid JSON Schema"),
        ({"$ref": "#/$defs/missing"}, "not a valid JSON Schema"),
        ({"$ref": "http://127.0.0.1:9/order.json"}, "not part of the schema"),
        ({"$ref": "file:///etc/hostname"}, "not part of the schema"),
        ({"default": {1, 2}}, "cannot be written as JSON"),
        ({"description": "x" * 2_000_000}, "over the limit"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_is_no_schema_is_refused_and_the_one_in_force_stays(
    log_path: Path, schema: Any, reason: str
) -> None:
    async with zbus.open(log_path) as bus:
        made = await bus.schemas.register(EXPRESSION, Order)
        with pytest.raises(zbus.SchemaError, match=reason) as caught:
            await bus.schemas.register(EXPRESSION, schema, force=True)

        assert "nothing was changed" in str(caught.value)
        assert len(str(caught.value)) < 1000
        assert bus.schemas.versions(EXPRESSION) == (made,)


async def test_a_mode_or_an_expression_that_is_none_is_refused() -> None:
    async with zbus.open() as bus:
        with pytest.raises(zbus.ConfigInvalid, match="strict"):
            await bus.schemas.register(EXPRESSION, Order, mode="lax")  # type: ignore[arg-type]
        with pytest.raises(zbus.KeyInvalid):
            await bus.schemas.register("shop//created", Order)
        assert bus.schemas.list() == []


async def test_without_the_library_opening_and_registering_say_what_to_install(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with zbus.open(log_path) as bus:
        await bus.schemas.register(EXPRESSION, Order)
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "jsonschema_rs":
            raise ImportError(name=name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "jsonschema_rs")
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(zbus.ConfigInvalid, match=r"pip install 'zbus-mesh\[schema\]'"):
        async with zbus.open(log_path):
            pass
    async with zbus.open() as bus:
        with pytest.raises(zbus.ConfigInvalid, match=r"pip install 'zbus-mesh\[schema\]'"):
            await bus.schemas.register(EXPRESSION, Order)
    async with zbus.open(log_path, validate_schemas=False) as bus:
        await (await bus.publisher(KEY)).publish(b"unchecked")
        assert bus.schemas.get(EXPRESSION) is not None


def test_nothing_is_imported_before_a_schema_is_registered() -> None:
    code = (
        "import asyncio, sys, zbus\n"
        "async def main():\n"
        "    async with zbus.open('memory') as bus:\n"
        "        await (await bus.publisher('a')).publish(b'')\n"
        "asyncio.run(main())\n"
        "assert 'jsonschema_rs' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


# Publishing.


@pytest.mark.parametrize("schema", [Order, DRAFT], ids=["by the model", "by the JSON Schema"])
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"not json", "it is not JSON"),
        ("text", "it is not JSON"),
        (b"", "it is not JSON"),
        (b"{}", "id"),
        ({"id": "1"}, r"\$\.id: "),  # no process turns text into numbers: they all agree
        ([1], r"\$: "),
    ],
)
async def test_strict_refuses_at_publish_and_stores_nothing(
    log_path: Path, schema: Any, payload: Any, reason: str
) -> None:
    async with zbus.open(log_path) as bus:
        made = await bus.schemas.register(EXPRESSION, schema)
        publisher = await bus.publisher(KEY)
        with pytest.raises(zbus.SchemaInvalid, match=reason) as caught:
            await publisher.publish(payload)

        error = caught.value
        assert (error.key, error.topic, error.expression) == (KEY, "created", EXPRESSION)
        assert error.expected_hash == made.hash
        assert isinstance(error.payload, bytes)
        assert error.event is None
        assert "not stored" in str(error)
        assert publisher.sequence == 0
        assert await bus.head() == 0
        await publisher.publish({"id": 1})
        await (await bus.publisher("other/key")).publish(payload)


async def test_an_offending_payload_is_whole_in_the_error_and_short_in_its_words() -> None:
    async with zbus.open() as bus:
        await bus.schemas.register("**", DRAFT)
        payload = json.dumps({"id": "x" * 100_000}).encode()
        with pytest.raises(zbus.SchemaInvalid) as caught:
            await (await bus.publisher("a")).publish(payload)

    assert caught.value.payload == payload
    assert len(str(caught.value)) < 1200


async def test_publish_many_stores_whole_commits_before_the_one_that_is_refused(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        await bus.schemas.register(EXPRESSION, Order)
        publisher = await bus.publisher(KEY)
        payloads: list[Any] = [{"id": number} for number in range(1500)]
        with pytest.raises(zbus.SchemaInvalid) as caught:
            await publisher.publish_many([*payloads, b"bad", *payloads])

        assert caught.value.__notes__ == ["1000 events of this call are stored"]
        assert await bus.head() == 1000


async def test_put_stores_all_or_nothing_of_a_call(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        await bus.schemas.register(EXPRESSION, Order)
        good, bad = zbus.Event(7, 0, 1, KEY, b'{"id": 1}'), zbus.Event(7, 1, 1, KEY, b"{}")
        with pytest.raises(zbus.SchemaInvalid):
            await bus.put(good, bad)
        assert await bus.head() == 0
        assert list(await bus.put(good)) == [1]


async def test_what_another_process_has_the_owner_publish_is_held_to_the_schemas(log_path: Path) -> None:
    good, bad = [Row(7, n, 1, KEY, b'{"id": 1}', None) for n in (0, 1)], Row(7, 9, 1, KEY, b"{}", None)
    async with zbus.open(log_path) as bus:
        made = await bus.schemas.register(EXPRESSION, Order)
        with pytest.raises(zbus.SchemaInvalid) as caught:
            await asyncio.to_thread(put, log_path, [[*good, bad]])
        assert (caught.value.key, caught.value.payload, caught.value.expected_hash) == (KEY, b"{}", made.hash)
        assert await bus.head() == 0
        assert (await asyncio.to_thread(put, log_path, [good])).events == 2
    # The same for a log without an owner.
    with pytest.raises(zbus.SchemaInvalid):
        put(log_path, [[bad]])
    assert put(log_path, [good]).last_offset == 2


async def test_permissive_stores_delivers_records_and_counts(log_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    async with zbus.open(log_path) as bus:
        made = await bus.schemas.register(EXPRESSION, Order, mode="permissive")
        publisher = await bus.publisher(KEY)
        await publisher.publish({"id": 1})
        assert bus.stats().get("invalid_schema") is None
        await publisher.publish_many([b"nonsense" * 100] * 3)

        assert bus.stats()["invalid_schema"] == 3
        assert await bus.head() == 4
    (reported,) = records(caplog)  # once per key and minute
    assert (reported["key"], reported["topic"]) == (KEY, "created")
    assert reported["expected_hash"] == made.hash
    assert reported["reason"].startswith("it is not JSON")
    assert reported["payload"] == (b"nonsense" * 100)[:200]
    assert reported["payload_bytes"] == 800


async def test_a_key_is_held_to_every_expression_that_matches_it() -> None:
    async with zbus.open() as bus:
        await bus.schemas.register("shop/**", {"required": ["shop"]})
        await bus.schemas.register(EXPRESSION, DRAFT)
        await bus.schemas.register("**", {"required": ["loose"]}, mode="permissive")
        publisher = await bus.publisher(KEY)
        for refused in ({"id": 1}, {"shop": 1}):
            with pytest.raises(zbus.SchemaInvalid):
                await publisher.publish(refused)
        assert "invalid_schema" not in bus.stats()  # what is refused is not there to be counted
        await publisher.publish({"id": 1, "shop": 1})
        assert bus.stats()["invalid_schema"] == 1
        await (await bus.publisher("shop/other")).publish({"shop": 1})


async def test_a_validator_that_raises_anything_refuses_like_any_other() -> None:
    async with zbus.open() as bus:
        await bus.schemas.register(EXPRESSION, Own)
        with pytest.raises(zbus.SchemaInvalid, match="KeyError"):
            await (await bus.publisher(KEY)).publish({"id": 13})


async def test_a_publisher_made_before_is_held_to_what_is_registered_after(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher(KEY)
        await publisher.publish(b"free")
        await bus.schemas.register(EXPRESSION, Order)
        with pytest.raises(zbus.SchemaInvalid):
            await publisher.publish(b"free")
        await bus.schemas.remove(EXPRESSION)
        await publisher.publish(b"free")


def test_the_same_for_code_without_an_event_loop(log_path: Path) -> None:
    with zbus.blocking.open(log_path) as bus:
        made = bus.schemas.register(EXPRESSION, Order)
        assert (bus.schemas.list(), bus.schemas.get(EXPRESSION)) == ([made], made)
        with pytest.raises(zbus.SchemaInvalid):
            bus.publisher(KEY).publish(b"{}")
        with pytest.raises(zbus.SchemaConflict):
            bus.schemas.register(EXPRESSION, Narrower)
        bus.schemas.remove(EXPRESSION)
        assert bus.publisher(KEY).publish(b"{}") == 1
