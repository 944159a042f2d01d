"""Logging in to NATS in every way, TLS, and that no secret is ever shown."""

from __future__ import annotations

import logging
import pickle
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats_credentials import certificates, operator_config, tls_config, user_key
from nats_support import Collected, NatsServer, nats_server, wait_for
from pydantic import SecretStr

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, TransportError
from zbus.ports.fabric import Fabric
from zbus_nats.fabric import open_fabric
from zbus_nats.jetstream import open_fabric as open_jetstream
from zbus_nats.options import NatsOptions
from zbus_nats.raw import open_fabric as open_raw

SECRET = "hunter2-S3CRET"
NO_PATIENCE = {"connect_timeout_s": "2"}


def connect(server: NatsServer, login: str = "", **options: str) -> Fabric:
    return open_fabric(BusConfig(options=NO_PATIENCE | options), f"nats://{login}127.0.0.1:{server.port}")


def works(fabric: Fabric, other: Fabric) -> bool:
    came = Collected()
    other.listen(["a"], came)
    fabric.send([("a", b"x")])
    found = came.wait(1) == [b"x"]
    fabric.close()
    other.close()
    return found


def refused(
    server: NatsServer, login: str = "", reported: str = "rejected the login", **options: str
) -> TransportError:
    start = time.monotonic()
    with pytest.raises(TransportError, match=reported) as caught:
        connect(server, login, **options)
    assert time.monotonic() - start < 8
    return caught.value


def test_user_and_password(tmp_path: Path) -> None:
    with nats_server(tmp_path, config=f'authorization {{ user: me, password: "{SECRET}" }}') as server:
        assert works(connect(server, f"me:{SECRET}@"), connect(server, user="me", password=SECRET))
        refused(server, "me:wrong@")
        refused(server)


def test_token(tmp_path: Path) -> None:
    with nats_server(tmp_path, config=f'authorization {{ token: "{SECRET}" }}') as server:
        assert works(connect(server, f"{SECRET}@"), connect(server, token=SECRET))
        refused(server, "wrong@")


def test_nkey_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = user_key()
    (tmp_path / "seed").write_text(key.seed + "\n")
    (tmp_path / "other").write_text(user_key().seed)
    with nats_server(tmp_path, config=f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}") as server:
        first = connect(server, nkey_file=str(tmp_path / "seed"))
        refused(server, nkey_file=str(tmp_path / "other"))
        monkeypatch.setenv("NATS_AUTH_NKEY", key.seed)
        assert works(first, connect(server))


def test_an_invalid_seed_is_reported_without_its_text(tmp_path: Path) -> None:
    (tmp_path / "seed").write_text(SECRET)
    with nats_server(tmp_path) as server:
        error = refused(server, reported="could not connect", nkey_file=str(tmp_path / "seed"))
        assert SECRET not in shown(error)


def test_a_creds_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / "good.creds", tmp_path / "bad.creds"
    operator_config(bad)  # of another operator
    with nats_server(tmp_path / "server", config=operator_config(good)) as server:
        first = connect(server, creds_file=str(good))
        refused(server, creds_file=str(bad))
        refused(server)
        monkeypatch.setenv("NATS_AUTH_CREDENTIALS_FILE", str(good))
        assert works(first, connect(server))


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_server(tmp_path: Path, tls_files: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path, config=tls_config(tls_files)) as running:
        yield running


def test_tls_with_an_authority_of_ones_own(tls_server: NatsServer, tls_files: Path) -> None:
    here = connect(tls_server, tls_ca=str(tls_files / "ca.pem"))
    there = connect(tls_server, tls_insecure="true")
    came = Collected()
    there.listen(["big"], came)
    large = bytes(range(256)) * 20_000

    here.send([("big", large), ("big", b"after")])

    assert came.wait(2) == [large, b"after"]
    here.close()
    there.close()


def test_a_server_whose_certificate_is_not_trusted_is_refused(tls_server: NatsServer) -> None:
    refused(tls_server, reported="certificate is not trusted", tls="true")
    refused(tls_server, reported="certificate is not trusted")


def test_a_server_that_verifies_clients_wants_a_certificate(tmp_path: Path, tls_files: Path) -> None:
    ca = str(tls_files / "ca.pem")
    with nats_server(tmp_path, config=tls_config(tls_files, verify=True)) as server:
        cert, key = str(tls_files / "client.pem"), str(tls_files / "client.key")
        assert works(*(connect(server, tls_ca=ca, tls_cert=cert, tls_key=key) for _ in range(2)))
        refused(server, reported="could not connect", tls_ca=ca)


def test_a_server_without_tls_never_gets_the_password_if_tls_was_requested(tmp_path: Path) -> None:
    with nats_server(tmp_path, config=f'debug: true\ntrace: true\nauthorization {{ token: "{SECRET}" }}') as server:
        error = refused(server, f"{SECRET}@", reported="does not offer TLS", tls="true")

        assert SECRET not in shown(error)
        assert "CONNECT" not in server.log_text(), "the login went out in clear"


def shown(error: BaseException) -> str:
    """Everything that an error can show: texts, fields, its whole traceback, and what it becomes elsewhere."""
    again = pickle.loads(pickle.dumps(error))
    chain = "".join(traceback.format_exception(error))
    hidden = "".join(traceback.format_exception(error.__context__)) if error.__context__ else ""
    return f"{error} {error!r} {error.args} {vars(error)} {again!r} {chain} {hidden}"


@pytest.mark.parametrize("opening", [open_fabric, open_raw, open_jetstream], ids=["nats", "raw", "js"])
@pytest.mark.parametrize("way", ["password", "token", "nkey", "nkey_file", "seed_none", "creds_file", "creds_none"])
def test_no_secret_is_in_an_error_a_record_a_repr_or_the_diagnostics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], opening: object, way: str
) -> None:
    caplog.set_level(logging.DEBUG)
    path = "/S?durable=d" if opening is open_jetstream else ""
    login = {"password": f"someone:{SECRET}@", "token": f"{SECRET}@"}.get(way, "")
    options, secrets = login_of(way, tmp_path)
    with nats_server(tmp_path, config=f'authorization {{ token: "other-{SECRET}" }}') as server:
        scheme = {open_fabric: "nats", open_raw: "nats+raw", open_jetstream: "nats+js"}[opening]  # type: ignore[index]
        url = f"{scheme}://{login}127.0.0.1:{server.port}{path}"
        config = BusConfig(options=NO_PATIENCE | options, transport="nats")
        with pytest.raises(TransportError) as caught:
            opening(config, url)  # type: ignore[operator]
    texts = shown(caught.value) + caplog.text + "".join(map(str, capfd.readouterr())) + repr(config)

    assert ("could not connect" if way.endswith("none") else "rejected the login") in texts
    assert not [secret for secret in secrets if secret in texts]


def login_of(way: str, folder: Path) -> tuple[dict[str, str], list[str]]:
    """The options of a wrong login, and the part of it that must stay secret."""
    seed, file = user_key().seed, folder / "login"
    if way == "nkey":
        return {"nkey": seed}, [seed]
    if way in ("nkey_file", "seed_none"):
        file.write_text(seed if way == "nkey_file" else SECRET)
        return {"nkey_file": str(file)}, [seed, SECRET]
    if way == "creds_file":
        operator_config(file)  # of another operator
        words = [word for word in file.read_text().split() if len(word) > 40]
        assert len(words) == 2, "a JWT and a seed"
        return {"creds_file": str(file)}, words
    if way == "creds_none":
        file.write_text(f"-----BEGIN NATS USER JWT-----\ney{SECRET}\n-\n-----BEGIN USER NKEY SEED-----\nSU{SECRET}\n-")
        return {"creds_file": str(file)}, [SECRET]
    return {}, [SECRET]


def test_what_login_files_hold_is_taken_out_of_texts_and_so_is_a_short_password_that_stands_by_itself(
    tmp_path: Path,
) -> None:
    file = tmp_path / "me.creds"
    operator_config(file)
    jwt, seed = (word for word in file.read_text().split() if len(word) > 40)
    creds = NatsOptions(creds_file=str(file))
    creds.check_files()
    (tmp_path / "seed").write_text(f"{seed}\n")
    nkey = NatsOptions(nkey_file=str(tmp_path / "seed"))
    nkey.check_files()
    short = NatsOptions(user=SecretStr("me"), password=SecretStr("xy"))

    assert creds.scrub(f"BEGIN USER {jwt}: the seed '{seed}' is none") == "BEGIN USER ***: the seed '***' is none"
    assert nkey.scrub(f"bad {seed}") == "bad ***"
    assert short.scrub("time: me:xy@host user=me pass_xy xylophone") == "time: ***:***@host user=*** pass_*** xylophone"
    assert seed not in f"{creds!r} {nkey!r} {creds} {vars(creds)} {creds.model_dump()}"


def test_no_secret_is_shown_while_connected_or_when_the_login_is_refused_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with nats_server(tmp_path, config=f'authorization {{ user: me, password: "{SECRET}" }}') as server:
        fabric = connect(server, f"me:{SECRET}@")
        assert SECRET not in f"{fabric!r} {fabric.diagnostics()} {vars(fabric)}"

        server.kill()
        server.start(config='authorization { user: me, password: "changed" }')
        wait_for(lambda: fabric.diagnostics()["last_error"] == "the server rejected the login")
        assert SECRET not in str(fabric.diagnostics())

        server.kill()
        server.start(config=f'authorization {{ user: me, password: "{SECRET}" }}')
        wait_for(lambda: fabric.ready("a"))
        fabric.close()
    assert SECRET not in caplog.text


def test_login_files_that_are_missing_are_reported_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="none: No such file"):
        open_fabric(BusConfig(options={"creds_file": str(tmp_path / "none")}), "nats://127.0.0.1:1")
