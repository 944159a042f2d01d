"""Calls that a newcomer gets wrong: each error says what to write, and nothing is opened, stored or changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zbus
import zbus_web
from zbus import ConfigInvalid, EventInvalid, KeyInvalid

ENDPOINT = "tcp/127.0.0.1:17991"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith("ZBUS_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


# Settings without an effect.


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        (
            {"log": "a.db", "read_only": True, "transport": "nats://h"},
            "transport",
            "a read-only bus opens no transport",
        ),
        ({"log": "a.db", "read_only": True, "transports": ["nats://h"]}, "transports", "opens no transport"),
        ({"transport": "nats://h", "mode": "peer", "listen": [ENDPOINT]}, "mode", "it is for Zenoh"),
        ({"options": {"tls_ca": "ca.pem"}}, "options", "this bus opens no connection"),
        ({"log": "memory", "keep": ["**"]}, "keep", "this bus opens no connection"),
        ({"log": "memory", "keep": "all"}, "keep", 'write keep=["**"]'),
        ({"log": "memory", "keep": "*"}, "keep", 'write keep=["**"]'),
        ({"log": "memory", "keep": "OWN"}, "keep", "'own', in lower case"),
    ],
    ids=lambda value: "",
)
def test_a_setting_that_would_have_no_effect_is_rejected(settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(words)) as caught:
        zbus.open(**settings)

    assert caught.value.field == field


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "zmq://", "mode": "peer", "listen": [ENDPOINT]},  # zmq finds nodes through Zenoh
        {"transports": ["nats://h", "zenoh"], "mode": "peer", "listen": [ENDPOINT]},
        {"options": {"nats.token": "x"}},  # for a transport to which the bus is switched later
        {"log": "memory", "keep": ["**"], "transport": "nats://h"},
        {"log": "memory", "keep": "own"},
        {"log": "memory", "keep": ["*"], "transport": "nats://h"},
    ],
    ids=str,
)
def test_a_setting_that_has_an_effect_is_accepted(settings: dict[str, Any]) -> None:
    config = zbus.open(**settings).config

    assert {name: getattr(config, name) for name in settings} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def test_a_session_of_the_application_connects_an_embedded_bus() -> None:
    assert zbus.open("memory", keep=["**"], session=object()).config.keep == ("**",)


def test_a_variable_that_several_programs_share_may_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_TRANSPORT", "nats://127.0.0.1:4222")

    assert zbus.open("app.db", read_only=True).config.read_only


async def test_receiving_on_a_transport_that_the_bus_does_not_have_is_rejected() -> None:
    async with zbus.open("memory") as bus:
        with pytest.raises(ConfigInvalid, match="'zmq' is not a transport of this bus"):
            await bus.receive_on("zmq")
        await bus.receive_on()


@pytest.mark.parametrize("overlap_s", [-1, float("nan"), "2", True], ids=str)
async def test_an_overlap_that_is_not_a_duration_is_rejected(overlap_s: Any) -> None:
    async with zbus.open("memory") as bus:
        with pytest.raises(ConfigInvalid, match="overlap_s"):
            await bus.switch_transport("zenoh", overlap_s=overlap_s)


async def test_two_different_correlation_ids_are_rejected_and_nothing_is_stored() -> None:
    async with zbus.open("memory") as bus:
        publisher = await bus.publisher("a/b")
        with pytest.raises(EventInvalid, match=r"correlation_id is 'one', and the header .* is 'two'"):
            await publisher.publish(1, correlation_id="one", headers={"correlation-id": "two"})
        assert await bus.head() == 0
        assert await publisher.publish(1, correlation_id="one", headers={"correlation-id": "one"}) == 1
        await bus.session("alice").publish("a/b", 1, headers={"correlation-id": "three"})
        assert [event.correlation_id async for event in bus.replay()] == ["one", "three", "three"]


async def test_a_session_subscribes_to_global_keys() -> None:
    async with zbus.open("memory") as bus:
        with pytest.raises(KeyInvalid, match="name the global key"):
            bus.session("alice").subscribe("sessions/alice/**")


# Opening.


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: zbus.open(":memory:"), ConfigInvalid, 'log: for a log in memory write zbus.open("memory")'),
        (
            lambda: zbus.open(path="a.db"),
            ConfigInvalid,
            "path: there is no such setting; the log is the first argument",
        ),
        (lambda: zbus.open(config={"log": "a.db"}), ConfigInvalid, "a BusConfig or the path of a TOML file, not dict"),
        (lambda: zbus.Bus("a.db"), TypeError, 'takes a BusConfig, not str: write zbus.open("app.db")'),
        (lambda: zbus.open("memory").publish, AttributeError, "write: publisher = await bus.publisher(key)"),
        (lambda: zbus.blocking.open("memory").publish, AttributeError, "write: bus.publisher(key).publish(payload)"),
        (lambda: zbus.open("memory").nothing, AttributeError, "'Bus' object has no attribute 'nothing'"),
        (lambda: zbus_web.create_app(zbus.open("memory"), {"port": 1}), TypeError, "a WebSettings, not dict"),
    ],
    ids=lambda value: "",
)
def test_a_wrong_call_says_what_to_write(
    call: Callable[[], Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["nats://user:secret@h", "zenoh://h", "zmq://"])
async def test_a_transport_in_place_of_the_log_is_named(url: str, tmp_path: Path) -> None:
    scheme = url.partition("://")[0]
    with pytest.raises(ConfigInvalid, match=f'the first argument is the log: write transport="{scheme}://…"') as caught:
        await zbus.open(url).start()

    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["kafka", "redis"])
async def test_a_transport_that_does_not_exist_is_named(scheme: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"there is no transport '{scheme}'"):
        await zbus.open(transport=f"{scheme}://127.0.0.1").start()


async def test_a_bus_that_was_closed_says_how_to_open_another() -> None:
    bus = zbus.open("memory")
    async with bus:
        pass
    with pytest.raises(zbus.ZbusError, match=r"create a new one with zbus\.open"):
        await bus.start()


@pytest.mark.parametrize(
    ("name", "value"),
    [("ZBUS_RETAIN_AGE_S", "7d"), ("ZBUS_METADATA", "{bad"), ("ZBUS_READ_ONLY", "maybe"), ("ZBUS_LISTEN", "here")],
)
def test_an_error_in_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigInvalid) as caught:
        zbus.open("memory")

    assert caught.value.field == name


def test_an_error_in_an_argument_names_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_RETAIN_AGE_S", "5")
    with pytest.raises(ConfigInvalid) as caught:
        zbus.open("memory", retain_age_s=-1)

    assert caught.value.field == "retain_age_s"


# Subscribing and serving.


@pytest.mark.parametrize("schema", [5, "Order", {"type": "object"}], ids=str)
async def test_a_schema_that_is_not_a_type_is_rejected(schema: Any) -> None:
    async with zbus.open("memory") as bus:
        with pytest.raises(ConfigInvalid, match="schema: must be the type that payloads decode to"):
            bus.subscribe("a/**", schema=schema)
        bus.subscribe("a/**", schema=list[int])


async def test_an_empty_durable_name_is_rejected_when_the_handler_is_registered() -> None:
    async with zbus.open("memory") as bus:
        with pytest.raises(ConfigInvalid, match="durable: '' must be the name"):

            @bus.on("a/**", durable="")
            async def handle(event: zbus.Event) -> None: ...


@pytest.mark.parametrize("limit", [None, 0, -1, True], ids=str)
async def test_a_batch_of_no_events_is_rejected(limit: Any) -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/**") as sub:
        with pytest.raises(ConfigInvalid, match="limit"):
            await sub.next_batch(limit)


async def test_a_request_is_served_on_one_concrete_key() -> None:
    async with zbus.open("memory") as bus:
        with pytest.raises(KeyInvalid, match="a request goes to one concrete key"):

            @bus.serve("q/*")
            async def answer(request: zbus.Event) -> None: ...


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (
            "shop.orders.*",
            "key expression 'shop.orders.*' rejected: segments are separated by '/': write 'shop/orders/*'",
        ),
        ("shop//x", "key expression 'shop//x' rejected: it has an empty segment"),
        ("shop/or*", "key expression 'shop/or*' rejected: '*' and '**' stand for whole segments"),
    ],
)
async def test_an_expression_that_is_rejected_is_called_an_expression(expression: str, words: str) -> None:
    async with zbus.open("memory") as bus:
        with pytest.raises(KeyInvalid, match=re.escape(words)):
            bus.subscribe(expression)


# The log of another bus.


async def test_a_log_that_this_process_has_open_is_said_to_be_open_here(log_path: Path) -> None:
    async with zbus.open(log_path) as bus, bus.subscribe("a/**", durable="d"):
        with pytest.raises(zbus.LogLocked, match="this process has it open already"):
            await zbus.open(log_path).start()
        with pytest.raises(zbus.CursorError, match="this process has it open already"):
            async with bus.subscribe("a/**", durable="d"):
                pass


async def test_a_read_only_bus_says_how_to_publish(log_path: Path) -> None:
    async with zbus.open(log_path):
        pass
    async with zbus.open(log_path, read_only=True) as bus:
        publisher = await bus.publisher("a/b")
        with pytest.raises(zbus.LogReadOnly, match="or open it without read_only=True"):
            await publisher.publish(1)
