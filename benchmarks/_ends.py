"""Two child processes, one that publishes and one that receives, and the code that drives them.

    python benchmarks/_ends.py MODULE FUNCTION JSON

runs a function of a benchmark in a fresh interpreter. Both ends run the same turns, each started by the benchmark: a
warm-up, a stream of events to measure the rate, and single events, some time apart, to measure the latency. The clock
is the machine's monotonic clock, which is the same in every process. Both ends stay open until
the benchmark closes their stdin, so closing is not measured.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import monotonic_ns
from types import TracebackType
from typing import Any

from _harness import PAYLOAD, Measurement

WARM_UP = 2000
PACE_S = 0.002  # between single events: long enough that each meets an idle system
WAIT_S = 120.0
QUEUE_EVENTS = 512 * 1024  # the limit of pending messages of nats-py, also used for zbus


@dataclass(frozen=True)
class Plan:
    """The number of streamed events, and of single events."""

    events: int
    singles: int


# In a child process.


class ReceiveCounter:
    """Counts received events. Both sides of a comparison make the same call."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen, self._until = 0, WARM_UP
        self._turn = 0
        self._stamped = False
        self._durations: list[int] = []

    def take(self, payload: bytes) -> bool:
        """Count an event. Returns True once all events were received."""
        self._seen += 1
        if self._stamped:
            self._durations.append(monotonic_ns() - int.from_bytes(payload[:8]))
        return self._seen == self._until and self._next()

    def _next(self) -> bool:
        now = monotonic_ns()
        self._turn += 1
        if self._turn == 1:
            self._until += self._plan.events
            self._cpu = time.process_time()
            report(warm=True)
        elif self._turn == 2:
            self._until += self._plan.singles
            self._stamped = True
            report(end_ns=now, cpu_s=time.process_time() - self._cpu)
        else:
            report(durations_ns=self._durations)
        return self._turn == 3


async def publish_in_turns(
    plan: Plan,
    publish: Callable[[bytes], Awaitable[object]],
    flush: Callable[[], Awaitable[object]] | None = None,
    many: Callable[[Iterable[bytes]], Awaitable[object]] | None = None,
) -> None:
    """Run the turns of a publishing end. `many`, if given, publishes the streamed events in one call."""
    for count in (WARM_UP, plan.events):
        await asyncio.to_thread(wait_for_turn)
        begin, cpu = monotonic_ns(), time.process_time()
        if many is not None:
            await many([PAYLOAD] * count)
        else:
            for _ in range(count):
                await publish(PAYLOAD)
        if flush is not None:
            await flush()
        report(begin_ns=begin, end_ns=monotonic_ns(), cpu_s=time.process_time() - cpu)
    await asyncio.to_thread(wait_for_turn)
    for _ in range(plan.singles):
        await publish(stamped())
        await asyncio.sleep(PACE_S)
    await asyncio.to_thread(wait_for_turn)


def put_in_turns(plan: Plan, put: Callable[[bytes], object]) -> None:
    """Run the turns of a publishing end with a library without an event loop."""
    for count in (WARM_UP, plan.events):
        wait_for_turn()
        begin, cpu = monotonic_ns(), time.process_time()
        for _ in range(count):
            put(PAYLOAD)
        report(begin_ns=begin, end_ns=monotonic_ns(), cpu_s=time.process_time() - cpu)
    wait_for_turn()
    for _ in range(plan.singles):
        put(stamped())
        time.sleep(PACE_S)
    wait_for_turn()


def stamped() -> bytes:
    """Return a payload of the usual size that starts with the current time."""
    return monotonic_ns().to_bytes(8) + PAYLOAD[8:]


def report(**found: Any) -> None:
    """Send a JSON line to the benchmark."""
    print(json.dumps(found), flush=True)


def wait_for_turn() -> None:
    """Wait until the benchmark starts the next turn or ends."""
    sys.stdin.readline()


# In the benchmark.


class End:
    """A child process that sends JSON lines and waits for its turns."""

    def __init__(self, module: str, function: str, arguments: dict[str, Any]) -> None:
        self._name, self._is_own = f"{module}.{function}", True
        self._start([sys.executable, __file__, module, function, json.dumps(arguments)])

    @classmethod
    def command(cls, *arguments: str) -> End:
        """Start another command that prints JSON lines."""
        end = cls.__new__(cls)
        end._name, end._is_own = " ".join(arguments[:2]), False
        end._start(list(arguments))
        return end

    def _start(self, command: list[str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ZBUS_", "DYN_"))}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=clean)
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def receive(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Return its next message. Raises `RuntimeError` with its stderr if there is none in time."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            line = ""
        if not line:
            raise RuntimeError(f"{self._name} sent no further message: {''.join(self._errors)[-2000:] or 'no error'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def go(self) -> None:
        """Start its next turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def __enter__(self) -> End:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()  # ends a child of this module
            if not self._is_own:
                self._process.terminate()
            if kind is None:
                self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)


def measure(
    plan: Plan,
    receiver: tuple[str, str, dict[str, Any]],
    sender: tuple[str, str, dict[str, Any]],
    *between: Callable[[], End],
) -> Measurement:
    """Measure the rate from the first publish to the last received event, and the latency of single events.

    An end is a module, a function in it and its arguments; `between` starts processes between the two, such as a
    bridge, once the receiving end is ready.
    """
    with ExitStack() as stack:
        receiving = stack.enter_context(_end(receiver, plan))
        receiving.receive()
        for start in between:
            stack.enter_context(start()).receive()
        sending = stack.enter_context(_end(sender, plan))
        sending.receive()
        sending.go()
        sending.receive()
        receiving.receive()
        sending.go()
        published, received = sending.receive(), receiving.receive()
        sending.go()
        durations: list[int] = receiving.receive()["durations_ns"]
    per_event = 1e6 / plan.events
    return Measurement(
        plan.events / (received["end_ns"] - published["begin_ns"]) * 1e9,
        durations,
        {
            "publisher_cpu_us": published["cpu_s"] * per_event,
            "subscriber_cpu_us": received["cpu_s"] * per_event,
            "published_per_s": plan.events / (published["end_ns"] - published["begin_ns"]) * 1e9,
        },
    )


def _end(end: tuple[str, str, dict[str, Any]], plan: Plan) -> End:
    module, function, arguments = end
    return End(module, function, {**arguments, **asdict(plan)})


def free_port() -> int:
    """Return a loopback port that was just free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def main() -> None:
    """Run the function named by the arguments."""
    module, function, arguments = sys.argv[1:]
    found = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    if asyncio.iscoroutine(found):
        asyncio.run(found)


if __name__ == "__main__":
    main()
