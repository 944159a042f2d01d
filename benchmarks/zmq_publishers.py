"""How many threads and sockets does a process with 200 ZMQ publishers use, compared with one publisher?

Each of them publishes, and a subscriber in another process must have received an event of every publisher before
anything is counted. Threads are those of the whole process, including libzmq's. Sockets are counted as file
descriptors; every ZMQ socket and every connection has at least one. Bare pyzmq with a socket for each
publisher is an extra value.
"""

from __future__ import annotations

import asyncio
import gc
import os
from importlib.metadata import version
from typing import Any

import zmq
from _ends import End, report, wait_for_turn
from _harness import Measurement, Row, Sizes, compare, folder, run_one, zbus_versions

import zbus

MANY = 200
TARGET = 4
TITLES = {
    "threads": "threads of a process with 200 ZMQ publishers vs. one",
    "files": "the same in sockets, counted as open files",
}


def rows(sizes: Sizes) -> list[Row]:
    """Measure threads and sockets."""
    rounds = [(_counted(MANY), _counted(1)) for _ in range(sizes.of(3, 1))]
    bare = _bare(MANY)
    versions = zbus_versions() | {"pyzmq": version("pyzmq"), "libzmq": zmq.zmq_version()}
    return [
        compare(
            "zmq_publishers",
            title,
            unit=unit,
            peer_name="one publisher",
            rounds=[(Measurement(many[unit]), Measurement(one[unit])) for many, one in rounds],
            target=TARGET,
            target_is="more than peer at most",
            versions={"zbus": versions, "peer": versions},
            zmq_sockets=[{"with_200": many["zmq_sockets"], "with_one": one["zmq_sockets"]} for many, one in rounds],
            bare_pyzmq_with_a_socket_for_each=bare[unit],
        )
        for unit, title in TITLES.items()
    ]


def _counted(publishers: int) -> dict[str, Any]:
    with folder() as where:
        place = {"transport": f"zmq://?registry={where}", "publishers": publishers}
        with End("zmq_publishers", "subscriber", place) as receiving:
            receiving.receive()
            with End("zmq_publishers", "publishing", place) as sending:
                sending.receive()
                receiving.receive()
                sending.go()
                return sending.receive()


def _bare(publishers: int) -> dict[str, Any]:
    with End("zmq_publishers", "bare", {"publishers": publishers}) as end:
        return end.receive()


async def publishing(transport: str, publishers: int) -> None:
    """Publish, and count once all events have arrived, with every publisher still open."""
    async with zbus.open(transport=transport) as bus:
        made = [await bus.publisher(f"bench/source-{number}") for number in range(publishers)]
        for each in made:
            await each.publish(b"here")
        report(published=len(made))
        await asyncio.to_thread(wait_for_turn)
        report(**counted())
        await asyncio.to_thread(wait_for_turn)


async def subscriber(transport: str, publishers: int) -> None:
    """Receive events, and report once every publisher was received."""
    async with zbus.open(transport=transport) as bus, bus.subscribe("bench/*") as subscription:
        report(ready=True)
        received = set()
        async for event in subscription:
            received.add(event.publisher_id)
            if len(received) == publishers:
                break
        report(received=len(received))
        await asyncio.to_thread(wait_for_turn)


def bare(publishers: int) -> None:
    """Use bare pyzmq with a bound socket for each publisher."""
    with zmq.Context() as context:
        made = [context.socket(zmq.PUB) for _ in range(publishers)]
        for socket in made:
            socket.bind("tcp://127.0.0.1:*")
        report(**counted())
        for socket in made:
            socket.close(0)
    wait_for_turn()


def counted() -> dict[str, int]:
    """Return the current threads and open files of this process."""
    sockets = [each for each in gc.get_objects() if isinstance(each, zmq.Socket) and not each.closed]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "zmq_sockets": len(sockets),
    }


if __name__ == "__main__":
    run_one(rows)
