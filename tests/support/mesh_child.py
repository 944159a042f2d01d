"""A node of the mesh tests: a process with one bus that does what it reads from stdin, a line of JSON a call.

What it learns of events it writes to a file, each fact with one `write` after the fact that it states: `seen NAME
PUBLISHER SEQUENCE OFFSET KEY SECONDS`, `acked NAME OFFSET`, `published PUBLISHER SEQUENCE`, `gap …`. So what a killed
process knew is in the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

from inside import node_of

import zbus

facts = -1


def note(text: str) -> None:
    os.write(facts, f"{text}\n".encode())


def waited_for_a_processor_s() -> float:
    """How long the threads of this process were ready to run while others had the processors."""
    waited_ns = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/schedstat") as stat:
                waited_ns += int(stat.read().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            pass  # a thread that has ended
    return waited_ns / 1e9


class Program:
    """Its public coroutines are the calls."""

    def __init__(self) -> None:
        self.bus: Any = None
        self.reading: dict[str, tuple[Any, asyncio.Task[None]]] = {}
        self.publishers: dict[str, Any] = {}
        self.load: asyncio.Task[None] | None = None
        self.stopping = False
        self.watching: asyncio.Task[None] | None = None
        self.background: set[asyncio.Task[Any]] = set()
        self.cancelled = self.counted = 0

    async def open(self, log: str | None, settings: dict[str, Any]) -> None:
        self.bus = zbus.open(log, **settings)
        await self.bus.start()

    async def aclose(self) -> float:
        began = time.monotonic()
        await self.bus.aclose()
        return time.monotonic() - began

    async def subscribe(
        self, name: str, keys: list[str], ack_every: int = 0, pause_s: float = 0.0, quiet: bool = False, **options: Any
    ) -> None:
        """Read in the background, noting what comes; every so many events one is acknowledged and that is noted."""
        subscription = self.bus.subscribe(*keys, **options)
        await subscription.__aenter__()
        note(f"start {name}")
        if quiet:
            self.reading[name] = (subscription, asyncio.create_task(self._count(subscription)))
            return
        self.reading[name] = (subscription, asyncio.create_task(self._read(name, subscription, ack_every, pause_s)))

    async def _read(self, name: str, subscription: Any, ack_every: int, pause_s: float) -> None:
        count = 0
        while True:
            try:
                event = await subscription.next()
            except zbus.SubscriberLagged as error:
                note(f"lagged {name} {error.missed}")
                continue
            if event is None:
                return
            count += 1
            if event.key == "@zbus/gap":
                gap = event.decode(dict)
                kind = "open" if gap["open"] else "gap"
                note(f"{kind} {gap['publisher_id']} {gap['first']} {gap['last']}")
                continue
            took_s = (time.time_ns() - event.published_at) / 1e9
            note(f"seen {name} {event.publisher_id} {event.sequence} {event.offset} {event.key} {took_s:.4f}")
            if ack_every and count % ack_every == 0:
                await event.ack()
                note(f"acked {name} {event.offset}")
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _count(self, subscription: Any) -> None:
        """Only count, so that what is measured is not the notes."""
        while await subscription.next() is not None:
            self.counted += 1

    async def count(self) -> int:
        return self.counted

    async def unsubscribe(self, name: str) -> None:
        subscription, task = self.reading.pop(name)
        await subscription.aclose()
        await task

    async def publish(self, key: str, count: int) -> int:
        """Publish so many in a few commits; returns the publisher's id."""
        publisher = self.publishers.get(key)
        if publisher is None:
            publisher = self.publishers[key] = await self.bus.publisher(key)
        first = publisher.sequence
        await publisher.publish_many([b"%d" % (first + n) for n in range(count)])
        note("".join(f"published {publisher.publisher_id} {first + n}\n" for n in range(count)).rstrip("\n"))
        return publisher.publisher_id

    async def start_load(self, key: str, publishers: int, pause_s: float) -> None:
        """Publish on `key/0`, `key/1`, … until it is stopped, noting what was acknowledged."""
        self.stopping = False

        async def run(number: int) -> None:
            publisher = await self.bus.publisher(f"{key}/{number}")
            while not self.stopping:
                sequence = publisher.sequence
                await publisher.publish(b"%d" % sequence)
                note(f"published {publisher.publisher_id} {sequence}")
                await asyncio.sleep(pause_s)

        async def all_of_them() -> None:
            await asyncio.gather(*[run(number) for number in range(publishers)])

        self.load = asyncio.create_task(all_of_them())

    async def stop_load(self) -> None:
        self.stopping = True
        assert self.load is not None
        await self.load

    async def stats(self) -> dict[str, int]:
        return dict(self.bus.stats())

    async def diagnostics(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.bus.diagnostics(), default=str))

    async def head(self) -> int:
        return int(await self.bus.head())

    async def replay(self, *keys: str) -> list[list[int]]:
        return [[event.publisher_id, event.sequence] async for event in self.bus.replay(*keys)]

    async def switch(self, url: str, overlap_s: float) -> None:
        await self.bus.switch_transport(url, overlap_s=overlap_s)

    async def receive_on(self, *transports: str) -> None:
        await self.bus.receive_on(*transports)

    async def watch_loop(self) -> None:
        """From now on, note by how much the loop is late, and what it does meanwhile."""
        self.delays: list[tuple[float, str]] = []
        self.due = time.monotonic() + 0.005
        self.doing = ""
        loop_thread = threading.get_ident()

        async def watch() -> None:
            while True:
                waited_s = waited_for_a_processor_s()
                self.due, self.doing = time.monotonic() + 0.005, ""
                await asyncio.sleep(0.005)
                late = time.monotonic() - self.due
                if late > 0.05:
                    self.delays.append((late - (waited_for_a_processor_s() - waited_s), self.doing))

        def sample() -> None:
            while self.watching is not None and not self.watching.done():
                if not self.doing and time.monotonic() > self.due + 0.05:
                    frame = sys._current_frames().get(loop_thread)
                    self.doing = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
                time.sleep(0.01)

        self.watching = asyncio.create_task(watch())
        threading.Thread(target=sample, name="sampler", daemon=True).start()

    async def loop_delays(self) -> list[tuple[float, str]]:
        """The longest that the loop was late, without what a busy machine cost, and what it did then; it ends."""
        assert self.watching is not None
        self.watching.cancel()
        return sorted(self.delays, reverse=True)[:5]

    async def serve(self, key: str, behaviour: str) -> None:
        @self.bus.serve(key)
        async def answer(request: Any) -> Any:
            note(f"asked {request.payload.decode()}")
            if behaviour == "echo":
                return request.payload
            if behaviour == "fail":
                raise KeyError("no such thing")
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                note("cancelled")
                self.cancelled += 1
                if behaviour == "stubborn":
                    await asyncio.sleep(3600)
                raise

        await node_of(self.bus).network.declare_served()

    async def request(self, key: str, payload: str, timeout: float) -> dict[str, Any]:
        began = time.monotonic()
        note(f"asking {key}")
        try:
            reply = await self.bus.request(key, payload.encode(), timeout=timeout)
            reported: dict[str, Any] = {"reply": reply.payload.decode()}
        except zbus.ZbusError as error:
            reported = {"error": type(error).__name__, "text": str(error)}
        return {**reported, "took_s": time.monotonic() - began}

    async def request_and_cancel(self, key: str, payload: str, after_s: float) -> bool:
        asking = asyncio.create_task(self.bus.request(key, payload.encode(), timeout=30))
        self.background.add(asking)
        await asyncio.sleep(after_s)
        asking.cancel()
        await asyncio.wait([asking])
        return asking.cancelled()


async def main() -> None:
    program = Program()
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    output = os.dup(1)
    os.dup2(2, 1)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: dict[str, Any]) -> None:
        try:
            result = await getattr(program, request["call"])(*request["arguments"], **request["named"])
            reported = {"result": result}
        except BaseException as error:
            reported = {"error": f"{type(error).__name__}: {error}"}
        data = (json.dumps({"id": request["id"], **reported}) + "\n").encode()
        while data:
            data = data[os.write(output, data) :]

    os.write(output, b'{"id": 0, "result": null}\n')
    while line := await stdin.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    os._exit(0)  # the test has ended; nothing may keep this process


if __name__ == "__main__":
    facts = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    asyncio.run(main())
