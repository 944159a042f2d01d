"""The other process of the contract suite: it opens nodes and does what it reads from stdin, a line of JSON a call.

    {"id": 1, "node": 7, "call": "open", "arguments": [{"mode": "peer", …}, "zenoh://"]}
    {"id": 2, "node": 7, "call": "send", "arguments": [[["a/b", {"base64": "eA=="}]]]}

Each call is answered by `{"id": …, "result": …}` or `{"id": …, "error": type, "text": …}`, in the order in which they
end: a call that waits holds up no other. The process ends when stdin does.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CALLS_AT_ONCE = 16


def pack(value: Any) -> Any:
    """JSON for a value that may hold bytes."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {name: pack(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [pack(each) for each in value]
    return value


def unpack(value: Any) -> Any:
    """What `pack` packed, with lists for tuples."""
    if isinstance(value, dict):
        if value.keys() == {"base64"}:
            return base64.b64decode(value["base64"])
        return {name: unpack(each) for name, each in value.items()}
    return [unpack(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    from contract_node import Node, zbus_threads

    from zbus.config import BusConfig
    from zbus.plugins import open_fabric

    nodes: dict[int, Node] = {}
    lock = threading.Lock()
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints does not disturb the answers

    def perform(request: dict[str, Any]) -> Any:
        call, arguments = request["call"], unpack(request["arguments"])
        if call == "open":
            nodes[request["node"]] = Node(open_fabric(BusConfig(**arguments[0]), arguments[1]))
            return None
        if call == "threads":
            return zbus_threads()
        if call == "close":
            return nodes[request["node"]].close()
        return getattr(nodes[request["node"]], call)(*arguments)

    def answer(request: dict[str, Any]) -> None:
        try:
            reported = {"result": pack(perform(request))}
        except BaseException as error:
            reported = {"error": type(error).__name__, "text": str(error), "fields": pack(list(map(str, error.args)))}
        with lock:
            output.write(json.dumps({"id": request["id"], **reported}) + "\n")
            output.flush()

    with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="contract-call") as calls:
        for line in sys.stdin:
            calls.submit(answer, json.loads(line))
        os._exit(0)  # the test has ended; a session that is still open must not keep this process


if __name__ == "__main__":
    main()
