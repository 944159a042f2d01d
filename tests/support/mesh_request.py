"""Questions from node to node, and how they end. Stories at any transport."""

from __future__ import annotations

import time

from mesh_support import Mesh, until


def requests_and_their_ends(mesh: Mesh) -> None:
    server, asker = mesh.node("server"), mesh.node("asker", log=False)
    for key, behaviour in (("calc/echo", "echo"), ("calc/fail", "fail"), ("calc/hang", "hang")):
        server.call("serve", key, behaviour)
    until(lambda: "reply" in asker.call("request", "calc/echo", "there?", 2.0), 15, "the server's answers")

    assert asker.call("request", "calc/echo", "once", 5.0)["reply"] == "once"
    failed = asker.call("request", "calc/fail", "x", 5.0)
    assert failed["error"] == "HandlerFailed"
    assert "KeyError" in failed["text"]
    assert "no such thing" in failed["text"]
    no_responders = asker.call("request", "calc/none", "x", 5.0)
    assert no_responders["error"] == "NoResponders"
    assert no_responders["took_s"] < 2.0
    slow = asker.call("request", "calc/hang", "too slow", 0.7)
    assert slow["error"] == "RequestTimeout"
    assert 0.6 < slow["took_s"] < 5.0  # the handler would never have answered
    until(lambda: len(server.facts.of("cancelled")) == 1, 5, "the handler's cancellation after the asker's time")
    assert asker.call("request_and_cancel", "calc/hang", "left alone", 0.5) is True
    until(lambda: len(server.facts.of("cancelled")) == 2, 5, "the handler's cancellation")
    asked = [line[0] for line in server.facts.of("asked")]
    assert asked.count("once") == 1, "a request was handled more than once"
    assert asker.call("request", "calc/echo", "still", 5.0)["reply"] == "still"


def server_killed_in_the_middle(mesh: Mesh) -> None:
    server, asker = mesh.node("server"), mesh.node("asker", log=False)
    server.call("serve", "calc/hang", "hang")
    server.call("serve", "calc/echo", "echo")
    until(lambda: "reply" in asker.call("request", "calc/echo", "there?", 2.0), 15, "the server's answers")

    asking = asker.begin("request", "calc/hang", "never answered", 3.0)
    until(lambda: ["never", "answered"] in server.facts.of("asked"), 5, "the request's arrival")
    server.kill()
    reported = asker.result(asking)

    assert reported["error"] in ("TransportError", "RequestTimeout"), reported  # never NoResponders
    assert reported["took_s"] < 4.0
    server.start()
    server.call("serve", "calc/echo", "echo")
    until(
        lambda: asker.call("request", "calc/echo", "again", 2.0).get("reply") == "again", 15, "the successor's answer"
    )


def asker_killed_in_the_middle(mesh: Mesh) -> None:
    server, asker, other = mesh.node("server"), mesh.node("asker", log=False), mesh.node("other", log=False)
    server.call("serve", "calc/hang", "hang")
    server.call("serve", "calc/echo", "echo")
    until(lambda: "reply" in asker.call("request", "calc/echo", "there?", 2.0), 15, "the server's answers")

    for _ in range(8):  # more than there are threads for answers
        asker.begin("request", "calc/hang", "gone", 30.0)
    until(lambda: len(server.facts.of("asked")) >= 9, 5, "the requests' arrival")
    asker.kill()

    until(lambda: other.call("request", "calc/echo", "me", 2.0).get("reply") == "me", 10, "an answer for the other")
    began = time.monotonic()
    server.call("aclose", wait_s=10)
    assert time.monotonic() - began < 6.0
