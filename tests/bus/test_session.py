"""Sessions: two keys in one commit, and tokens that open the feed of one session and of no other."""

from __future__ import annotations

import asyncio
import hmac
import signal
import string
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inside import node_of

import zbus
from zbus import session as sessions
from zbus.util import session_token

SECRET = b"0123456789abcdef"
WAIT_S = 30.0


async def stored(bus: zbus.Bus) -> list[zbus.Event]:
    return [event async for event in bus.replay("**")]


# Publishing.


async def test_a_session_publishes_to_the_global_key_and_to_its_own(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        offsets = await bus.session("alice").publish("events/Todo/1", {"done": True}, headers={"tenant": "x"})

        everybody, own = await stored(bus)

    assert offsets == (everybody.offset, own.offset) == (1, 2)
    assert (everybody.key, own.key) == ("events/Todo/1", "sessions/alice/events/Todo/1")
    assert everybody.payload == own.payload == b'{"done":true}'
    assert everybody.headers == own.headers
    assert everybody.headers["tenant"] == "x"
    assert everybody.content_type == "application/json"
    assert everybody.published_at == own.published_at
    assert everybody.correlation_id
    assert everybody.identity != own.identity


@pytest.mark.parametrize("where", ["argument", "header"])
async def test_a_correlation_id_that_is_given_is_kept_on_both(where: str) -> None:
    how: dict[str, Any] = (
        {"correlation_id": "order-7"} if where == "argument" else {"headers": {"correlation-id": "order-7"}}
    )
    async with zbus.open("memory") as bus:
        await bus.session("alice").publish("a/b", b"x", **how)

        assert [event.correlation_id for event in await stored(bus)] == ["order-7", "order-7"]


async def test_every_publish_has_a_correlation_id_of_its_own() -> None:
    async with zbus.open("memory") as bus:
        session = bus.session("alice")
        await session.publish("a/b", b"1")
        await session.publish("a/b", b"2")

        found = [event.correlation_id for event in await stored(bus)]

    assert found[0] == found[1] != found[2] == found[3]


async def test_each_key_has_one_publisher_with_sequences_from_0_whichever_session_object_publishes() -> None:
    async with zbus.open("memory") as bus:
        for who in ("alice", "bob", "alice"):
            await bus.session(who).publish("a/b", b"x")
        events = await stored(bus)

    by_key: dict[str, list[zbus.Event]] = {}
    for event in events:
        by_key.setdefault(event.key, []).append(event)
    assert {key: [event.sequence for event in of] for key, of in by_key.items()} == {
        "a/b": [0, 1, 2],
        "sessions/alice/a/b": [0, 1],
        "sessions/bob/a/b": [0],
    }
    assert all(len({event.publisher_id for event in of}) == 1 for of in by_key.values())
    assert len({event.publisher_id for event in events}) == 3


async def test_what_is_known_of_keys_is_bounded_and_order_on_a_key_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbus.node.SESSION_PUBLISHERS_MAX", 4)
    async with zbus.open("memory") as bus:
        for number in range(20):
            await bus.session("alice").publish(f"a/{number % 5}", str(number).encode())
        events = await stored(bus)

        assert len(node_of(bus).sessions.identities._following) == 4
    assert len({event.identity for event in events}) == 40
    assert [int(event.payload) for event in events] == [number for number in range(20) for _ in range(2)]


async def test_many_are_stored_in_pairs_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PAIRS_PER_COMMIT", 7)
    async with zbus.open("memory") as bus:
        offsets = await bus.session("alice").publish_many("a/b", range(20), headers={"tenant": "x"})
        events = await stored(bus)

    assert offsets == [(at, at + 1) for at in range(1, 41, 2)]
    assert [event.key for event in events] == ["a/b", "sessions/alice/a/b"] * 20
    assert [event.decode() for event in events] == [number for number in range(20) for _ in range(2)]
    assert [event.sequence for event in events] == [number for number in range(20) for _ in range(2)]
    assert all(event.headers["tenant"] == "x" for event in events)


async def test_nothing_to_publish_stores_nothing() -> None:
    async with zbus.open("memory") as bus:
        assert await bus.session("alice").publish_many("a/b", []) == []
        assert await bus.head() == 0


async def test_one_publish_is_one_append_to_the_log(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with zbus.open(log_path) as bus:
        appended: list[int] = []
        assert node_of(bus).log is not None
        commits = node_of(bus).commits
        assert commits is not None
        append = commits._append
        monkeypatch.setattr(commits, "_append", lambda rows, *more: (appended.append(len(rows)), append(rows, *more)))

        await bus.session("alice").publish("a/b", b"x")

        assert appended == [2]


# The process is killed by itself, at the one moment that tells: right after the first commit that has any of the two
# events, or right before it.
DIES = """
import asyncio, os, signal, sys, zbus
from zbus_log.write.writer import Writer
when, path, many = sys.argv[1], sys.argv[2], sys.argv[3] == "many"
insert = Writer._insert
def dying(self, rows, first):
    ours = [row for row in rows if row.payload == b"x"]
    if ours and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    insert(self, rows, first)
    if ours:
        os.kill(os.getpid(), signal.SIGKILL)
async def main():
    async with zbus.open(path) as bus:
        publisher = await bus.publisher("noise")
        await publisher.publish(b"noise")
        Writer._insert = dying
        others = [asyncio.create_task(publisher.publish(b"noise")) for _ in range(100)]
        session = bus.session("alice")
        await (session.publish_many("a/b", [b"x"] * 3) if many else session.publish("a/b", b"x"))
asyncio.run(main())
"""


@pytest.mark.parametrize(("when", "many"), [("before", "many"), ("after", "one"), ("after", "many")])
async def test_killed_at_any_moment_both_are_stored_or_neither(log_path: Path, when: str, many: str) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, when, str(log_path), many], timeout=WAIT_S * 2)
    assert died.returncode == -signal.SIGKILL

    async with zbus.open(log_path) as bus:
        found = [event.key for event in await stored(bus) if event.key != "noise"]

    pairs = 0 if when == "before" else 3 if many == "many" else 1
    assert found == ["a/b", "sessions/alice/a/b"] * pairs


async def test_cancelled_while_it_waits_both_are_stored_or_neither(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        session = bus.session("alice")
        for number in range(30):
            publishing = asyncio.create_task(session.publish("a/b", str(number).encode()))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
        await session.publish("a/b", b"last")
        events = await stored(bus)

    everybody = [event.payload for event in events if event.key == "a/b"]
    assert everybody == [event.payload for event in events if event.key == "sessions/alice/a/b"]
    assert everybody[-1] == b"last"


async def test_without_a_log_both_are_delivered() -> None:
    async with zbus.open() as bus, bus.subscribe("**") as subscription:
        assert await bus.session("alice").publish("a/b", b"x") == (0, 0)
        async with asyncio.timeout(WAIT_S):
            found = [(await anext(subscription)).key for _ in range(2)]

    assert found == ["a/b", "sessions/alice/a/b"]


# Refusals.

BAD_IDS = ["", "a/b", "/", "*", "**", "a$*", "$", "@a", "a b", "a\n", "a?", "a#b", "x" * 1025, "\ud800", 7, None, b"a"]


@pytest.mark.parametrize("session_id", BAD_IDS, ids=ascii)
def test_an_id_that_is_no_single_segment_of_a_key_is_refused(session_id: Any) -> None:
    with pytest.raises(zbus.KeyInvalid):
        zbus.open("memory").session(session_id)
    with pytest.raises(zbus.KeyInvalid):
        zbus.sign_session_token(SECRET, session_id, 60)


async def test_a_key_that_cannot_be_published_to_stores_neither() -> None:
    async with zbus.open("memory") as bus:
        session = bus.session("alice")
        for key in ("a/*", "**", "", "@zbus/x", "a//b", "sessions/bob/x", "sessions", "k" * 1020):
            for publishing in (session.publish(key, b"x"), session.publish_many(key, [b"x"])):
                with pytest.raises(zbus.KeyInvalid):
                    await publishing
        assert await bus.head() == 0


async def test_a_key_that_only_begins_like_a_sessions_is_a_key_like_any_other() -> None:
    async with zbus.open("memory") as bus:
        await bus.session("alice").publish("sessionsx/bob", b"x")

        assert [event.key for event in await stored(bus)] == ["sessionsx/bob", "sessions/alice/sessionsx/bob"]


@pytest.mark.parametrize("side", ["a/b", "sessions/*/a/b"])
async def test_what_a_schema_of_either_key_refuses_is_stored_on_neither_and_leaves_no_gap(side: str) -> None:
    class Order(pydantic.BaseModel):
        id: int

    async with zbus.open("memory") as bus:
        await bus.schemas.register(side, Order)
        session = bus.session("alice")
        with pytest.raises(zbus.SchemaInvalid, match="not stored"):
            await session.publish("a/b", {"id": "no"})
        with pytest.raises(zbus.SchemaInvalid) as caught:
            await session.publish_many("a/b", [{"id": 1}, {"id": "no"}])
        assert caught.value.__notes__ == ["0 payloads of this call are stored"]
        assert await bus.head() == 0

        await session.publish("a/b", {"id": 2})
        events = await stored(bus)

    assert [(event.decode()["id"], event.sequence) for event in events] == [(2, 0), (2, 0)]


async def test_what_cannot_be_encoded_is_stored_on_neither_and_says_what_was_stored_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "PAIRS_PER_COMMIT", 2)
    async with zbus.open("memory") as bus:
        session = bus.session("alice")
        with pytest.raises(zbus.PayloadInvalid):
            await session.publish("a/b", object())
        with pytest.raises(zbus.EventInvalid):
            await session.publish("a/b", b"x", headers={"Bad Name": "x"})
        with pytest.raises(zbus.EventInvalid):
            await session.publish("a/b", b"x", headers="tenant")  # type: ignore[arg-type]
        with pytest.raises(zbus.PayloadInvalid) as caught:
            await session.publish_many("a/b", [b"1", b"2", b"3", object()])
        assert caught.value.__notes__ == ["2 payloads of this call are stored"]
        with pytest.raises(ZeroDivisionError):
            await session.publish_many("a/b", (b"%d" % (1 // each) for each in (1, 0)))

        await session.publish("a/b", b"4")
        events = await stored(bus)

    assert [(event.payload, event.sequence) for event in events if event.key == "a/b"] == [
        (b"1", 0),
        (b"2", 1),
        (b"4", 2),
    ]


async def test_a_closed_bus_publishes_neither() -> None:
    bus = zbus.open("memory")
    async with bus:
        session = bus.session("alice")
    with pytest.raises(zbus.BusClosed):
        await session.publish("a/b", b"x")


async def test_a_session_waits_for_a_reader_that_must_not_drop() -> None:
    async with zbus.open("memory") as bus:
        session = bus.session("alice")
        async with session.subscribe("a/*", overflow="block", queue_events=1) as subscription:
            publishing = asyncio.create_task(session.publish_many("a/b", range(3)))
            waiting = asyncio.create_task(session.publish("a/b", 3))
            async with asyncio.timeout(WAIT_S):
                found = [(await anext(subscription)).decode() for _ in range(4)]
            await asyncio.gather(publishing, waiting)

        assert sorted(found) == [0, 1, 2, 3]


async def test_only_the_global_key_is_announced_to_other_nodes() -> None:
    async with zbus.open("memory") as bus:
        await bus.session("alice").publish("a/b", b"x")

        assert bus.nodes()[0].publishes == ("a/b",)


# Subscribing.


async def test_a_session_reads_its_own_events_and_no_others() -> None:
    async with zbus.open("memory") as bus:
        alice, bob = bus.session("alice"), bus.session("bob")
        await alice.publish("events/Todo/1", b"1")
        await bob.publish("events/Todo/2", b"2")
        await alice.publish("events/User/3", b"3")
        await (await bus.publisher("events/Todo/4")).publish(b"4")
        await alice.publish("events/Todo/5", b"5")

        async with asyncio.timeout(WAIT_S):
            async with alice.subscribe(start="beginning") as everything, bob.subscribe(start=1) as of_bob:
                async with alice.subscribe("events/Todo/*", start="beginning") as todos:
                    assert [(await anext(everything)).payload for _ in range(3)] == [b"1", b"3", b"5"]
                    assert [(await anext(todos)).key for _ in range(2)] == [
                        "sessions/alice/events/Todo/1",
                        "sessions/alice/events/Todo/5",
                    ]
                    assert (await anext(of_bob)).payload == b"2"


@pytest.mark.parametrize("expression", ["", "/a", "../bob", "a//b"])
async def test_an_expression_never_leaves_the_session(expression: str) -> None:
    async with zbus.open("memory") as bus:
        try:
            async with bus.session("alice").subscribe(expression) as subscription:
                assert all(each.startswith("sessions/alice/") for each in subscription.key_exprs)
        except zbus.KeyInvalid:
            pass


def test_code_without_a_loop_has_sessions_too(log_path: Path) -> None:
    with zbus.blocking.open(log_path, session_secret=SECRET.decode()) as bus:
        session = bus.session("zoë")
        with session.subscribe("a/*") as subscription:
            assert session.publish("a/b", b"1") == (1, 2)
            assert session.publish_many("a/b", (each for each in (b"2", b"3"))) == [(3, 4), (5, 6)]
            found = [subscription.next(timeout=WAIT_S) for _ in range(3)]

        assert [(event.key, event.payload) for event in found if event] == [
            (session.key("a/b"), payload) for payload in (b"1", b"2", b"3")
        ]
        assert zbus.verify_session_token(SECRET, session.token()) == session.id == "zoë"


# Tokens.


async def test_a_bus_signs_tokens_with_its_secret() -> None:
    async with zbus.open("memory", session_secret=SECRET.decode()) as bus:
        assert zbus.verify_session_token(SECRET, bus.session("alice").token()) == "alice"
        assert SECRET.decode() not in repr(bus.config)


async def test_without_a_secret_there_are_no_tokens() -> None:
    async with zbus.open("memory") as bus:
        with pytest.raises(zbus.ConfigInvalid, match="session_secret"):
            bus.session("alice").token()


segments = st.text(min_size=1, max_size=60).filter(lambda text: _is_segment(text))


def _is_segment(text: str) -> bool:
    try:
        return session_token.check_session_id(text) == text
    except zbus.KeyInvalid:
        return False


@given(segments, st.binary(min_size=16, max_size=80), st.floats(min_value=1, max_value=1e8))
def test_any_id_comes_back_and_the_token_fits_into_a_cookie_and_a_query(
    session_id: str, secret: bytes, ttl_s: float
) -> None:
    token = zbus.sign_session_token(secret, session_id, ttl_s)

    assert zbus.verify_session_token(secret, token) == session_id
    assert set(token) <= set(string.ascii_letters + string.digits + "-_.")


def test_the_longest_id_comes_back() -> None:
    assert zbus.verify_session_token(SECRET, zbus.sign_session_token(SECRET, "é" * 512, 60)) == "é" * 512


def test_another_secret_does_not_open_it() -> None:
    with pytest.raises(zbus.SessionTokenInvalid, match="another secret"):
        zbus.verify_session_token(b"fedcba9876543210", zbus.sign_session_token(SECRET, "alice", 60))


def test_no_change_of_any_character_is_accepted() -> None:
    token = zbus.sign_session_token(SECRET, "alice", 3600)
    for at in range(len(token)):
        for other in "A0_z.-":
            changed = token[:at] + other + token[at + 1 :]
            if changed != token:
                with pytest.raises(zbus.SessionTokenInvalid):
                    zbus.verify_session_token(SECRET, changed)
        with pytest.raises(zbus.SessionTokenInvalid):
            zbus.verify_session_token(SECRET, token[:at] + token[at + 1 :])


def test_the_last_character_has_one_spelling() -> None:
    """The last of 43 characters of base64 has two bits that stand for nothing."""
    token = zbus.sign_session_token(SECRET, "alice", 3600)
    letters = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"

    accepted = [letter for letter in letters if _opens(token[:-1] + letter)]

    assert accepted == [token[-1]]


def _opens(token: str) -> bool:
    try:
        return bool(zbus.verify_session_token(SECRET, token))
    except zbus.SessionTokenInvalid:
        return False


def test_parts_of_two_tokens_make_no_third() -> None:
    alice, bob = (
        zbus.sign_session_token(SECRET, who, ttl_s).split(".") for who, ttl_s in (("alice", 60), ("bob", 6000))
    )
    for mixed in (
        [alice[0], bob[1], alice[2], alice[3]],  # lives longer
        [alice[0], alice[1], bob[2], alice[3]],  # opens another session
        [alice[0], alice[1], alice[2], bob[3]],
    ):
        with pytest.raises(zbus.SessionTokenInvalid, match="changed"):
            zbus.verify_session_token(SECRET, ".".join(mixed))


def test_a_token_ends_when_its_time_is_over() -> None:
    now = 1_800_000_000 * 10**9
    token = zbus.sign_session_token(SECRET, "alice", 60, time_ns=lambda: now)

    now += 59_900_000_000
    assert zbus.verify_session_token(SECRET, token, time_ns=lambda: now) == "alice"
    now += 100_000_000
    with pytest.raises(zbus.SessionTokenInvalid, match="expired"):
        zbus.verify_session_token(SECRET, token, time_ns=lambda: now)


def test_the_expiry_of_a_token_that_was_not_signed_is_not_reported() -> None:
    text = urlsafe_b64encode(b"alice").rstrip(b"=").decode()
    with pytest.raises(zbus.SessionTokenInvalid, match="another secret"):
        zbus.verify_session_token(SECRET, f"zs1.1.{text}.{'A' * 43}")


def test_a_version_that_is_not_this_one_is_no_token() -> None:
    token = zbus.sign_session_token(SECRET, "alice", 60)

    with pytest.raises(zbus.SessionTokenInvalid, match="malformed"):
        zbus.verify_session_token(SECRET, "zs2" + token[3:])


def test_the_same_secret_may_sign_other_texts() -> None:
    """What an application signs with a plain HMAC is no token, even where it lets others choose the text."""
    signed = zbus.sign_session_token(SECRET, "alice", 60).rpartition(".")[0]
    plain = urlsafe_b64encode(hmac.digest(SECRET, signed.encode(), "sha256")).rstrip(b"=").decode()

    with pytest.raises(zbus.SessionTokenInvalid, match="changed"):
        zbus.verify_session_token(SECRET, f"{signed}.{plain}")


@pytest.mark.parametrize(
    "token",
    ["", ".", "...", "zs1...", "zs1.1.é.x", "\ud800", "zs1." + "9" * 5000, "x" * 3000, 7, None, b"zs1"],
    ids=ascii,
)
def test_a_malformed_token_is_refused_and_never_repeated(token: Any) -> None:
    with pytest.raises(zbus.SessionTokenInvalid) as caught:
        zbus.verify_session_token(SECRET, token)

    assert "session.token()" in str(caught.value)
    if isinstance(token, str) and len(token) > 4:
        assert token not in str(caught.value)


@pytest.mark.parametrize("secret", [b"", b"123456789012345", "0123456789abcdef", None])
def test_a_secret_that_can_be_guessed_signs_and_opens_nothing(secret: Any) -> None:
    with pytest.raises(zbus.ConfigInvalid, match="session_secret"):
        zbus.sign_session_token(secret, "alice", 60)
    with pytest.raises(zbus.ConfigInvalid, match="session_secret"):
        zbus.verify_session_token(secret, zbus.sign_session_token(SECRET, "alice", 60))


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), 1e12, "60", None, True])
def test_a_time_to_live_that_is_none_is_refused(ttl_s: Any) -> None:
    with pytest.raises(zbus.ConfigInvalid, match="ttl_s"):
        zbus.sign_session_token(SECRET, "alice", ttl_s)


# The secret.


def test_the_secret_comes_from_an_argument_a_variable_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("of-a-file-0123456\n")
    in_the_file = zbus.BusConfig(session_secret_file=str(file))
    monkeypatch.setenv("ZBUS_SESSION_SECRET", "of-a-variable-0123456")

    for config, expected in (
        (in_the_file, "of-a-file-0123456"),
        (zbus.BusConfig(), "of-a-variable-0123456"),
        (zbus.BusConfig(session_secret=pydantic.SecretStr("an-argument-0123456")), "an-argument-0123456"),
    ):
        assert config.session_secret is not None
        assert config.session_secret.get_secret_value() == expected
        assert expected not in repr(config) + str(config)


def test_a_secret_that_cannot_be_used_is_reported_by_its_field_and_not_repeated(tmp_path: Path) -> None:
    short, binary, folder = tmp_path / "short", tmp_path / "binary", tmp_path / "folder"
    short.write_text("  tooshort \n")
    binary.write_bytes(b"\xff" * 40)
    folder.mkdir()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"session_secret": "tooshort"}, "session_secret: must have at least 16 bytes"),
        ({"session_secret": "é" * 7}, "session_secret: must have at least 16 bytes"),
        ({"session_secret_file": str(short)}, "session_secret: must have at least 16 bytes"),
        ({"session_secret_file": str(tmp_path / "nowhere")}, "session_secret_file: .*No such file"),
        ({"session_secret_file": str(folder)}, "session_secret_file: .*directory"),
        ({"session_secret_file": str(binary)}, "session_secret_file: .*not a text file"),
        ({"session_secret_file": str(short), "session_secret": "0123456789abcdef"}, "another secret"),
    ]
    for given_, said in cases:
        with pytest.raises(zbus.ConfigInvalid, match=said) as caught:
            zbus.BusConfig(**given_)
        assert "tooshort" not in str(caught.value)
        assert "0123456789abcdef" not in str(caught.value)


def test_eight_letters_of_two_bytes_are_enough() -> None:
    assert zbus.BusConfig(session_secret=pydantic.SecretStr("é" * 8)).session_secret
