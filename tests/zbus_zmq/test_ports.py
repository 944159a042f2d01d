"""Ports: binding is the allocation, so no node gets a port that another process has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_ports
from zmq_support import Collector, children, fabrics, until

from zbus.config import BusConfig
from zbus.errors import TransportError
from zbus_zmq.fabric import open_fabric


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


@pytest.fixture
def ports() -> tuple[int, int]:
    """A range of four ports that are free now, two of which a node needs."""
    low = free_ports(4)
    return low, low + 3


def test_a_node_listens_on_loopback_and_on_ports_that_the_system_gives(tmp_path: Path) -> None:
    with fabrics(f"zmq://?registry={tmp_path}") as (one, other):
        endpoints = [each.diagnostics()[name] for each in (one, other) for name in ("publish", "requests")]

    assert all(each.startswith("tcp://127.0.0.1:") for each in endpoints)
    assert len({port_of(each) for each in endpoints}) == 4


def test_two_processes_share_a_range_and_a_third_gets_an_error_that_it_is_full(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    url = f"zmq://?registry={tmp_path}&ports={ports[0]}-{ports[1]}"
    with children() as start:
        for child in (start("hold", url), start("hold", url)):
            child.wait_for("diagnostics")

        with pytest.raises(TransportError, match=f"{ports[0]} to {ports[1]}"):
            open_fabric(BusConfig(), url)


def test_ports_of_a_range_are_free_again_when_a_node_closes(tmp_path: Path, ports: tuple[int, int]) -> None:
    url = f"zmq://?registry={tmp_path}&ports={ports[0]}-{ports[1]}"
    for _ in range(3):
        with fabrics(url) as made:
            used = {port_of(each.diagnostics()[name]) for each in made for name in ("publish", "requests")}
        assert used == set(range(ports[0], ports[1] + 1))


def test_the_announced_address_may_differ_from_the_bound_one(tmp_path: Path) -> None:
    url = f"zmq://?registry={tmp_path}&bind=tcp://0.0.0.0:*&advertise=tcp://localhost:{{port}}"
    collector = Collector()
    with fabrics(url) as (one, other):
        assert one.diagnostics()["publish"].startswith("tcp://localhost:")
        other.listen(["a/**"], collector)
        one.send([("a/b", b"x")])

        assert collector.wait(1) == [b"x"]


def test_a_port_that_is_named_is_the_one_for_events(tmp_path: Path, ports: tuple[int, int]) -> None:
    url = f"zmq://?registry={tmp_path}&bind=tcp://127.0.0.1:{ports[0]}"
    fabric = open_fabric(BusConfig(), url)
    try:
        assert port_of(fabric.diagnostics()["publish"]) == ports[0]
        with pytest.raises(TransportError, match="in use"):
            open_fabric(BusConfig(), url)
    finally:
        fabric.close()


@pytest.fixture
def port_server(tmp_path: Path, ports: tuple[int, int]) -> Iterator[str]:
    """portpicker's own server, with a pool of our range."""
    address = str(tmp_path / "ports.sock")
    command = [sys.executable, str(Path(sys.executable).with_name("portserver.py"))]
    pool = [f"--portserver_static_pool={ports[0]}-{ports[1]}", f"--portserver_address={address}"]
    process = subprocess.Popen([*command, *pool], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: Path(address).exists())
        yield address
    finally:
        process.kill()
        process.wait(10)


def test_ports_come_from_the_port_server_where_there_is_one(
    tmp_path: Path, port_server: str, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTSERVER_ADDRESS", port_server)
    fabric = open_fabric(BusConfig(), f"zmq://?registry={tmp_path}")
    try:
        used = {port_of(fabric.diagnostics()[name]) for name in ("publish", "requests")}
    finally:
        fabric.close()

    assert len(used) == 2
    assert used <= set(range(ports[0], ports[1] + 1))


def test_a_port_server_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTSERVER_ADDRESS", str(tmp_path / "nobody"))

    with pytest.raises(TransportError, match="port server"):
        open_fabric(BusConfig(), f"zmq://?registry={tmp_path}")


def test_the_ports_that_tests_are_given_are_given_once_among_processes() -> None:
    code = "import sys, free_ports as f; f.HIGHEST = 15_400; "
    code += "print('ready', *[f.free_port() for _ in range(40)], flush=True); sys.stdin.read()"
    with children() as start:
        given = [
            port for child in [start("run", code) for _ in range(3)] for port in child.wait_for("ready").split()[1:]
        ]

    assert len(given) == len(set(given)) == 120
