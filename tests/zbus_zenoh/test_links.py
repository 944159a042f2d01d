"""How Zenoh nodes are linked: TLS both ways, passwords, and who is let in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from free_ports import free_port
from inside import node_of
from nats_credentials import certificates

import zbus
from zbus.config import BusConfig
from zbus_zenoh.config import trust as trust_of
from zbus_zenoh.config import zenoh_config


@pytest.fixture
def place() -> str:
    return f"127.0.0.1:{free_port()}"


def tls(folder: Path) -> dict[str, str]:
    return {
        "tls_ca": str(folder / "ca.pem"),
        "tls_listen_cert": str(folder / "server.pem"),
        "tls_listen_key": str(folder / "server.key"),
        "tls_cert": str(folder / "client.pem"),
        "tls_key": str(folder / "client.key"),
        "tls_mutual": "true",
    }


def links(bus: zbus.Bus) -> int:
    assert node_of(bus).network is not None
    return int(node_of(bus).network.links[0].fabric.diagnostics()["linked"])


async def linked(bus: zbus.Bus) -> None:
    async with asyncio.timeout(15):
        while not links(bus):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "trust"),
    [
        ({}, "none"),
        ({"user": "a", "password": "b"}, "login"),
        ({"tls_ca": "ca.pem"}, "tls"),
        ({"tls_ca": "ca.pem", "tls_mutual": "true", "users_file": "users"}, "mtls+login"),
    ],
)
def test_the_trust_of_a_link_is_reported(options: dict[str, str], trust: str) -> None:
    settings, _ = zenoh_config(BusConfig(options=options), "zenoh")
    assert trust_of(settings) == trust


async def test_events_cross_over_mutual_tls(tmp_path: Path, place: str) -> None:
    options = tls(certificates(tmp_path))
    async with (
        zbus.open(mode="peer", listen=[f"tls/{place}"], options=options) as there,
        there.subscribe("a/**") as subscription,
        zbus.open(tmp_path / "log.db", mode="peer", connect=[f"tls/{place}"], options=options) as here,
    ):
        await (await here.publisher("a/b")).publish(b"secret")

        assert (await asyncio.wait_for(anext(subscription), 20)).payload == b"secret"


async def test_a_certificate_of_another_authority_is_not_let_in(tmp_path: Path, place: str) -> None:
    ours, others = tls(certificates(tmp_path / "ours")), tls(certificates(tmp_path / "others"))
    async with (
        zbus.open(mode="peer", listen=[f"tls/{place}"], options=ours) as there,
        there.subscribe("a/**") as subscription,
        zbus.open(mode="peer", connect=[f"tls/{place}"], options=others) as stranger,
        zbus.open(mode="peer", connect=[f"tls/{place}"], options=ours) as friend,
    ):
        await linked(friend)
        await (await stranger.publisher("a/b")).publish(b"from a stranger")
        await (await friend.publisher("a/b")).publish(b"from a friend")

        assert (await asyncio.wait_for(anext(subscription), 20)).payload == b"from a friend"
        assert links(stranger) == 0
        assert subscription.queued == 0


async def test_a_wrong_password_is_not_let_in_and_the_right_one_is(tmp_path: Path, place: str) -> None:
    users = tmp_path / "users"
    users.write_text("node:right\n")
    door = {"user": "node", "password": "right", "users_file": str(users)}
    async with (
        zbus.open(mode="peer", listen=[f"tcp/{place}"], options=door) as there,
        there.subscribe("a/**") as received,
    ):
        async with (
            zbus.open(mode="peer", connect=[f"tcp/{place}"], options={"user": "node", "password": "wrong"}) as stranger,
            zbus.open(mode="peer", connect=[f"tcp/{place}"], options={"user": "node", "password": "right"}) as friend,
        ):
            await linked(friend)
            await (await stranger.publisher("a/b")).publish(b"from a stranger")
            await (await friend.publisher("a/b")).publish(b"from a friend")

            assert (await asyncio.wait_for(anext(received), 20)).payload == b"from a friend"
            assert links(stranger) == 0
            assert received.queued == 0


def test_an_option_that_zenoh_does_not_know_is_refused_without_its_value() -> None:
    from zbus.config import BusConfig
    from zbus_zenoh.config import zenoh_config

    with pytest.raises(zbus.ConfigInvalid, match="pasword") as caught:
        zenoh_config(BusConfig(options={"pasword": "hush"}), "zenoh")

    assert "hush" not in str(caught.value)


def test_a_password_in_the_url_is_refused_without_showing_it() -> None:
    from zbus.config import BusConfig
    from zbus_zenoh.config import zenoh_config

    with pytest.raises(zbus.ConfigInvalid, match="options") as caught:
        zenoh_config(BusConfig(), "zenoh://node:hush@127.0.0.1:7447")

    assert "hush" not in str(caught.value)


async def test_an_address_in_use_is_reported_without_the_source_code_of_zenoh(place: str) -> None:
    async with zbus.open(mode="peer", listen=[f"tcp/{place}"]):
        with pytest.raises(zbus.TransportError) as caught:
            await zbus.open(mode="peer", listen=[f"tcp/{place}"]).start()

    assert "Address already in use" in str(caught.value)
    assert ".rs" not in str(caught.value)
    assert str(caught.value).endswith("nothing was opened. Check the addresses in transport, listen and connect")
