"""Closing while the network, other nodes or handlers do not move. Stories at any transport."""

from __future__ import annotations

from pathlib import Path

from mesh_support import Mesh, Middle, Node, mesh_of, until, until_still

TIMEOUT_S = 2.0


def closes_in_time(*nodes: Node) -> None:
    """All of them, at the same time."""
    closing = [(node, node.begin("aclose")) for node in nodes]
    took = {node.name: node.result(number, TIMEOUT_S + 20.0) for node, number in closing}
    assert all(each <= TIMEOUT_S + 1.0 for each in took.values()), took


def middle_gone(directory: Path, kind: type[Middle], how: str) -> None:
    with mesh_of(directory, kind) as mesh:
        a, b = mesh.node("a", close_timeout_s=TIMEOUT_S), mesh.node("b", close_timeout_s=TIMEOUT_S)
        without = mesh.node("without", log=False, close_timeout_s=TIMEOUT_S)
        for node in (b, without):
            node.call("subscribe", "s", ["shop/**"])
        a.call("start_load", "shop", 3, 0.001)
        without.call("start_load", "shop", 3, 0.001)
        until(lambda: len(b.facts.seen("s")) > 100, what="the load")
        mesh.wire.freeze() if how == "frozen" else mesh.wire.kill()
        for node in (a, without):
            node.call("publish", "shop/much", 20_000)
        for node in (a, without):
            node.call("stop_load")
        for node in (a, without):  # what could still go has gone, and the rest is stuck
            until_still(lambda node=node: [link["sent"] for link in node.call("diagnostics")["links"]])
        closes_in_time(a, b, without)


def receiver_frozen(mesh: Mesh) -> None:
    a, b = mesh.node("a", close_timeout_s=TIMEOUT_S), mesh.node("b")
    without = mesh.node("without", log=False, close_timeout_s=TIMEOUT_S)
    b.call("subscribe", "s", ["shop/**"])
    a.call("start_load", "shop", 3, 0.001)
    without.call("start_load", "shop", 3, 0.001)
    until(lambda: len(b.facts.seen("s")) > 100, what="the load")
    for node in (a, without):
        node.call("stop_load")
    b.freeze()
    for node in (a, without):
        node.call("publish", "shop/much", 60_000)
    closes_in_time(a, without)


def repair_under_way(mesh: Mesh) -> None:
    a, b = mesh.node("a"), mesh.node("b", close_timeout_s=TIMEOUT_S)
    c = mesh.node("c", close_timeout_s=TIMEOUT_S)
    b.call("subscribe", "d", ["shop/**"], durable="d")
    a.call("publish", "shop/orders", 10)
    until(lambda: len(b.facts.seen("d")) == 10, what="the first events")
    b.call("aclose")
    b.kill()
    for _ in range(3):
        a.call("publish", "shop/orders", 10_000)
    b.start()
    for node in (b, c):
        node.call("subscribe", "d2", ["shop/**"], durable="d", start="beginning")
    until(lambda: len(b.facts.seen("d2")) > 10, what="the repair")
    a.freeze()
    until_still(lambda: [len(node.facts.seen("d2")) for node in (b, c)])  # no node replies any more
    closes_in_time(b, c)


def handler_hangs(mesh: Mesh, behaviour: str) -> None:
    server, asker = mesh.node("server", close_timeout_s=TIMEOUT_S), mesh.node("asker", close_timeout_s=TIMEOUT_S)
    server.call("serve", "calc/hang", behaviour)
    server.call("serve", "calc/echo", "echo")
    until(lambda: "reply" in asker.call("request", "calc/echo", "there?", 2.0), 15, "the server's answers")
    asking = asker.begin("request", "calc/hang", "x", 20.0)
    until(lambda: ["x"] in server.facts.of("asked"), 5, "the request's arrival")

    closes_in_time(server)

    reported = asker.result(asking)
    assert reported["error"] in ("TransportError", "RequestTimeout"), reported
    closes_in_time(asker)


def request_in_flight(mesh: Mesh) -> None:
    server, asker = mesh.node("server"), mesh.node("asker", close_timeout_s=TIMEOUT_S)
    server.call("serve", "calc/echo", "echo")
    until(lambda: "reply" in asker.call("request", "calc/echo", "there?", 2.0), 15, "the server's answers")
    server.freeze()
    asked = len(asker.facts.of("asking"))
    for _ in range(6):
        asker.begin("request", "calc/echo", "x", 60.0)
    until(lambda: len(asker.facts.of("asking")) == asked + 6, 10, "the requests")
    closes_in_time(asker)
