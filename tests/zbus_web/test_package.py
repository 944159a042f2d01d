"""The public names of `zbus_web`, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import zbus
import zbus_web


def test_importing_the_package_imports_no_web_library() -> None:
    script = "import sys, zbus_web; print(*{'starlette', 'uvicorn', 'pydantic', 'zbus_web.server'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


def test_every_public_name_is_importable_and_no_other() -> None:
    assert all(getattr(zbus_web, name).__name__ == name for name in zbus_web.__all__)
    with pytest.raises(AttributeError, match="serving"):
        zbus_web.serving  # noqa: B018


async def test_serve_runs_a_server_while_the_block_runs(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        async with zbus_web.serve(bus, zbus_web.WebSettings(port=0)) as server:
            async with httpx.AsyncClient(base_url=server.url) as client:
                assert (await client.get("/healthz")).json() == {"status": "ok", "head": 0}

        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/healthz")
