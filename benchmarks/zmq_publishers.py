"""What do 200 publishers on ZMQ cost a process, in threads and in sockets, beside one publisher?

Each of them publishes, and a subscriber in another process must have received an event of every one before anything
is counted. Threads are those of the whole process, libzmq's included. Sockets are counted as file descriptors, of
which every ZMQ socket and every connection has at least one. For comparison, bare pyzmq with a socket for each
publisher, as a remark.
"""

from __future__ import annotations

import asyncio
import gc
import os
from importlib.metadata import version
from typing import Any

import zmq
from _ends import End, say, told
from _harness import Figure, Row, Sizes, alone, compare, folder, zbus_versions

import zbus

MANY = 200
TARGET = 4
QUESTIONS = {
    "threads": "threads of a process with 200 ZMQ publishers, beside one",
    "files": "the same in sockets, counted as open files",
}


def rows(sizes: Sizes) -> list[Row]:
    """Threads, and sockets."""
    rounds = [(_counted(MANY), _counted(1)) for _ in range(sizes.of(3, 1))]
    bare = _bare(MANY)
    versions = zbus_versions() | {"pyzmq": version("pyzmq"), "libzmq": zmq.zmq_version()}
    return [
        compare(
            "zmq_publishers",
            question,
            unit=unit,
            peer_name="one publisher",
            rounds=[(Figure(many[unit]), Figure(one[unit])) for many, one in rounds],
            target=TARGET,
            target_is="more than peer at most",
            versions={"zbus": versions, "peer": versions},
            zmq_sockets=[{"with_200": many["zmq_sockets"], "with_one": one["zmq_sockets"]} for many, one in rounds],
            bare_pyzmq_with_a_socket_for_each=bare[unit],
        )
        for unit, question in QUESTIONS.items()
    ]


def _counted(publishers: int) -> dict[str, Any]:
    with folder() as where:
        place = {"transport": f"zmq://?registry={where}", "publishers": publishers}
        with End("zmq_publishers", "subscriber", place) as receiving:
            receiving.hears()
            with End("zmq_publishers", "publishing", place) as sending:
                sending.hears()
                receiving.hears()
                sending.go()
                return sending.hears()


def _bare(publishers: int) -> dict[str, Any]:
    with End("zmq_publishers", "bare", {"publishers": publishers}) as end:
        return end.hears()


async def publishing(transport: str, publishers: int) -> None:
    """A process that publishes; counted when all of it has arrived, with every publisher still there."""
    async with zbus.open(transport=transport) as bus:
        made = [await bus.publisher(f"bench/source-{number}") for number in range(publishers)]
        for each in made:
            await each.publish(b"here")
        say(published=len(made))
        await asyncio.to_thread(told)
        say(**counted())
        await asyncio.to_thread(told)


async def subscriber(transport: str, publishers: int) -> None:
    """Says when it has heard all of them."""
    async with zbus.open(transport=transport) as bus, bus.subscribe("bench/*") as subscription:
        say(ready=True)
        heard = set()
        async for event in subscription:
            heard.add(event.publisher_id)
            if len(heard) == publishers:
                break
        say(heard=len(heard))
        await asyncio.to_thread(told)


def bare(publishers: int) -> None:
    """Bare pyzmq with a bound socket for each publisher."""
    with zmq.Context() as context:
        made = [context.socket(zmq.PUB) for _ in range(publishers)]
        for socket in made:
            socket.bind("tcp://127.0.0.1:*")
        say(**counted())
        for socket in made:
            socket.close(0)
    told()


def counted() -> dict[str, int]:
    """What this process holds now."""
    sockets = [each for each in gc.get_objects() if isinstance(each, zmq.Socket) and not each.closed]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "zmq_sockets": len(sockets),
    }


if __name__ == "__main__":
    alone(rows)
