"""How the NATS servers are named, and that a secret is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus.config import BusConfig
from zbus.errors import ConfigInvalid
from zbus_nats.options import NatsOptions, load_options

VARIABLES = ["SERVER", "AUTH_USERNAME", "AUTH_PASSWORD", "AUTH_TOKEN", "AUTH_NKEY", "AUTH_CREDENTIALS_FILE"]
VARIABLES += ["TLS_CA_CERT_PATH", "TLS_INSECURE"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"NATS_{name}", raising=False)


def load(url: str, **options: str) -> NatsOptions:
    return load_options(BusConfig(options=options), url)


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("nats://h:1", ("h:1",)),
        ("nats://h", ("h:4222",)),
        ("nats://a:1,b:2,c", ("a:1", "b:2", "c:4222")),
        ("nats://[::1]:7", ("[::1]:7",)),
        ("nats://[::1]", ("[::1]:4222",)),
        ("nats", ("127.0.0.1:4222",)),
        ("nats://", ("127.0.0.1:4222",)),
        ("nats+raw://h:1", ("h:1",)),
    ],
)
def test_servers_are_named_in_the_url(url: str, servers: tuple[str, ...]) -> None:
    assert load(url).servers == servers


def test_user_and_password_may_hold_anything_when_percent_encoded() -> None:
    options = load("nats://us%40er:p%3Aa%2Fs%2Cs%3F@h:1")

    assert options.user is not None
    assert options.password is not None
    assert options.user.get_secret_value() == "us@er"
    assert options.password.get_secret_value() == "p:a/s,s?"


def test_a_name_without_a_password_is_a_token() -> None:
    options = load("nats://abc123@h")

    assert options.token is not None
    assert options.token.get_secret_value() == "abc123"


def test_the_url_goes_before_the_options_and_both_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_TLS_CA_CERT_PATH", "/env.pem")
    monkeypatch.setenv("NATS_AUTH_TOKEN", "env")

    assert load("nats://h?tls_ca=/url.pem", tls_ca="/option.pem").tls_ca == "/url.pem"
    assert load("nats://h", tls_ca="/option.pem").tls_ca == "/option.pem"
    assert load("nats://h").tls_ca == "/env.pem"
    assert load("nats://u:p@h").token is None
    token = load("nats://h").token
    assert token is not None
    assert token.get_secret_value() == "env"


def test_the_environment_names_the_servers_of_a_bare_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVER", "tls://u:p@one:1,nats://two:2")

    options = load("nats")

    assert options.servers == ("one:1", "two:2")
    assert options.wants_tls
    assert options.user is not None
    assert load("nats://h:3").servers == ("h:3",)


def test_of_several_logins_in_the_environment_the_first_complete_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_AUTH_USERNAME", "only half")
    monkeypatch.setenv("NATS_AUTH_NKEY", "seed")
    monkeypatch.setenv("NATS_AUTH_CREDENTIALS_FILE", "/x.creds")

    options = load("nats")

    assert options.user is None
    assert options.nkey is not None
    assert options.creds_file is None


@pytest.mark.parametrize(
    ("url", "options", "reported"),
    [
        ("nats://h?tls_cA=x", {}, "there is no such option"),
        ("nats://h", {"nonsense": "S3CRET"}, "there is no such option"),
        ("nats://h?connect_timeout_s=S3CRET", {}, "connect_timeout_s"),
        ("nats://u:S3CRET@h?token=S3CRET", {}, "only one login"),
        ("nats://h", {"user": "S3CRET"}, "user and password go together"),
        ("nats://u:S3CRET/x@h", {}, "must look like nats://host:4222"),
        ("nats://u:S3CRET@h:99999", {}, "must look like nats://host:4222"),
        ("nats://ho st", {}, "must look like nats://host:4222"),
        ("nats://h\r\nPUB x", {}, "must look like nats://host:4222"),
        ("nats://h?tls_key=/k", {}, "tls_key needs tls_cert"),
        ("nats+js://h/a.b?durable=S3CRET!", {}, "stream"),
    ],
)
def test_what_is_wrong_is_reported_without_the_secret(url: str, options: dict[str, str], reported: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(url, **options)

    assert reported in str(caught.value)
    assert "S3CRET" not in str(caught.value) + repr(caught.value) + repr(caught.value.__cause__)


def test_tls_files_that_cannot_be_used_are_reported_before_anything_is_opened() -> None:
    with pytest.raises(ConfigInvalid, match="TLS files"):
        load("nats://h?tls_ca=/nowhere/ca.pem").tls_context()
    with pytest.raises(ConfigInvalid, match="/nowhere/seed: No such file"):
        load("nats://h?nkey_file=/nowhere/seed").check_files()


@pytest.mark.parametrize("text", ["", "S3CRET", "-----BEGIN NATS USER JWT-----", "BEGIN USER NKEY SEED-\nS3CRET\n"])
def test_a_creds_file_that_is_none_is_refused_before_anything_is_opened(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.creds").write_text(text)

    with pytest.raises(ConfigInvalid, match="does not contain a user's JWT and seed") as caught:
        load(f"nats://h?creds_file={tmp_path}/a.creds").check_files()
    assert "S3CRET" not in str(caught.value)


@given(secret=st.text(max_size=20).map(lambda text: f"S3CRET-{text}"))
def test_no_secret_is_in_the_repr_or_left_in_a_text(secret: str) -> None:
    for options in (NatsOptions(user="someone", password=secret), NatsOptions(token=secret), NatsOptions(nkey=secret)):
        assert secret not in repr(options).replace("SecretStr('**********')", "")
        assert secret not in str(options).replace("SecretStr('**********')", "")
        assert secret not in options.scrub(f"the server said {secret}!")


@given(url=st.text(max_size=60))
def test_any_url_gives_options_or_says_what_is_wrong(url: str) -> None:
    try:
        servers = load_options(BusConfig(), f"nats://{url}").servers
    except ConfigInvalid:
        return
    assert all(each.rpartition(":")[2].isdecimal() and not set(each) & set(" \r\n@/?") for each in servers)


@pytest.mark.parametrize(
    ("url", "trust"),
    [
        ("nats://h", "none"),
        ("nats://user:word@h", "login"),
        ("nats://token@h", "login"),
        ("nats://h?tls_ca=ca.pem", "tls"),
        ("nats://user:word@h?tls_ca=ca.pem&tls_cert=c.pem&tls_key=k.pem", "mtls+login"),
    ],
)
def test_the_trust_of_a_link_is_reported(url: str, trust: str) -> None:
    assert load(url).trust == trust
