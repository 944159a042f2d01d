"""The options of `zmq://`: from the URL, the configuration and the environment, checked before a socket is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid
from zbus_zmq.address.options import read_options


def test_an_url_without_options_stays_on_loopback_and_finds_nodes_by_a_folder() -> None:
    options = read_options(BusConfig(), "zmq://")

    assert options.bind == "tcp://127.0.0.1:*"
    assert options.discovery == "file"
    assert not options.brokered
    assert read_options(BusConfig(), "zmq") == options


def test_the_url_wins_over_the_configuration_and_other_transports_options_are_not_ours() -> None:
    config = BusConfig(options={"hwm": "5", "zmq.lease_s": "3", "nats.user": "x", "realm": "one"})

    options = read_options(config, "zmq://?realm=two&ports=20000-20100")

    assert (options.hwm, options.lease_s, options.realm, options.ports) == (5, 3.0, "two", (20000, 20100))


def test_brokers_come_from_the_url_or_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    given = read_options(BusConfig(), "zmq://broker?xsub=tcp://h:1;tcp://h:2&xpub=tcp://h:3;tcp://h:4")
    monkeypatch.setenv("DYN_ZMQ_BROKER_URL", "xsub=tcp://h:1;tcp://h:2 , xpub=tcp://h:3;tcp://h:4")

    assert given.xsub == ("tcp://h:1", "tcp://h:2")
    assert given.xpub == ("tcp://h:3", "tcp://h:4")
    for url in ("zmq://", "zmq", "zmq://broker"):
        assert read_options(BusConfig(), url).xsub == given.xsub
    assert not read_options(BusConfig(), "zmq://direct").brokered


def test_a_message_may_be_larger_than_the_largest_payload() -> None:
    assert read_options(BusConfig(payload_bytes_max=100_000_000), "zmq://").max_message_bytes > 100_000_000


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("zmq://elsewhere", "transport"),
        ("zmq://?colour=red", "colour"),
        ("zmq://?hwm=0", "hwm"),
        ("zmq://?hwm=1&hwm=2", "transport"),
        ("zmq://?hwm", "transport"),
        ("zmq:///path", "transport"),
        ("zmq://?bind=127.0.0.1:5", "bind"),
        ("zmq://?bind=tcp://0.0.0.0:*", "transport"),
        ("zmq://?advertise=nowhere", "advertise"),
        ("zmq://?ports=9", "ports"),
        ("zmq://?ports=20-10", "transport"),
        ("zmq://?ports=1000-2000&bind=tcp://127.0.0.1:7", "transport"),
        ("zmq://broker", "transport"),
        ("zmq://broker?xsub=tcp://h:1", "transport"),
        ("zmq://broker?xsub=tcp://h:*&xpub=tcp://h:1", "xsub"),
        ("zmq://direct?xsub=tcp://h:1&xpub=tcp://h:1", "transport"),
        ("zmq://?curve_secret=/x", "transport"),
        ("zmq://?curve_allow=/x", "transport"),
        ("zmq://?realm=a/b", "realm"),
    ],
)
def test_an_option_that_is_wrong_is_refused_by_name(url: str, field: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read_options(BusConfig(), url)

    assert caught.value.field == field


@pytest.mark.parametrize("value", ["nonsense", "xsub=a", "xsub=tcp://h:1,xpub=", "left=tcp://h:1,xpub=tcp://h:2"])
def test_a_broker_variable_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DYN_ZMQ_BROKER_URL", value)

    with pytest.raises(ConfigInvalid):
        read_options(BusConfig(), "zmq://")


def test_an_error_and_a_repr_repeat_no_value_that_could_be_a_secret(tmp_path: Path) -> None:
    options = read_options(BusConfig(), f"zmq://?curve_secret={tmp_path}/hidden.key_secret&curve_allow={tmp_path}")
    with pytest.raises(ConfigInvalid) as caught:
        read_options(BusConfig(), "zmq://?hwm=s3cret")

    assert "hidden" not in repr(options)
    assert "s3cret" not in str(caught.value)
