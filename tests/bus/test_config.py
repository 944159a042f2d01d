"""The configuration: where a setting comes from, and how a wrong one is refused before anything is opened."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, model_validator

import zbus
from zbus import BusConfig, ConfigInvalid
from zbus.config import Contradiction, config_errors, load_config, load_only


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith("ZBUS_") or name == "DYN_EVENT_PLANE":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)  # a relative log never lands in the project


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "zbus.toml"


# Where a setting comes from.


def test_a_bus_with_nothing_given_is_embedded_and_keeps_no_log() -> None:
    config = zbus.open().config

    assert (config.mode, config.log, config.transport) == ("embedded", None, "zenoh")
    assert (config.durability, config.payload_bytes_max) == ("fsync", 8 * 1024 * 1024)


def test_settings_are_given_as_arguments() -> None:
    config = zbus.open("app.db", durability="os", payload_bytes_max=1000, retain_events=5).config

    assert (config.log, config.durability, config.payload_bytes_max) == ("app.db", "os", 1000)
    assert config.retain_events == 5


def test_the_log_is_given_as_a_path_object_too(log_path: Path) -> None:
    assert zbus.open(log_path).config.log == str(log_path)


def test_settings_are_given_as_a_bus_config() -> None:
    config = BusConfig(log="memory", close_timeout_s=1.5)

    assert zbus.open(config=config).config is config


@pytest.mark.parametrize("more", [{"log": "app.db"}, {"durability": "os"}], ids=str)
def test_a_bus_config_and_single_settings_together_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalid, match="not both") as caught:
        zbus.open(config=BusConfig(), **more)

    assert caught.value.field == "config"


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_LOG", "env.db")
    monkeypatch.setenv("ZBUS_MODE", "peer")
    monkeypatch.setenv("ZBUS_LISTEN", "tcp/127.0.0.1:7447, tcp/127.0.0.1:7448")
    monkeypatch.setenv("ZBUS_RETAIN_IGNORE_CURSORS", "true")
    monkeypatch.setenv("ZBUS_CLOSE_TIMEOUT_S", "2.5")

    config = zbus.open().config

    assert (config.log, config.mode, config.close_timeout_s) == ("env.db", "peer", 2.5)
    assert config.listen == ("tcp/127.0.0.1:7447", "tcp/127.0.0.1:7448")
    assert config.retain_ignore_cursors is True


def test_every_setting_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    given = {
        "log": "app.db",
        "cold_dir": "app.db-cold",
        "read_only": "false",
        "durability": "os",
        "transport": "zenoh",
        "transports": "zenoh,nats://127.0.0.1:4222",
        "receive_on": "zenoh",
        "options": '{"user": "x"}',
        "mode": "router",
        "listen": "tcp/127.0.0.1:7447",
        "connect": "tcp/127.0.0.1:7448",
        "keep": "own",
        "wire": "zbus",
        "tracing": "off",
        "node": "worker-7",
        "bus": "telemetry",
        "metadata": '{"team": "money"}',
        "node_ttl_s": "3.5",
        "latency_metrics": "false",
        "system_events": "info",
        "session_secret": "0123456789abcdef",
        "session_secret_file": str(secret),
        "payload_bytes_max": "2",
        "pending_bytes_max": "2048",
        "close_timeout_s": "3",
        "validate_schemas": "false",
        "skip_corrupt": "true",
        "retain_keys_s": '{"telemetry/**": 60, "orders/**": null}',
        "accept_loss": "true",
        "retain_age_s": "4",
        "retain_bytes": "5",
        "retain_events": "6",
        "dedup_s": "7",
        "retain_ignore_cursors": "true",
        "cursor_ttl_s": "7",
        "retain_remote_s": "8",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"ZBUS_{name.upper()}", value)

    config = load_config()

    assert given.keys() == BusConfig.model_fields.keys()
    assert config.model_fields_set == given.keys()


@pytest.mark.parametrize("as_path", [str, Path])
def test_settings_come_from_a_toml_file(toml: Path, as_path: Any) -> None:
    toml.write_text('log = "file.db"\ndurability = "os"\nmode = "peer"\nlisten = ["tcp/127.0.0.1:7447"]\n')

    config = zbus.open(config=as_path(toml)).config

    assert (config.log, config.durability, config.listen) == ("file.db", "os", ("tcp/127.0.0.1:7447",))


def test_the_environment_names_the_toml_file(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml.write_text('log = "file.db"\n')
    monkeypatch.setenv("ZBUS_CONFIG", str(toml))

    assert zbus.open().config.log == "file.db"


def test_a_file_that_is_given_wins_over_the_one_in_the_environment(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.toml"
    other.write_text('log = "other.db"\n')
    toml.write_text('log = "file.db"\n')
    monkeypatch.setenv("ZBUS_CONFIG", str(other))

    assert zbus.open(config=toml).config.log == "file.db"


def test_arguments_win_over_the_environment_and_that_over_the_file_and_that_over_defaults(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml.write_text("payload_bytes_max = 3\npending_bytes_max = 3000\nretain_events = 3\nlog = 'file.db'\n")
    monkeypatch.setenv("ZBUS_PAYLOAD_BYTES_MAX", "2")
    monkeypatch.setenv("ZBUS_PENDING_BYTES_MAX", "2000")

    config = zbus.open(config=toml, payload_bytes_max=1).config

    assert config.payload_bytes_max == 1  # the argument
    assert config.pending_bytes_max == 2000  # the environment
    assert config.retain_events == 3  # the file
    assert config.retain_bytes is None  # the default


def test_an_argument_wins_over_the_environment_in_a_bus_config_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_DURABILITY", "os")

    assert BusConfig().durability == "os"
    assert BusConfig(durability="fsync").durability == "fsync"


@pytest.mark.parametrize(
    ("argument", "environment", "file", "plane", "transport"),
    [
        (None, None, None, "nats", "nats"),
        (None, None, "zmq", "nats", "zmq"),
        (None, "zmq", None, "nats", "zmq"),
        ("zmq", None, None, "nats", "zmq"),
        (None, "zmq", "zenoh", None, "zmq"),
        ("zenoh", "zmq", "nats", "nats", "zenoh"),
        (None, None, None, "", "zenoh"),
        (None, None, None, None, "zenoh"),
    ],
)
def test_the_event_plane_of_dynamo_names_the_transport_where_nothing_else_does(
    argument: str | None,
    environment: str | None,
    file: str | None,
    plane: str | None,
    transport: str,
    toml: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toml.write_text(f"transport = '{file}'\n" if file else "")
    if environment is not None:
        monkeypatch.setenv("ZBUS_TRANSPORT", environment)
    if plane is not None:
        monkeypatch.setenv("DYN_EVENT_PLANE", plane)

    config = zbus.open(config=toml, **({"transport": argument} if argument else {})).config

    assert config.transport == transport


@pytest.mark.parametrize("field", ["transport", "transports"])
def test_a_password_in_a_url_is_never_shown(field: str) -> None:
    url = "nats://user:hush@127.0.0.1:4222"

    config = BusConfig(**{field: url}, options={"token": "hush"})

    assert "hush" not in repr(config) + str(config)


# A bus of zbus itself, which is not the application's.

OF_THE_APPLICATION = {
    "ZBUS_LOG": "env.db",
    "ZBUS_COLD_DIR": "tier",
    "ZBUS_RETAIN_AGE_S": "86400",
    "ZBUS_KEEP": "shop/**",
    "ZBUS_TRANSPORT": "nats",
    "ZBUS_SESSION_SECRET_FILE": "missing",
    "ZBUS_OPTIONS": "not JSON",
    "ZBUS_CONFIG": "missing.toml",
    "DYN_EVENT_PLANE": "zmq",
}


def test_an_exact_configuration_has_what_is_given_and_the_defaults_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults, given = BusConfig(), BusConfig(log="app.db", listen="tcp/127.0.0.1:7447", mode="peer")
    for name, value in OF_THE_APPLICATION.items():
        monkeypatch.setenv(name, value)

    assert BusConfig.exactly() == defaults
    assert BusConfig.exactly(log="app.db", listen="tcp/127.0.0.1:7447", mode="peer") == given


def test_an_exact_configuration_reads_no_environment_variable_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreadable(dict[str, str]):
        def __getitem__(self, name: str) -> str:
            raise AssertionError(f"{name} was read")

        get = items = keys = __iter__ = __getitem__  # type: ignore[assignment]

    monkeypatch.setattr(os, "environ", Unreadable())
    with pytest.raises(AssertionError, match="was read"):
        load_config()

    BusConfig.exactly(log="app.db")


def test_some_settings_of_the_environment_and_the_file_can_be_taken_and_the_others_do_not_count(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml.write_text("transport = 'zmq'\nmode = 'peer'\nlisten = ['tcp/127.0.0.1:7447']\nskip_corrupt = true\n")
    for name, value in {**OF_THE_APPLICATION, "ZBUS_CONFIG": str(toml), "ZBUS_OPTIONS": '{"user": "x"}'}.items():
        monkeypatch.setenv(name, value)

    found = load_only("transport", "skip_corrupt", "options", node="n")

    expected = BusConfig.exactly(transport="nats", skip_corrupt=True, options={"user": "x"}, node="n")
    assert found == expected
    assert load_only("transport", transport="zenoh").transport == "zenoh"


def test_a_variable_that_is_to_hold_json_and_does_not_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_OPTIONS", SECRET)

    for make in (BusConfig, load_only):
        with pytest.raises(ConfigInvalid, match="ZBUS_OPTIONS: must be a JSON object") as caught:
            make()
        assert SECRET not in str(caught.value)


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = 0
    parts: list[int] = []

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        if self.size == 13:
            raise Contradiction("size", "it brings bad luck")
        if self.size == 14:
            raise ValueError("neither does this")
        return self


@pytest.mark.parametrize(
    ("given", "field", "reason"),
    [
        ({"size": "x"}, "size", "Input should be a valid integer"),
        ({"parts": [1, "x"]}, "parts.2", "Input should be a valid integer"),
        ({"size": 13}, "size", "it brings bad luck"),
        ({"size": 14}, "whole", "neither does this"),
        ({"sise": 1}, "sise", "there is no such part; known are: size, parts"),
    ],
    ids=str,
)
@pytest.mark.parametrize("within", ["", "file.toml"])
def test_the_first_problem_that_pydantic_finds_becomes_a_field_and_a_reason(
    within: str, given: dict[str, Any], field: str, reason: str
) -> None:
    with (
        pytest.raises(ConfigInvalid) as caught,
        config_errors("whole", known=("size", "parts"), within=within, noun="part"),
    ):
        Model(**given)

    assert caught.value.field == (f"{within}: {field}" if within else field)
    assert caught.value.reason.startswith(reason)


# What is refused, when the bus is opened and before anything else.

PEER = {"mode": "peer", "listen": ["tcp/127.0.0.1:0"]}
CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"listen": ["tcp/127.0.0.1:0"]}, "listen", "opens no socket"),
    ({"connect": ["tcp/127.0.0.1:1"]}, "connect", "opens no socket"),
    ({"mode": "client"}, "connect", "at least one endpoint to connect to"),
    ({"mode": "client", "listen": ["tcp/127.0.0.1:0"]}, "connect", "at least one endpoint to connect to"),
    ({"mode": "peer"}, "listen", "listen on or to connect to"),
    ({"mode": "router"}, "listen", "listen on or to connect to"),
    ({"read_only": True}, "read_only", "needs a log"),
    ({"retain_age_s": 1}, "retain_age_s", "needs a log"),
    ({"retain_bytes": 1}, "retain_bytes", "needs a log"),
    ({"retain_events": 1}, "retain_events", "needs a log"),
    ({"accept_loss": True}, "accept_loss", "needs a log"),
    ({"log": "memory", "read_only": True}, "read_only", "belongs to one bus"),
    ({"cold_dir": "tier"}, "cold_dir", "needs a log"),
    ({"log": "memory", "cold_dir": "tier"}, "cold_dir", "has no cold tier"),
    ({"log": "app.db", "read_only": True, **PEER}, "mode", "must be embedded"),
]
INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"mode": "broker"}, "mode", "'embedded', 'peer', 'client' or 'router'"),
    ({"durability": "none"}, "durability", "'fsync' or 'os'"),
    ({"payload_bytes_max": 0}, "payload_bytes_max", "greater than or equal to 1"),
    ({"payload_bytes_max": 1 << 40}, "payload_bytes_max", "less than or equal to"),
    ({"payload_bytes_max": "many"}, "payload_bytes_max", "integer"),
    ({"pending_bytes_max": 1}, "pending_bytes_max", "1024"),
    ({"close_timeout_s": 0}, "close_timeout_s", "greater than 0"),
    ({"close_timeout_s": "inf"}, "close_timeout_s", "300"),
    ({"log": "app.db", "retain_age_s": -1}, "retain_age_s", "greater than 0"),
    ({"log": "app.db", "retain_bytes": 0}, "retain_bytes", "greater than or equal to 1"),
    ({"log": "app.db", "retain_events": 0}, "retain_events", "greater than or equal to 1"),
    ({"log": 5}, "log", "string"),
    ({"log": ""}, "log", "path"),
    ({"log": "app.db", "cold_dir": ""}, "cold_dir", "path"),
    ({"keep": ["a/b*"], "log": "x.db"}, "keep", "whole segments"),
    ({"keep": ["shop/**"]}, "keep", "needs a log"),
    ({"keep": ["**"], "log": "x.db", "read_only": True}, "keep", "read-only log"),
    ({"wire": "dynamo"}, "wire", "nats or zmq"),
    ({"transports": ["zenoh", "No URL"]}, "transports", "must be a name"),
    ({"wire": "xml"}, "wire", "'zbus'"),
    ({"transport": "Not A Name"}, "transport", "a name such as 'zenoh'"),
    ({"transport": ""}, "transport", "a name such as 'zenoh'"),
    ({"mode": "peer", "listen": ["127.0.0.1:7447"]}, "listen", "must be an endpoint such as tcp/127.0.0.1:7447"),
    ({"mode": "peer", "connect": "tcp://127.0.0.1"}, "connect", "must be an endpoint such as tcp/127.0.0.1:7447"),
    ({"no_such_thing": 1}, "no_such_thing", "there is no such setting; known are: log, "),
]


@pytest.mark.parametrize(("settings", "field", "reason"), CONTRADICTIONS + INVALID, ids=str)
def test_a_wrong_or_contradictory_setting_fails_at_open_with_the_field_and_the_reason(
    settings: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        zbus.open(**settings)

    assert caught.value.field == field
    assert reason in caught.value.reason
    assert str(caught.value) == f"{field}: {caught.value.reason}"


@pytest.mark.parametrize(("settings", "field", "reason"), CONTRADICTIONS + INVALID, ids=str)
def test_a_bus_config_that_is_wrong_or_contradicts_itself_cannot_be_made(
    settings: dict[str, Any], field: str, reason: str
) -> None:
    for make in (BusConfig, BusConfig.exactly):
        with pytest.raises(ConfigInvalid, match=reason) as caught:
            make(**settings)
        assert caught.value.field == field


def test_a_wrong_value_in_the_environment_is_refused_like_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_DURABILITY", "never")

    with pytest.raises(ConfigInvalid) as caught:
        zbus.open()

    assert caught.value.field == "ZBUS_DURABILITY"


RENAMED = {
    "record": "keep",
    "records": "system_events",
    "cold": "cold_dir",
    "check_schemas": "validate_schemas",
    "retain_past_cursors": "retain_ignore_cursors",
    "metrics": "latency_metrics",
}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_setting_under_a_retired_name_is_refused_with_its_new_name(
    old: str, new: str, toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml.write_text(f"{old} = 1\n")

    for make in (zbus.open, BusConfig, BusConfig.exactly):
        with pytest.raises(ConfigInvalid) as caught:
            make(**{old: 1})
        assert str(caught.value) == f"{old}: renamed: use {new}"
    with pytest.raises(ConfigInvalid) as caught:
        zbus.open(config=toml)
    assert str(caught.value) == f"{old}: renamed: use {new}"
    monkeypatch.setenv("ZBUS_CONFIG", str(toml))
    with pytest.raises(ConfigInvalid) as caught:
        load_only(new)
    assert str(caught.value) == f"{old}: renamed: use {new}"
    assert new in BusConfig.model_fields
    load_only("durability")  # it takes no setting that was renamed


@pytest.mark.parametrize("case", [str.upper, str.lower])
@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_variable_with_a_retired_name_is_refused_with_its_new_name(
    old: str, new: str, case: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(case(f"ZBUS_{old}"), "1")

    for make in (zbus.open, BusConfig, lambda: load_only(new)):
        with pytest.raises(ConfigInvalid) as caught:
            make()
        assert str(caught.value) == f"ZBUS_{old.upper()}: renamed: use ZBUS_{new.upper()}"
    BusConfig.exactly()
    load_only("durability")  # it takes no setting that was renamed


@pytest.mark.parametrize(
    ("content", "field", "reason"),
    [
        (b"log = ", "config", "zbus.toml"),
        (b"\xff\xfe", "config", "zbus.toml"),
        (b"colour = 'red'", "colour", "no such setting"),
        (b"[retain]\nevents = 5", "retain", "no such setting"),
        (b"durability = 'never'", "durability", "'fsync' or 'os'"),
        (b"mode = 'client'", "connect", "at least one endpoint"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field_and_the_reason(
    content: bytes, field: str, reason: str, toml: Path
) -> None:
    toml.write_bytes(content)

    with pytest.raises(ConfigInvalid) as caught:
        zbus.open(config=toml)

    assert caught.value.field == field
    assert reason in caught.value.reason


@pytest.mark.parametrize("through", ["argument", "environment"])
def test_a_file_that_is_not_there_is_refused_by_name(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_CONFIG", "missing.toml" if through == "environment" else "")

    with pytest.raises(ConfigInvalid, match=r"missing\.toml") as caught:
        zbus.open(config="missing.toml" if through == "argument" else None)

    assert caught.value.field == "config"


async def test_a_transport_that_is_not_installed_is_refused_and_those_that_are_get_named(log_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        async with zbus.open(log_path, transport="carrierpigeon://loft"):
            pass

    assert caught.value.field == "transport"
    assert "there is no transport 'carrierpigeon'" in caught.value.reason
    assert "zenoh" in caught.value.reason
    assert "loft" not in str(caught.value)
    async with zbus.open(log_path):  # nothing of the failed start holds the log
        pass


SECRET = "hunter2"


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": f"nats://user:{SECRET} @host"},
        {"mode": "peer", "connect": [f"tls://user:{SECRET}@host:1"]},
        {"mode": "peer", "listen": f"tls/127.0.0.1:1,{SECRET}"},
        {"durability": SECRET},
        {"payload_bytes_max": SECRET},
        {"password": SECRET},
    ],
    ids=lambda settings: next(reversed(settings)),
)
def test_a_refused_value_is_repeated_neither_by_the_error_nor_by_its_traceback(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        zbus.open(**settings)

    assert SECRET not in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:  # the words of each error of the chain, without the lines of source
        assert SECRET not in "".join(traceback.format_exception_only(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_a_configuration_does_not_change() -> None:
    config = BusConfig()

    with pytest.raises(ValueError, match="frozen"):
        config.durability = "os"  # type: ignore[misc]
