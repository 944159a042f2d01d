"""Which transport a bus uses: what is given, then `ZBUS_TRANSPORT`, then `DYN_EVENT_PLANE`. A missing extra says how
to install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from nats_support import nats_server

PROGRAM = """
    import asyncio, json, os, sys
    missing, cases = json.loads(sys.argv[1])

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Refuse())
    import zbus

    async def fabrics(settings):
        async with zbus.open(**settings) as bus:
            return [link["fabric"] for link in bus.diagnostics().get("links", [])]

    for environment, settings in cases:
        os.environ.update(environment)
        try:
            told = {"fabrics": asyncio.run(fabrics(settings))}
        except zbus.ZbusError as error:
            told = {"error": type(error).__name__, "field": error.field, "text": str(error)}
        for name in environment:
            del os.environ[name]
        print(json.dumps(told), flush=True)
"""

Case = tuple[dict[str, str], dict[str, object]]


def opened(*cases: Case, missing: tuple[str, ...] = ()) -> list[dict[str, object]]:
    """What a process opens in these environments and with these settings; some libraries are not there."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("ZBUS_", "DYN_", "NATS_"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps([missing, cases])],
        env=base,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_given_then_zbus_transport_then_dyn_event_plane_choose_the_transport(tmp_path: Path) -> None:
    zmq = f"zmq://?registry={tmp_path / 'registry'}"
    with nats_server(tmp_path / "nats") as server:
        found = opened(
            ({}, {}),
            ({"ZBUS_TRANSPORT": server.url}, {}),
            ({"ZBUS_TRANSPORT": zmq}, {}),
            ({"ZBUS_TRANSPORT": zmq, "DYN_EVENT_PLANE": "nats"}, {}),
            ({"ZBUS_TRANSPORT": zmq}, {"transport": server.url}),
            ({"DYN_EVENT_PLANE": "nats", "NATS_SERVER": server.url}, {}),
            ({"DYN_EVENT_PLANE": "zmq"}, {"options": {"registry": str(tmp_path / "registry")}}),
        )
    names: list[list[str]] = [[], ["nats"], ["zmq"], ["zmq"], ["nats"], ["nats"], ["zmq"]]
    assert found == [{"fabrics": each} for each in names]


def test_a_missing_extra_gives_the_line_that_installs_it() -> None:
    urls = ("nats://127.0.0.1:4222", "nats+raw://127.0.0.1:4222", "nats+js://127.0.0.1:4222", "zmq://", "zmq+raw://")
    reported = opened(*[({"ZBUS_TRANSPORT": url}, {}) for url in urls], missing=("nats", "zmq"))
    for url, each in zip(urls, reported, strict=True):
        assert (each["error"], each["field"]) == ("ConfigInvalid", "transport"), url
        assert str(each["text"]).endswith(f"pip install 'zbus-mesh[{url[: 4 if url.startswith('n') else 3]}]'"), each


def test_an_unknown_transport_names_those_that_there_are() -> None:
    (reported,) = opened(({"ZBUS_TRANSPORT": "carrierpigeon://roof"}, {}))
    assert (reported["error"], reported["field"]) == ("ConfigInvalid", "transport")
    assert all(name in str(reported["text"]) for name in ("carrierpigeon", "nats", "zenoh", "zmq"))
