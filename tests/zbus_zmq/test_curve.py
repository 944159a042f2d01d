"""CURVE: who is known talks encrypted, who is not is refused and counted, and secrets are never shown."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq_support import Collector, Replies, broker_process, raw_socket, until

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid
from zbus.observe.counters import Counters
from zbus_zmq.fabric import open_fabric
from zbus_zmq.io.curve import Keys, make_keys


class Yard:
    """A folder of keys: `allow` holds the public keys that are let in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.allow, self.registry = folder, folder / "allow", folder / "registry"
        self.allow.mkdir()

    def keys(self, name: str, *, allowed: bool = True) -> Path:
        public, secret = make_keys(self.folder / "keys", name)
        if allowed:
            shutil.copy(public, self.allow)
        return secret

    def url(self, secret: Path | None, extra: str = "") -> str:
        curve = f"&curve_secret={secret}&curve_allow={self.allow}" if secret is not None else ""
        return f"zmq://?registry={self.registry}{curve}{extra}"


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


@contextmanager
def opened(*urls: str) -> Iterator[list[Any]]:
    made: list[Any] = []
    try:
        for url in urls:
            made.append(open_fabric(BusConfig(), url))
        yield made
    finally:
        for each in made:
            each.close()


def test_nodes_that_know_each_other_exchange_events_and_requests(yard: Yard) -> None:
    collector, replies = Collector(), Replies()
    with opened(*[yard.url(yard.keys(name)) for name in ("one", "other", "third")]) as (one, other, third):
        other.listen(["a/**"], collector)
        third.serve(["svc/x"], lambda request: (request.reply(b"yes"), request.close()))  # type: ignore[func-returns-value]
        assert until(lambda: one.ready("a/b"))
        one.send([("a/b", b"secret")])
        one.request("svc/x", b"", replies, 5.0)

        assert collector.wait(1) == [b"secret"]
        assert replies.wait() == [b"yes"]
        assert one.diagnostics()["encrypted"]


def test_a_node_with_an_unknown_key_is_refused_and_counted_on_both_sides(yard: Yard) -> None:
    received_by_stranger, received_by_known = Collector(), Collector()
    known, stranger = yard.keys("known"), yard.keys("stranger", allowed=False)
    with opened(yard.url(known), yard.url(stranger)) as (one, other):
        one.listen(["**"], received_by_known)
        other.listen(["**"], received_by_stranger)
        one.send([("a", b"x")])
        other.send([("a", b"x")])

        # It is not connected to, and what it connects to refuses it.
        assert until(lambda: one.diagnostics()["counts"].get("peer_key_rejected", 0) > 0)
        assert until(lambda: one.diagnostics()["counts"].get("curve_rejected", 0) > 0)
        assert received_by_known.stays_at(0)
        assert received_by_stranger.stays_at(0)


def test_a_bare_socket_gets_nothing_without_a_key_and_nothing_with_an_unknown_one(yard: Yard) -> None:
    context: zmq.Context[Any] = zmq.Context()
    public, secret = zmq.curve_keypair()
    with opened(yard.url(yard.keys("one"))) as (one,):
        server = one.diagnostics()
        server_key = json.loads(next(yard.registry.glob("*.json")).read_bytes())["node"]["curve_key"].encode()
        strangers = [
            raw_socket(context, zmq.SUB, SUBSCRIBE=b""),
            raw_socket(
                context,
                zmq.SUB,
                SUBSCRIBE=b"",
                CURVE_PUBLICKEY=public,
                CURVE_SECRETKEY=secret,
                CURVE_SERVERKEY=server_key,
            ),
        ]
        try:
            for stranger in strangers:
                stranger.connect(server["publish"])
            assert until(lambda: one.diagnostics()["counts"].get("curve_rejected", 0) > 0)
            one.send([("a", b"x")])
            assert not any(stranger.poll(200) for stranger in strangers)
            assert not one.ready("a")
        finally:
            for stranger in strangers:
                stranger.close()
            context.term()


def test_a_key_that_is_taken_away_is_refused_from_the_next_connection_on(yard: Yard) -> None:
    one_key, other_key = yard.keys("one"), yard.keys("other")
    with opened(yard.url(one_key), yard.url(other_key)) as (one, other):
        other.listen(["**"], Collector())
        assert until(lambda: one.ready("a"))
        other.close()
        (yard.allow / "other.key").unlink()
        with opened(yard.url(other_key)) as (again,):
            again.listen(["**"], Collector())
            assert until(lambda: one.diagnostics()["counts"].get("curve_rejected", 0) > 0)
            assert not one.ready("a")


def test_nodes_with_and_without_keys_do_not_connect_and_say_so(yard: Yard) -> None:
    with opened(yard.url(yard.keys("one")), yard.url(None)) as (closed, plain):
        assert until(lambda: plain.diagnostics()["counts"].get("peer_needs_curve", 0) > 0)
        assert until(lambda: closed.diagnostics()["counts"].get("peer_key_rejected", 0) > 0)


def test_events_cross_an_encrypted_broker_and_strangers_do_not(yard: Yard) -> None:
    broker_secret, one, other = yard.keys("broker"), yard.keys("one"), yard.keys("other")
    stranger = yard.keys("stranger", allowed=False)
    collector, nothing = Collector(), Collector()
    with broker_process("--curve-secret", str(broker_secret), "--curve-allow", str(yard.allow)) as (_, ready):
        extra = f"&xsub={ready['xsub']}&xpub={ready['xpub']}&broker_key={yard.allow}/broker.key"
        with opened(*[yard.url(secret, extra) for secret in (one, other, stranger)]) as (a, b, c):
            b.listen(["**"], collector)
            c.listen(["**"], nothing)
            assert until(lambda: a.ready("a"))
            a.send([("a", b"x")])

            assert collector.wait(1) == [b"x"]
            assert nothing.stays_at(0)


def test_the_command_makes_keys_that_only_the_user_can_read(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("zbus")), "broker", "--new-keys", str(tmp_path / "k"), "--name", "n"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)

    files = json.loads(made.stdout)
    assert made.returncode == 0
    assert Path(files["secret"]).stat().st_mode & 0o777 == 0o600
    assert again.returncode == 2
    assert "never overwritten" in again.stderr


def test_secrets_are_in_no_repr_no_error_and_no_pickle(yard: Yard) -> None:
    secret = yard.keys("one")
    held = next(line for line in secret.read_text().splitlines() if "secret-key" in line).split('"')[1]
    keys = Keys(secret, yard.allow, Counters("test"))
    with opened(yard.url(secret)) as (one,):
        shown = repr(one.diagnostics()) + repr(keys) + repr(one.__dict__)
    with pytest.raises(TypeError):
        pickle.dumps(keys)

    assert held not in shown


@pytest.mark.parametrize("content", ["", "nonsense", 'curve\n    public-key = "short"\n'])
def test_a_key_file_that_is_none_is_refused_without_showing_it(yard: Yard, content: str) -> None:
    path = yard.folder / "bad.key_secret"
    path.write_text(content)
    path.chmod(0o600)

    with pytest.raises(ConfigInvalid) as caught:
        open_fabric(BusConfig(), yard.url(path))

    assert caught.value.field == "curve_secret"


def test_a_secret_that_others_can_read_is_refused(yard: Yard) -> None:
    secret = yard.keys("one")
    secret.chmod(0o644)

    with pytest.raises(ConfigInvalid, match="chmod 600"):
        open_fabric(BusConfig(), yard.url(secret))


def test_whether_keys_are_checked_is_reported_to_other_nodes(yard: Yard) -> None:
    with opened(yard.url(yard.keys("known"))) as (known,), opened(yard.url(None)) as (plain,):
        assert (known.trust, plain.trust) == ("curve", "none")
        assert [endpoint.partition("://")[0] for endpoint in known.endpoints] == ["tcp"]
