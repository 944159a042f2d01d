"""Commands of `zbus` and programs that use it, each in a process of its own that need not import everything first.

Run as a script, this imports the packages once and then forks for each call that comes to its socket: a call brings its
arguments, folder, environment, stdin, stdout and stderr. What signals and closing pipes do is tested with
`python -m zbus`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping
from pathlib import Path

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}
PACKAGES = ("zbus", "zbus_log", "zbus_zenoh")
LIBRARIES = ("apsw", "sqlalchemy.dialects.sqlite.base", "rich.progress", "rich.table")
TRACING = "zbus.observe.tracing"  # what it imports changes what a program sees: it is left to the program
CALL_BYTES = 1 << 16

# `zbus` for a shell: it starts in a hundredth of a second, and what it hands over runs with its streams.
LAUNCHER = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as there:
    there.connect({address!r})
    call = json.dumps([sys.argv[1:], None, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(there, [len(call).to_bytes(4)], [0, 1, 2])
    there.sendall(call)
    sys.exit(int(there.recv(16) or 70))
"""


class Commands:
    """`run("pub", "a/b", stdin=b"x")` is what `zbus pub a/b` did. The server starts with the first call.

    `packages` are imported before the first call, with all their modules.
    """

    def __init__(self, packages: Iterable[str] = PACKAGES) -> None:
        self._packages = list(packages)
        self._server: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def __call__(
        self, *arguments: object, stdin: bytes = b"", **environment: str
    ) -> subprocess.CompletedProcess[bytes]:
        return self._call(list(map(str, arguments)), None, Path.cwd(), ENVIRONMENT | environment, stdin)

    def program(self, code: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
        """What `python -c code` does in that folder and with that environment."""
        return self._call([], code, folder, environment, b"")

    @property
    def path(self) -> str:
        """A folder for PATH, whose `zbus` runs here."""
        self._start()
        return str(self._folder)

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=10)
            shutil.rmtree(self._folder)
            self._server = None

    def _start(self) -> None:
        if self._server is not None:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="zbus-"))  # short: a socket's address has 108 bytes
        launcher = self._folder / "zbus"
        launcher.write_text(LAUNCHER.format(python=sys.executable, address=self._address))
        launcher.chmod(0o755)
        command = [sys.executable, __file__, self._address, *self._packages]
        self._server = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n", "the server of commands did not start"

    @property
    def _address(self) -> str:
        return str(self._folder / "socket")

    def _call(
        self, arguments: list[str], code: str | None, folder: Path, environment: Mapping[str, str], stdin: bytes
    ) -> subprocess.CompletedProcess[bytes]:
        self._start()
        call = json.dumps([arguments, code, str(folder), dict(environment)]).encode()
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            given.write(stdin)
            given.seek(0)
            with socket.socket(socket.AF_UNIX) as there:
                there.connect(self._address)
                socket.send_fds(there, [len(call).to_bytes(4)], [each.fileno() for each in (given, output, errors)])
                there.sendall(call)
                ended = there.recv(16)
            assert ended, "the server of commands is gone"
            texts = [os.pread(each.fileno(), 1 << 26, 0) for each in (output, errors)]
        return subprocess.CompletedProcess(arguments, int(ended), *texts)


def serve(address: str, packages: list[str]) -> int:
    """Fork for each call until stdin is closed. Returns in each forked process too, with the exit code of the call."""
    _import(packages)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while listening in select.select([listening, sys.stdin], [], [])[0]:
            there, _ = listening.accept()
            with there:
                if not os.fork():
                    return _answer(there)
    return 0


def _import(packages: list[str]) -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in packages:
        package = importlib.import_module(name)
        for each in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not each.name.endswith("__main__") and each.name != TRACING:
                importlib.import_module(each.name)
    importlib.import_module("zbus.cli.app").run(["pub"])  # typer imports more when it runs; the error is not shown
    assert "opentelemetry" not in sys.modules, "something else imports it"
    threads = os.listdir("/proc/self/task") if os.path.exists("/proc") else [""]
    assert len(threads) == 1, "a fork loses threads"
    gc.freeze()


def _answer(there: socket.socket) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(there, 4, 3)
    text = b""
    while len(text) < int.from_bytes(size):
        text += there.recv(CALL_BYTES)
    child = os.fork()
    if child:
        there.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    there.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    arguments, code, folder, environment = json.loads(text)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if code is None:
        sys.argv = ["zbus", *arguments]
        found: int = importlib.import_module("zbus.cli.app").run(arguments)
        return found
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), program.__dict__)
    return 0


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    sys.exit(serve(sys.argv[1], sys.argv[2:]))
