"""A forked process has neither the lock nor the log of its parent: it cannot use them, and does not keep them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Opens a bus, forks, and lets the child run `child()`, which returns what it found. Then the parent publishes again.
PROGRAM = """
import asyncio, json, os, signal, sys, time, zbus, zbus_log
from zbus.ports.log import Row

path = sys.argv[1]

def error_of(call):
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def run(coroutine):
    return error_of(lambda: asyncio.run(coroutine))

async def main():
    async with zbus.open(path) as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish(b"1")
        subscription = bus.subscribe("a/**", durable="d", start="beginning")
        event = await anext(subscription)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.write(write, json.dumps(child(bus, publisher, subscription, event)).encode() + b"\\n")
                code = 0
            finally:
                end(code)
        os.close(write)
        print(await asyncio.to_thread(read_line, read), flush=True, end="")
        after(pid)
        found = [int(await publisher.publish(b"2")), [e.payload.decode() async for e in bus.replay()]]
        print(json.dumps(found), flush=True)
        await subscription.aclose()

def read_line(read):
    with os.fdopen(read) as file:
        return file.readline()  # not to its end: another process may have the pipe open

def end(code):
    os._exit(code)

def after(pid):
    assert os.waitpid(pid, 0)[1] == 0
"""

USES = """
def child(bus, publisher, subscription, event):
    log = bus._node.log
    found = {}
    # The loop of the parent is the running one in this frame, so another thread runs these.
    import threading
    def work():
        found["publish"] = run(publisher.publish(b"child"))
        found["publish_many"] = run(publisher.publish_many([b"child"]))
        found["put"] = run(bus.put(zbus.Event(7, 0, 1, "a/b", b"child")))
        found["session"] = run(bus.session("s").publish("a/b", b"child"))
        found["subscribe"] = error_of(lambda: bus.subscribe("a/**"))
        found["ack"] = run(acknowledge(event))
        found["read"] = run(subscription.next())
        found["head"] = run(bus.head())
        results = []
        log.append([Row(9, 0, 1, "a/b", b"child")], results.append, None)
        found["append"] = f"{type(results[0].outcome).__name__}: {results[0].outcome.error}"
        found["log.head"] = error_of(log.head)
        found["cursors"] = error_of(log.cursors.list)
        found["reopen"] = error_of(lambda: zbus_log.open_log(zbus.BusConfig(log=path, read_only=True)))
        found["aclose"] = run(bus.aclose())
        found["close"] = error_of(lambda: log.close(1.0))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    found["alive"] = thread.is_alive()
    return found

async def acknowledge(event):
    await event.ack()
"""

LIVES_ON = """
def child(bus, publisher, subscription, event):
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    return "forked"
"""

ENDS_NORMALLY = """
def child(bus, publisher, subscription, event):
    return "ends"

def end(code):
    # Not sys.exit, which would close the event loop that is shared with the parent.
    import atexit, gc
    atexit._run_exitfuncs()
    gc.collect()
    os._exit(code)
"""


def run(path: Path | str, *parts: str) -> tuple[Any, Any]:
    code = "\n".join([PROGRAM, *parts, "asyncio.run(main())"])
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    return json.loads(lines[0]), json.loads(lines[-1])


def test_every_use_in_a_forked_process_is_an_error_and_stores_nothing(tmp_path: Path) -> None:
    found, parent = run(tmp_path / "app.db", USES)

    assert parent == [2, ["1", "2"]]
    assert found.pop("alive") is False
    assert found.pop("aclose") == found.pop("close") == "None"
    for name in ("publish", "publish_many", "put", "session", "subscribe", "head"):
        assert found.pop(name).startswith("BusClosed: cannot "), name
    assert found.pop("append").startswith("Refused: ")
    for name in ("log.head", "cursors", "reopen"):
        assert "when it forked this process" in found.pop(name), name
    assert found.pop("ack").startswith("WrongLoop: cannot acknowledge")
    assert found.pop("read").startswith("WrongLoop: cannot read")
    assert found == {}


def test_the_error_names_the_process_that_has_the_bus(tmp_path: Path) -> None:
    found, _ = run(tmp_path / "app.db", USES)

    assert "is a process that was forked from it" in found["publish"]
    assert "forked" in found["append"]


@pytest.mark.parametrize("log", ["app.db", "memory"])
def test_a_forked_process_that_ends_normally_leaves_the_log_to_its_parent(tmp_path: Path, log: str) -> None:
    found, parent = run(log if log == "memory" else tmp_path / log, ENDS_NORMALLY)

    assert found == "ends"
    assert parent == [2, ["1", "2"]]


def test_a_log_can_be_owned_again_while_a_forked_process_of_its_dead_owner_lives(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    kill = "import signal\ndef after(pid):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    code = "\n".join([PROGRAM, LIVES_ON, kill, "asyncio.run(main())"])
    again = "import sys, zbus_log, zbus; log = zbus_log.open_log(zbus.BusConfig(log=sys.argv[1])); print(log.head())"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as owner:
        try:
            assert owner.stdout is not None
            assert json.loads(owner.stdout.readline()) == "forked"
            owner.wait(20)
            done = subprocess.run([sys.executable, "-c", again, str(path)], capture_output=True, text=True, timeout=30)
        finally:
            os.killpg(owner.pid, 9)

    assert done.stdout.strip() == "1", done.stderr
