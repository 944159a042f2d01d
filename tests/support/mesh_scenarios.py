"""What the mesh tests do, at any size: each function is one story, ends with its checks, and raises where one fails."""

from __future__ import annotations

import time
from pathlib import Path

from mesh_support import (
    Mesh,
    Middle,
    Node,
    Wire,
    ZenohRouter,
    check_everything_came,
    check_once_and_in_order,
    mesh_of,
    until,
    until_seen,
)

ACK_EVERY = 7


def subscribe_durably(b: Node) -> None:
    b.call("subscribe", "d", ["shop/**"], durable="d", ack_every=ACK_EVERY)


def read_durably(mesh: Mesh) -> tuple[Node, Node]:
    """A publishes, and B has read its first events under a durable name."""
    a, b = mesh.node("a"), mesh.node("b")
    subscribe_durably(b)
    a.call("publish", "shop/orders", 50)
    until_seen(b, "d", lambda: a.facts.published())
    return a, b


def away_while_the_publisher_publishes(directory: Path, kind: type[Wire], events: int) -> None:
    """B reads durably, is killed, A publishes, B is back."""
    with mesh_of(directory, kind) as mesh:
        a, b = read_durably(mesh)
        until(lambda: any(each.startswith("from/") for each in b.positions()), 10, "the stored position")
        b.kill()
        for _ in range(events // 500):
            a.call("publish", "shop/orders", 250)
            a.call("publish", "shop/audit/x", 250)
        b.start()
        subscribe_durably(b)
        until_seen(b, "d", lambda: a.facts.published(), 30 + events / 500)
        b.facts.check_durable("d")
        check_everything_came(a.facts.published(), b.facts.seen("d"))
        stats = b.call("stats")
        assert stats["events_repaired"] >= events - 1000, stats
        assert stats["gaps_repaired"] >= 1, stats
        assert "gaps_unrepaired" not in stats, stats


def both_sides_restart(directory: Path, kind: type[Wire], events: int) -> None:
    """While B is away, A publishes, is killed, publishes more as a new process, and B comes back."""
    with mesh_of(directory, kind) as mesh:
        a, b = read_durably(mesh)
        b.kill()
        a.call("publish", "shop/orders", events // 2)
        a.kill()
        a.start()
        a.call("publish", "shop/orders", events // 2)
        b.start()
        subscribe_durably(b)
        a.call("publish", "shop/orders", 10)
        until_seen(b, "d", lambda: a.facts.published(), 30 + events / 500)
        b.facts.check_durable("d")


def killed_before_the_first_event(directory: Path, kind: type[Wire], events: int) -> None:
    """The name exists once the subscription is entered; a kill in the same instant does not undo that."""
    with mesh_of(directory, kind) as mesh:
        a, b = mesh.node("a"), mesh.node("b")
        subscribe_durably(b)
        b.kill()
        a.call("publish", "shop/orders", events)
        b.start()
        subscribe_durably(b)
        until_seen(b, "d", lambda: a.facts.published(), 30 + events / 500)
        b.facts.check_durable("d")


def read_by_all_means(b: Node) -> None:
    """One reader with a durable name, one that spills, and one of the reported gaps."""
    subscribe_durably(b)
    b.call("subscribe", "s", ["shop/**"], overflow="spill", queue_events=100)
    b.call("subscribe", "gaps", ["@zbus/gap"])


def check_readers(a: Node, b: Node, wait_s: float, lossy: bool = False) -> None:
    """Nothing acknowledged is lost to either reader, nothing comes twice, the order is kept, no gap is left.

    `lossy`: some of it was certainly lost on the way, so that there were gaps.
    """
    for name in ("d", "s"):
        until_seen(b, name, lambda: a.facts.published(), wait_s)
    time.sleep(0.5)  # what would come twice has a moment to do so
    b.facts.check_durable("d")
    check_once_and_in_order(b.facts.seen("s"))
    check_once_and_in_order(b.facts.seen("d"))
    stats: dict[str, int] = b.call("stats")
    assert not stats.get("gaps_unrepaired"), stats
    assert stats.get("gaps", 0) == stats.get("gaps_repaired", 0), stats
    assert not stats.get("gaps_open"), stats
    assert stats.get("gaps", 0) > 0 or not lossy, stats
    assert not b.facts.of("gap")


def middle_killed_under_load(directory: Path, kind: type[Middle], away_s: float, times: int) -> None:
    """The server or router is killed and replaced while A publishes without a pause."""
    with mesh_of(directory, kind) as mesh:
        a, b = mesh.node("a"), mesh.node("b")
        read_by_all_means(b)
        a.call("start_load", "shop", 3, 0.002)
        until(lambda: len(b.facts.seen("s")) > 50, what="the load")
        for _ in range(times):
            mesh.wire.kill()
            before = sum(map(len, a.facts.published().values()))
            time.sleep(away_s)
            assert sum(map(len, a.facts.published().values())) > before, "publishing stopped with the middle away"
            mesh.wire.revive()
            seen = len(b.facts.seen("s"))
            until(lambda seen=seen: len(b.facts.seen("s")) > seen + 50, what="going on after the outage")
        a.call("stop_load")
        check_readers(a, b, 30, lossy=kind is ZenohRouter)  # without its router Zenoh takes everything, to nowhere


def publisher_killed_and_replaced(directory: Path, kind: type[Wire], times: int) -> None:
    """A publishing process is killed -9 under load, and another one goes on with its log."""
    with mesh_of(directory, kind) as mesh:
        a, b = mesh.node("a"), mesh.node("b")
        read_by_all_means(b)
        for _ in range(times):
            a.call("start_load", "shop", 3, 0.001)
            seen = len(b.facts.seen("s"))
            until(lambda seen=seen: len(b.facts.seen("s")) > seen + 100, what="the load")
            a.kill()
            a.start()
        a.call("publish", "shop/last", 10)
        check_readers(a, b, 30)


def reader_frozen(directory: Path, kind: type[Wire], frozen_s: float) -> None:
    """The receiving process is stopped for a while, under load."""
    with mesh_of(directory, kind) as mesh:
        a, b = mesh.node("a"), mesh.node("b")
        read_by_all_means(b)
        a.call("start_load", "shop", 3, 0.001)
        until(lambda: len(b.facts.seen("s")) > 100, what="the load")
        b.freeze()
        before = sum(map(len, a.facts.published().values()))
        time.sleep(frozen_s)
        assert sum(map(len, a.facts.published().values())) > before + 100 * frozen_s, "the other node slowed this one"
        b.thaw()
        seen = len(b.facts.seen("s"))
        until(lambda: len(b.facts.seen("s")) > seen + 50, what="going on after the freeze")
        a.call("stop_load")
        check_readers(a, b, 30 + frozen_s)


def publisher_frozen(directory: Path, kind: type[Wire], frozen_s: float) -> None:
    """The publishing process is stopped for a while, under load; a second publisher is not disturbed."""
    with mesh_of(directory, kind) as mesh:
        a, b, c = mesh.node("a"), mesh.node("b"), mesh.node("c")
        read_by_all_means(b)
        a.call("start_load", "shop", 3, 0.001)
        c.call("start_load", "shop/other", 1, 0.005)
        until(lambda: len(b.facts.seen("s")) > 100, what="the load")
        a.freeze()
        time.sleep(0.5)
        others = len(b.facts.seen("s"))
        time.sleep(frozen_s - 0.5)
        assert len(b.facts.seen("s")) > others + 20 * (frozen_s - 0.5), "the frozen node stopped another one"
        a.thaw()
        seen = len(b.facts.seen("s"))
        until(lambda: len(b.facts.seen("s")) > seen + 200, what="going on after the freeze")
        a.call("stop_load")
        c.call("stop_load")
        check_readers(a, b, 30)
        check_everything_came(c.facts.published(), b.facts.seen("d"))


def middle_frozen(directory: Path, kind: type[Middle], frozen_s: float) -> None:
    """The server or router is stopped for a while: connections stay open, and nothing moves."""
    with mesh_of(directory, kind) as mesh:
        a, b = mesh.node("a"), mesh.node("b")
        read_by_all_means(b)
        a.call("start_load", "shop", 3, 0.002)
        until(lambda: len(b.facts.seen("s")) > 50, what="the load")
        mesh.wire.freeze()
        time.sleep(frozen_s)
        mesh.wire.thaw()
        seen = len(b.facts.seen("s"))
        until(lambda: len(b.facts.seen("s")) > seen + 50, what="going on after the freeze")
        a.call("stop_load")
        check_readers(a, b, 30)


def loop_beside_a_catch_up(directory: Path, kind: type[Wire], events: int) -> None:
    """The loop of B is never late by over 100 ms while it catches up with what A published meanwhile."""
    with mesh_of(directory, kind) as mesh:
        a, b = mesh.node("a"), mesh.node("b")
        b.call("subscribe", "d", ["shop/**"], durable="d")
        a.call("publish", "shop/orders", 10)
        until_seen(b, "d", lambda: a.facts.published())
        b.kill()
        for _ in range(events // 5_000):
            a.call("publish", "shop/orders", 5_000)
        b.start()
        b.call("watch_loop")
        b.call("subscribe", "d", ["shop/**"], durable="d", quiet=True)
        until(lambda: b.call("count") >= events, 30 + events / 500, "the catch-up")
        late = b.call("loop_delays")
        reported = "\n".join(f"{delay_s * 1000:.0f} ms\n{doing}" for delay_s, doing in late)
        assert not late or late[0][0] <= 0.1, f"the loop was late:\n{reported}"


def new_processes_are_found(directory: Path, kind: type[Wire], processes: int, logged: bool) -> None:
    """From the publishing of its first event to its arrival in another process, 99 of 100 take a second at most."""
    with mesh_of(directory, kind) as mesh:
        reader = mesh.node("reader", log=False)
        reader.call("subscribe", "all", ["shop/**"])
        took_s: list[float] = []
        for number in range(processes):
            new = mesh.node(f"new-{number}", log=logged)
            publisher = new.call("publish", "shop/orders", 1)
            until(lambda publisher=publisher: (publisher, 0) in reader.facts.seen("all"), 20, "the first event")
            took_s.append(next(float(line[5]) for line in reader.facts.of("seen") if int(line[1]) == publisher))
            new.stop()
        took_s.sort()
        assert took_s[int(0.99 * processes)] <= 1.0, [round(each, 3) for each in took_s]
