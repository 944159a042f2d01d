"""The console's files over HTTP: their types, their ETags, and their security policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from console_support import DEADLINE_S, Server

import zbus_web

FILES = sorted(path.name for path in (Path(zbus_web.__file__).parent / "console").iterdir())


@pytest.fixture
def client(log_path: Path) -> Iterator[httpx.Client]:
    server = Server(log_path)
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        yield client
    server.stop()


def test_the_root_redirects_to_the_console(client: httpx.Client) -> None:
    for path in ("/", "/console"):
        response = client.get(path)
        assert response.status_code == 302
        assert response.next_request is not None
        assert response.next_request.url.path == "/console/"
    assert "<title>zbus</title>" in client.get("/console/").text


def test_every_file_has_its_type_and_a_policy_for_our_scripts_only(client: httpx.Client) -> None:
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for name in FILES:
        response = client.get(f"/console/{name}")

        assert response.status_code == 200
        assert response.headers["content-type"].partition(";")[0] == types[Path(name).suffix]
        policy = response.headers["content-security-policy"].split("; ")
        assert {"default-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"} <= set(policy)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"


def test_a_cached_file_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/console/main.js")

    again = client.get("/console/main.js", headers={"If-None-Match": first.headers["etag"]})
    other = client.get("/console/stream.js", headers={"If-None-Match": first.headers["etag"]})

    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert other.status_code == 200


def test_a_head_request_has_no_body(client: httpx.Client) -> None:
    response = client.head("/console/main.js")

    assert (response.status_code, response.content) == (200, b"")


def test_nothing_else_is_served(client: httpx.Client) -> None:
    for path in ("nothing.js", "..%2Fassets.py", "%2e%2e%2fsettings.py", "main.js%00.css", "x/../../assets.py"):
        response = client.get(f"/console/{path}")

        assert response.status_code == 404, path
        assert "error" in response.json()


def test_no_file_sets_markup_from_text() -> None:
    folder = Path(zbus_web.__file__).parent / "console"
    written = "".join(path.read_text() for path in folder.glob("*.js"))

    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in written
    assert "<script>" not in (folder / "index.html").read_text()
    assert " style=" not in (folder / "index.html").read_text()
