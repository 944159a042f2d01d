"""The short way from the socket to a sink, and what it relies on in nats-py."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from pathlib import Path

import nats.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser
from nats_support import nats_server, wait_for

from zbus_nats.client import SIDS_FROM, DirectClient

Came = list[tuple[bytes, bytes, bytes, bytes | None]]


class Listening(DirectClient):
    """The client without a server: what comes for 7 goes to a sink, what comes for 8 the long way."""

    def __init__(self) -> None:
        super().__init__(needs_tls=False)
        self.direct: Came = []
        self.pings = 0
        self.take(7, "a", "", lambda *each: self.direct.append(each))
        self.slow = self._subs[8] = Subscription(self, 8, "a")

    async def _process_ping(self) -> None:
        self.pings += 1


payloads = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"MSG a 7 3\r\nabc\r\n", b"\r\n", b"PING\r\n", b"x" * 5000])
)
wire_messages = st.tuples(
    st.sampled_from([b"a.b", b"a.%C3%BC", b"PING", b"1"]),
    st.sampled_from([b"7", b"8"]),  # 7 has a sink, 8 has none
    st.sampled_from([b"", b"_INBOX.x.1", b"12"]),
    payloads,
    st.sampled_from([None, b"NATS/1.0\r\nA: b\r\n\r\n"]),
)


def on_the_wire(message: tuple[bytes, bytes, bytes, bytes, bytes | None]) -> bytes:
    subject, sid, reply, data, headers = message
    reply = reply + b" " if reply else b""
    if headers is None:
        return b"MSG %b %b %b%d\r\n%b\r\n" % (subject, sid, reply, len(data), data)
    return b"HMSG %b %b %b%d %d\r\n%b%b\r\n" % (
        subject, sid, reply, len(headers), len(headers) + len(data), headers, data,
    )  # fmt: skip


@given(
    items=st.lists(st.one_of(wire_messages, st.just(None)), max_size=12),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_whatever_the_cuts_every_message_arrives_once_in_order_by_its_own_way(
    items: list[tuple[bytes, bytes, bytes, bytes, bytes | None] | None], cuts: list[int]
) -> None:
    stream = b"".join(b"PING\r\n" if each is None else on_the_wire(each) for each in items)
    far = Listening()

    async def feed() -> None:
        at = turn = 0
        while at < len(stream):
            size = cuts[turn % len(cuts)]
            await far._ps.parse(stream[at : at + size])
            at, turn = at + size, turn + 1

    asyncio.run(feed())

    sent = [each for each in items if each is not None]
    slow = [far.slow._pending_queue.get_nowait() for _ in range(far.slow.pending_msgs)]
    assert far.direct == [(s, r, d, h) for s, sid, r, d, h in sent if sid == b"7"]
    assert [(each.subject.encode(), each.reply.encode(), each.data) for each in slow] == [
        (s, r, d) for s, sid, r, d, _ in sent if sid == b"8"
    ]
    assert far.pings == items.count(None)
    assert not far._ps.buf


async def test_a_message_goes_to_its_sink_without_queue_or_task(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        client, other = DirectClient(needs_tls=False), Client()
        await client.connect(server.url, no_echo=True, allow_reconnect=False)
        await other.connect(server.url, allow_reconnect=False)
        came: Came = []
        client.write([client.take(SIDS_FROM, "a.>", "", lambda *each: came.append(each))])
        await client.flush()
        tasks = len(asyncio.all_tasks())

        for number in range(5_000):
            await other.publish("a.b", b"%d" % number)
        await other.flush()
        await asyncio.to_thread(wait_for, lambda: len(came) == 5_000)

        assert [data for _, _, data, _ in came] == [b"%d" % number for number in range(5_000)]
        assert client._subs[SIDS_FROM].pending_msgs == 0
        assert len(asyncio.all_tasks()) <= tasks
        client.write([client.drop(SIDS_FROM)])
        await client.flush()
        client.forget(SIDS_FROM)
        await other.close()
        await client.dispose()


async def test_what_nats_py_itself_asks_still_gets_its_answer(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        client = DirectClient(needs_tls=False)
        await client.connect(server.url, allow_reconnect=False)

        with pytest.raises(nats.errors.NoRespondersError):
            await client.request("nobody.there", b"", timeout=5)

        await client.dispose()


async def test_a_pong_that_no_caller_waits_for_any_more_does_not_end_the_reading(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        client = DirectClient(needs_tls=False)
        await client.connect(server.url, allow_reconnect=False)
        server.freeze()
        with pytest.raises(nats.errors.FlushTimeoutError):
            await client.flush(0.1)  # type: ignore[arg-type]

        server.thaw()
        await client.flush(10)

        assert client.is_connected
        await client.dispose()


# The sources that `zbus_nats.client` relies on, as they were when it was written for nats-py 2.16.0. When one of these
# changes: read the new source, see whether the short way still holds, and only then write the new number down.
RELIED_ON = {
    Parser.parse: "7d6165f1766cccd1",
    Parser.reset: "0f304f3f8691385f",
    Client._process_msg: "6cff75947e97717a",
    Client._connect_command: "1999c01f55c91ecc",
    Client._read_loop: "b44b9401f436dd0e",
    Client._close: "9a92d3aca1b2c1fd",
    Client._process_op_err: "d4257cb1203cdbcb",
    Client._process_err: "ceb70f44e38fa728",
    Client._process_connect_init: "e1ed2da075c82ab0",
    Client._process_pong: "ee4c4d01a16de074",
    Client.flush: "b410d7515bcc7800",
    TcpTransport: "516720a2ccd8c051",
}


@pytest.mark.parametrize("what", RELIED_ON, ids=lambda what: what.__qualname__)
def test_nats_py_is_built_as_when_this_was_written(what: object) -> None:
    found = hashlib.sha256(inspect.getsource(what).encode()).hexdigest()[:16]  # type: ignore[arg-type]

    assert found == RELIED_ON[what], "nats-py changed here: read it again before trusting the short way"


@pytest.mark.parametrize("sid", [7, 8], ids=["direct", "nats-py"])
@pytest.mark.parametrize("before", [b"", b"PING\r\n"], ids=["first", "later"])
async def test_a_message_larger_than_the_server_permits_is_not_collected(sid: int, before: bytes) -> None:
    client = Listening()
    client._max_payload = 1000
    await client._ps.parse(b"MSG a 7 1000\r\n" + bytes(1000) + b"\r\n")
    assert len(client.direct) == 1

    with pytest.raises(nats.errors.ProtocolError):
        await client._ps.parse(before + b"MSG a %d 99999999999\r\n" % sid)


@pytest.mark.parametrize("size", [0, -5, "x", 1e9, True, None, 10**30])
def test_a_server_that_announces_an_unusable_size_of_messages_is_not_used(size: object) -> None:
    client = Listening()
    client.check_limits()
    client._max_payload = size  # type: ignore[assignment]

    with pytest.raises(nats.errors.Error, match="max_payload"):
        client.check_limits()
