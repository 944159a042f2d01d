"""Moving from one transport to another under load. Stories at any pair of transports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mesh_support import (
    Mesh,
    Nats,
    Node,
    Wire,
    ZenohRouter,
    Zmq,
    check_everything_came,
    check_once_and_in_order,
    mesh_of,
    until,
    until_seen,
)

MOVES: list[tuple[type[Wire], type[Wire]]] = [(ZenohRouter, Nats), (Nats, Zmq), (Zmq, ZenohRouter)]


@contextmanager
def old_and_new_mesh(directory: Path, old: type[Wire], new: type[Wire]) -> Iterator[tuple[Mesh, Wire]]:
    """Nodes start on the first transport; the second one is there too."""
    with ExitStack() as stack:
        other = stack.enter_context(mesh_of(directory / "new", new))
        yield stack.enter_context(mesh_of(directory / "old", old)), other.wire


def read_all(b: Node) -> None:
    b.call("subscribe", "plain", ["shop/**"], queue_events=100_000)
    b.call("subscribe", "spill", ["shop/**"], overflow="spill")
    b.call("subscribe", "durable", ["shop/**"], durable="d")


def check_all(a: Node, b: Node) -> None:
    for name in ("plain", "spill", "durable"):
        until_seen(b, name, lambda: a.facts.published(), 20)
    time.sleep(0.5)
    for name in ("plain", "spill", "durable"):
        check_once_and_in_order(b.facts.seen(name))
        check_everything_came(a.facts.published(), b.facts.seen(name))
    stats = b.call("stats")
    assert not stats.get("gaps_unrepaired"), stats


def both_switch(mesh: Mesh, new: Wire, first: str) -> None:
    a, b = mesh.node("a"), mesh.node("b")
    read_all(b)
    a.call("start_load", "shop", 3, 0.001)
    until(lambda: len(b.facts.seen("spill")) > 100, what="the load")
    one, other = (a, b) if first == "publisher-first" else (b, a)
    one.call("switch", new.url, 0.3)
    seen, published = len(b.facts.seen("spill")), sum(map(len, a.facts.published().values()))
    until(lambda: sum(map(len, a.facts.published().values())) > published + 100, what="publishing between the moves")
    other.call("switch", new.url, 0.3)
    until(lambda: len(b.facts.seen("spill")) > seen + 100, what="going on over the new transport")
    a.call("stop_load")
    check_all(a, b)
    transports = [link["transport"] for link in b.call("diagnostics")["links"]]
    assert len(transports) == 1
    assert transports[0].startswith(new.url.partition("://")[0])


def forth_and_back(mesh: Mesh, new: Wire) -> None:
    old = mesh.wire
    both = [old.url, new.url]
    a = mesh.node("a", transports=both)
    b = mesh.node("b", transports=both, receive_on=[old.url.partition("?")[0]])
    read_all(b)
    a.call("start_load", "shop", 3, 0.001)
    until(lambda: len(b.facts.seen("spill")) > 100, what="the load")
    for url in (new.url, old.url, new.url, old.url):
        b.call("receive_on", url.partition("?")[0])
        seen = len(b.facts.seen("spill"))
        until(lambda seen=seen: len(b.facts.seen("spill")) > seen + 100, what="going on")
    b.call("receive_on")
    seen = len(b.facts.seen("spill"))
    until(lambda: len(b.facts.seen("spill")) > seen + 100, what="going on over both")
    a.call("stop_load")
    check_all(a, b)
    assert b.call("stats")["duplicates_received"] > 0  # both brought them
