"""Two nodes over Zenoh: events cross, and the send queue makes good what a crash kept from being sent.

The link is a socket file in the test's own folder, so there is no port to collide with.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE

import pytest
from inside import node_of

import zbus


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"unixsock-stream/{tmp_path}/zenoh.sock"


async def test_events_cross_to_another_node_once_and_in_order(log_path: Path, endpoint: str) -> None:
    async with zbus.open(mode="peer", listen=[endpoint]) as there:
        async with there.subscribe("shop/**", "shop/*/created") as subscription:
            async with zbus.open(log_path, mode="peer", connect=[endpoint]) as here:
                await wanted(here, "shop/orders/created")
                publisher = await here.publisher("shop/orders/created")
                await publisher.publish_many([b"%d" % n for n in range(500)], headers={"tenant": "x"})
                async with asyncio.timeout(20):
                    events = [await anext(subscription) for _ in range(500)]

        assert [event.sequence for event in events] == list(range(500))
        assert {event.publisher_id for event in events} == {publisher.publisher_id}
        assert events[0].headers == {"tenant": "x"}
        assert events[0].offset == 0  # not in a log of this node
        assert subscription.queued == 0


async def test_a_node_receives_its_own_events_once(log_path: Path, endpoint: str) -> None:
    async with zbus.open(mode="peer", listen=[endpoint]) as there, there.subscribe("**") as far:
        async with zbus.open(log_path, mode="peer", connect=[endpoint]) as here, here.subscribe("**") as near:
            await wanted(here, "a/b")
            await (await here.publisher("a/b")).publish(b"x")
            async with asyncio.timeout(20):
                assert (await anext(far)).payload == b"x"
                assert (await anext(near)).offset == 1
            assert near.queued == 0


async def test_an_application_may_lend_its_own_zenoh_session(log_path: Path) -> None:
    import zenoh

    from zbus.wire.envelope import decode

    config = zenoh.Config()
    for path, value in (("listen/endpoints", "[]"), ("scouting/multicast/enabled", "false")):
        config.insert_json5(path, value)
    session = zenoh.open(config)
    received: list[bytes] = []
    subscriber = session.declare_subscriber("shop/**", lambda sample: received.append(sample.payload.to_bytes()))
    try:
        async with zbus.open(log_path, session=session) as bus:
            await (await bus.publisher("shop/orders")).publish(b"x")
            async with asyncio.timeout(10):
                while not received:
                    await asyncio.sleep(0.005)
        assert decode(received[0]).payload == b"x"
        assert not session.is_closed()
    finally:
        subscriber.undeclare()
        session.close()


async def test_garbage_from_the_network_is_counted_and_stops_nothing(endpoint: str) -> None:
    async with zbus.open(mode="peer", listen=[endpoint]) as there, there.subscribe("**") as subscription:
        async with zbus.open(mode="peer", connect=[endpoint]) as here:
            await wanted(here, "a/b")
            for garbage in (b"", b"\x07", b"\x01\x93\x01", b"\x01" + b"\xff" * 50):
                here.zenoh.put("a/b", garbage)
            await (await here.publisher("a/b")).publish(b"x")
            async with asyncio.timeout(20):
                assert (await anext(subscription)).payload == b"x"
        assert there.stats()["invalid_received"] == 4


CHILD = """
    import asyncio, os, signal, sys, zbus
    from zbus_zenoh.fabric import ZenohFabric

    log, endpoint, moment, first = sys.argv[1:]
    send = ZenohFabric.send

    def crash_instead(self, frames):
        if frames[0][0].startswith("@"):
            return send(self, frames)  # a beacon
        if moment == "after-send":
            send(self, frames)
            sys.stdin.readline()  # until it has arrived
        os.kill(os.getpid(), signal.SIGKILL)

    async def main():
        if moment != "never":
            ZenohFabric.send = crash_instead
        async with zbus.open(log, mode="peer", connect=[endpoint]) as bus:
            publisher = await bus.publisher("shop/orders")
            while not bus._node.network.links[0].fabric.ready("shop/orders"):
                await asyncio.sleep(0.005)
            await publisher.publish(first.encode())
            await asyncio.sleep(3600 if moment != "never" else 0)
    asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["before-send", "after-send"])
async def test_a_crash_between_commit_and_send_is_made_good_at_the_next_start(
    log_path: Path, endpoint: str, moment: str
) -> None:
    arguments = [sys.executable, "-c", textwrap.dedent(CHILD), str(log_path), endpoint]
    events: list[zbus.Event] = []

    async def child(moment: str, payload: str) -> int:
        process = await asyncio.create_subprocess_exec(*arguments, moment, payload, stdin=PIPE, stderr=PIPE)
        if moment == "after-send":
            events.append(await asyncio.wait_for(anext(subscription), 30))
        _, stderr = await asyncio.wait_for(process.communicate(b"arrived\n"), 30)
        assert process.returncode in (0, -signal.SIGKILL), stderr.decode()
        return process.returncode

    async with zbus.open(mode="peer", listen=[endpoint]) as there, there.subscribe("shop/**") as subscription:
        assert await child(moment, "committed, then a crash") == -signal.SIGKILL
        assert await child("never", "after the crash") == 0

        async with asyncio.timeout(20):
            while len(events) < 2:
                events.append(await anext(subscription))

        assert [event.payload for event in events] == [b"committed, then a crash", b"after the crash"]
        # It is sent again; whether it arrives depends on when the new route is set up. Nobody sees it twice.
        assert subscription.queued == 0


async def wanted(bus: zbus.Bus, key: str) -> None:
    """Until the other node's subscription is known here."""
    assert node_of(bus).network is not None
    async with asyncio.timeout(20):
        while not await node_of(bus).run(node_of(bus).network.links[0].fabric.ready, key):
            await asyncio.sleep(0.005)


async def test_cancelling_one_declaration_cancels_no_other() -> None:
    """Declarations of one turn of the loop are made together, for callers that do not know of each other."""
    async with zbus.open() as bus:
        first = asyncio.create_task(bus.receive_on())
        await asyncio.sleep(0)
        seen: list[zbus.Event] = []

        @bus.on("a/**")
        async def handle(event: zbus.Event) -> None:
            seen.append(event)

        subscription = bus.subscribe("b/**")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await (await subscription.ready()).aclose()
        await (await bus.publisher("a/b")).publish(b"")
        async with asyncio.timeout(20):
            while not seen:
                await asyncio.sleep(0.002)
