"""`GET /metrics` for Prometheus, `GET /healthz` for supervisors, and responses to wrong paths."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from inside import node_of
from web_support import error_of, web

import zbus


def check(text: str) -> None:
    """Check the text with promtool, which is in Debian's package `prometheus`."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: `make browser`, or sudo apt-get install -y prometheus"
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


async def test_promtool_accepts_every_metric(log_path: Path) -> None:
    async with (
        web(log_path) as server,
        server.stream("?key=a/*"),
        server.bus.subscribe("a/b", durable="billing") as sub,
    ):
        assert await server.client.get("/metrics")
        for _ in range(3):
            await server.client.post("/events/a/b", content=b"x")
        await server.client.post("/events/a/*", content=b"x")
        await server.client.get("/nothing/here")
        assert (await sub.next()) is not None
        cache = server.bus.cache(name="todos")
        response = await server.client.get("/metrics")
        await cache.aclose()
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    check(response.text)
    lines = response.text.splitlines()
    for line in (
        "zbus_events_published_total 3.0",
        "zbus_log_head 3.0",
        "zbus_web_streams 1.0",
        'zbus_web_requests_total{route="events",status="201"} 3.0',
        'zbus_web_requests_total{route="events",status="400"} 1.0',
        'zbus_web_requests_total{route="other",status="404"} 1.0',
        'zbus_web_requests_total{route="metrics",status="200"} 1.0',
        'zbus_web_rejected_total{reason="invalid_key"} 1.0',
        'zbus_web_rejected_total{reason="not_found"} 1.0',
    ):
        assert line in lines
    for name in (
        "zbus_events_delivered_total",
        "zbus_events_dropped_total",
        "zbus_events_redelivered_total",
        "zbus_gaps_total",
        "zbus_gaps_repaired_total",
        "zbus_subscription_queue_events",
        "zbus_subscriptions",
        "zbus_commit_duration_seconds",
        "zbus_delivery_latency_seconds",
        "zbus_log_bytes",
        "zbus_cursor_lag_events",
        "zbus_transport_sent_total",
    ):
        assert any(line.startswith(f"# TYPE {name} ") for line in lines), name
    assert "a/b" not in response.text  # Keys are never labels.


async def test_label_values_stay_bounded_for_any_request(log_path: Path) -> None:
    async with web(log_path) as server:
        for number in range(30):
            await server.client.get(f"/made-up-{number}")
            await server.client.post(f"/events/k/{number}", content=b"")
        text = (await server.client.get("/metrics")).text
    assert sum(line.startswith("zbus_web_requests_total{") for line in text.splitlines()) == 2
    assert "made-up" not in text


async def test_healthz_reports_the_head_and_that_the_bus_is_open(log_path: Path) -> None:
    async with web(log_path) as server:
        assert (await server.client.get("/healthz")).json() == {"status": "ok", "head": 0}
        await server.publish("a", b"1", b"2")
        assert (await server.client.get("/healthz")).json() == {"status": "ok", "head": 2}
        await server.bus.aclose()
        response = await server.client.get("/healthz")
        assert (response.status_code, error_of(response.content)[0]) == (503, "bus_closed")


async def test_a_wrong_path_or_method_is_rejected_as_json(log_path: Path) -> None:
    async with web(log_path) as server:
        for method, path, status, code in (
            ("GET", "/nothing", 404, "not_found"),
            ("DELETE", "/events", 405, "method_not_allowed"),
            ("PUT", "/events/a", 405, "method_not_allowed"),
            ("POST", "/log", 405, "method_not_allowed"),
        ):
            response = await server.client.request(method, path)
            assert (response.status_code, error_of(response.content)[0]) == (status, code)


async def test_the_response_to_a_bug_has_no_details(log_path: Path) -> None:
    async with web(log_path) as server:
        node_of(server.bus).log.low_water = lambda: 1 / 0  # type: ignore[method-assign,union-attr]
        response = await server.client.get("/log")
        assert (response.status_code, error_of(response.content)[0]) == (500, "internal_error")
        assert "division" not in response.text
        assert (await server.client.get("/healthz")).status_code == 200


def test_every_error_of_zbus_has_a_response() -> None:
    from zbus_web.http.http_errors import to_http_error

    kinds = [each for each in vars(zbus).values() if isinstance(each, type) and issubclass(each, zbus.ZbusError)]
    assert len(kinds) > 20
    for kind in kinds:
        made = to_http_error(_made(kind))
        assert 400 <= made.status < 600
        assert made.code
        assert made.state
        assert (made.code == "failed") == (kind in (zbus.ZbusError, *_OTHERS))


_OTHERS = tuple(
    each
    for each in vars(zbus).values()
    if isinstance(each, type) and issubclass(each, (zbus.RequestError, zbus.SubscriberLagged))
)


def _made(kind: type[zbus.ZbusError]) -> zbus.ZbusError:
    """Return an error of this class without its fields."""
    return type(kind.__name__, (kind,), {"__init__": lambda self: None, "__str__": lambda self: "why"})()
