"""Commands of `zbus`, each in a process of its own, that do not take a second to import everything.

Run as a script, this imports the command line once and then forks for each call that it reads from stdin. Tests
load `Commands` with `runpy`, as tests are no package. What ends differently in a forked process (signals, pipes that
close, the interpreter's own end) is tested with `python -m zbus`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}


class Commands:
    """`run("pub", "a/b", stdin=b"x")` is what `zbus pub a/b` did. Commands run one after the other."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def __call__(
        self, *arguments: object, stdin: bytes = b"", **environment: str
    ) -> subprocess.CompletedProcess[bytes]:
        if self._server is None:
            command = [sys.executable, __file__]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._server = subprocess.Popen(command, env=ENVIRONMENT, **pipes)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        call = [list(map(str, arguments)), base64.b64encode(stdin).decode(), environment]
        self._server.stdin.write(json.dumps(call).encode() + b"\n")
        self._server.stdin.flush()
        code, *texts = json.loads(self._server.stdout.readline())
        return subprocess.CompletedProcess(call[0], code, *map(base64.b64decode, texts))

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=10)


def serve() -> None:
    import zbus_log.cli  # noqa: F401
    from zbus import config, plugins  # noqa: F401
    from zbus.cli import app
    from zbus_zenoh import fabric as zenoh_fabric  # noqa: F401

    app.run(["pub"])  # typer imports more when it runs; the error is not ours to show
    for line in sys.stdin:
        arguments, text, environment = json.loads(line)
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            given.write(base64.b64decode(text))
            given.seek(0)
            child = os.fork()
            if not child:
                for number, file in enumerate((given, output, errors)):
                    os.dup2(file.fileno(), number)
                os.environ.update(environment)
                code = app.run(arguments)
                sys.stdout.flush()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [base64.b64encode(os.pread(file.fileno(), 1 << 26, 0)).decode() for file in (output, errors)]
        print(json.dumps([code, *texts]), flush=True)


if __name__ == "__main__":
    serve()
