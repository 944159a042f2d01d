"""`zbus serve`: kills and restarts, shutdown, invalid arguments, and the demo."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from web_support import DEADLINE_S, Served, SseClient, error_of, web

import zbus
from zbus.cli.app import run
from zbus.config import load_config


@pytest.fixture
def rejected(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run `zbus serve` with invalid arguments in this process. Return the line that it prints."""
    for name in [name for name in os.environ if name.startswith("ZBUS_")]:
        monkeypatch.delenv(name)

    def call(*arguments: object) -> str:
        assert run(["serve", *map(str, arguments)]) in (1, 2)
        output = capfd.readouterr()
        assert output.out == ""
        assert len(output.err.splitlines()) == 1
        return output.err

    return call


async def test_a_client_that_reconnects_across_kills_receives_every_event_once_in_order(
    log_path: Path,
) -> None:
    kills, per_life = 2, 60
    acknowledged: list[int] = []
    seen: list[int] = []
    port = 0
    last: int | None = None

    async def post(url: str) -> None:
        """Publish until the server is killed. Unacknowledged events are sent again with the same idempotency key."""
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
            while True:
                number = len(acknowledged)
                headers = {"idempotency-key": f"n-{number}"}
                try:
                    response = await client.post("/events/a/b", content=b"%d" % number, headers=headers)
                except httpx.TransportError:
                    return
                assert response.status_code in (200, 201)
                acknowledged.append(response.json()["offset"])

    async def read(url: str, until: int) -> None:
        nonlocal last
        headers = {} if last is None else {"last_event_id": str(last)}
        async with SseClient(url, "/events?key=a/*&from=beginning", headers) as stream:
            while len(seen) < until:
                seen.append(int((await stream.event())["payload"]))
                last = stream.last_id

    for life in range(kills + 1):
        with Served(log_path, "--port", port) as served:
            port = served.port
            posting = asyncio.create_task(post(served.url))
            await read(served.url, (life + 1) * per_life)
            served.kill()  # during publishing and reading
            await posting
    with Served(log_path, "--port", port) as served:
        # An event may be stored but not acknowledged; the log detects the repeated request.
        async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S) as client:
            number = len(acknowledged)
            headers = {"idempotency-key": f"n-{number}"}
            response = await client.post("/events/a/b", content=b"%d" % number, headers=headers)
            acknowledged.append(response.json()["offset"])
        await read(served.url, len(acknowledged))
    assert seen == list(range(len(acknowledged)))
    assert acknowledged == sorted(set(acknowledged))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_server_in_time_and_ends_its_streams_with_a_reason(
    log_path: Path, number: int
) -> None:
    with Served(log_path, "--port", 0) as served:
        async with SseClient(served.url, "/events", {}) as stream, SseClient(served.url, "/events?key=b", {}):
            async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S) as client:
                assert (await client.post("/events/a", content=b"x")).status_code == 201
            assert await stream.offsets(1) == [1]
            code, errors = await asyncio.to_thread(served.stop, number)
            assert await stream.event("end") == {"code": "server_stopping", "reason": "the server is stopping"}
            assert await stream.frame() is None
    assert code == 0
    assert "Traceback" not in errors


async def test_a_client_that_does_not_read_does_not_delay_the_shutdown(log_path: Path) -> None:
    async with web(log_path) as server:
        publisher = await server.bus.publisher("a")
        for _ in range(20):
            await publisher.publish_many([b"x" * 8192] * 100)
    with Served(log_path, "--port", 0, ZBUS_WEB_STOP_TIMEOUT_S="1") as served:
        async with SseClient(served.url, "/events?from=beginning", {}):
            code, errors = await asyncio.to_thread(served.stop)
    assert (code, "Traceback" in errors) == (0, False)


def test_it_does_not_start_if_other_machines_could_reach_it_without_a_token(
    log_path: Path, rejected: Callable[..., str]
) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        line = rejected(log_path, "--host", host, "--port", 0)
        assert "no token is configured" in line
        assert host in line
    assert not log_path.exists()


def test_with_a_token_it_starts_on_an_address_that_others_can_reach(log_path: Path, tmp_path: Path) -> None:
    token = tmp_path / "ops.token"
    token.write_text("a-token-of-enough-characters\n")
    with Served(log_path, "--host", "0.0.0.0", "--port", 0, "--token-file", token) as served:
        assert served.ready["tokens"] == 1
        url = f"http://127.0.0.1:{served.port}"
        assert httpx.get(f"{url}/healthz", timeout=DEADLINE_S).json()["status"] == "ok"


def test_a_weak_token_is_rejected(log_path: Path, tmp_path: Path, rejected: Callable[..., str]) -> None:
    token = tmp_path / "token"
    for text in ("", "short", "with a space in the middle of it"):
        token.write_text(text)
        line = rejected(log_path, "--token-file", token)
        assert "at least 16" in line
        assert not text or text not in line
    assert "missing" in rejected(log_path, "--token-file", tmp_path / "missing")
    assert not log_path.exists()


def test_a_startup_error_is_one_line(log_path: Path, tmp_path: Path, rejected: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in rejected(log_path, "--port", port)
    config = tmp_path / "zbus.toml"
    config.write_text("[web]\nprot = 1\n")
    assert "the server needs a log" in rejected()
    assert "there is no such setting" in rejected(log_path, "--config", config)
    assert "none.toml" in rejected(log_path, "--config", tmp_path / "none.toml")
    assert "read-only log" in rejected(log_path, "--demo", "--read-only")
    assert "missing.db" in rejected(tmp_path / "missing.db", "--read-only")


def test_a_file_configures_the_bus_and_the_web_and_the_environment_wins(log_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "zbus.toml"
    config.write_text(f'log = "{log_path}"\npayload_bytes_max = 10\n[web]\nport = 1\nbody_bytes_max = 20\n')
    with Served("--config", config, ZBUS_WEB_PORT="0") as served:
        assert served.ready["log"] == str(log_path)
        for size, status, code in ((10, 201, None), (11, 413, "event_too_large"), (21, 413, "body_too_large")):
            response = httpx.post(f"{served.url}/events/a", content=b"x" * size, timeout=DEADLINE_S)
            assert response.status_code == status
            assert code is None or error_of(response.content)[0] == code
    # Other readers of the file ignore the table [web].
    assert load_config(config).payload_bytes_max == 10


async def test_the_demo_publishes_events_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with Served("--demo", "--port", 0, TMPDIR=str(tmp_path)) as served:
        async with SseClient(served.url, "/events?from=beginning", {}) as stream:
            keys = set()
            while not {"shop/orders/created", "shop/orders/paid", "fleet/truck-1/position"} <= keys:
                keys.add((await stream.event())["key"])
        assert list(tmp_path.iterdir())
        code, errors = await asyncio.to_thread(served.stop)
    assert (code, "Traceback" in errors) == (0, False)
    assert not list(tmp_path.iterdir())


async def test_another_process_can_serve_the_log_while_its_owner_publishes(log_path: Path) -> None:
    async with web(log_path) as owner:
        await owner.publish("a", b"1")
        with await asyncio.to_thread(Served, log_path, "--port", 0, "--read-only") as served:
            async with SseClient(served.url, "/events?from=beginning", {}) as stream:
                assert await stream.offsets(1) == [1]
                await owner.publish("a", b"2")
                assert await stream.offsets(1) == [2]
            async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S) as client:
                assert json.loads((await client.get("/log")).content)["head"] == 2


def test_a_log_that_another_process_owns_is_served_read_only(log_path: Path, rejected: Callable[..., str]) -> None:
    with zbus.blocking.open(log_path):
        said = rejected(log_path)

    assert f"zbus serve {log_path} --read-only" in said
    assert "read_only=True" not in said
