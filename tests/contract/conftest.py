"""The fixtures of the contract suite: `transport` for what is promised between nodes, `any_transport` for what
holds inside one bus too, `middle_transport` for what happens when the server between two nodes is killed; `logs` and
`log` for what every log promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_support import Mesh, Processes
from contract_transports import MESHES
from log_contract import KINDS, Logs

from zbus.ports.log import Log


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.end()


@pytest.fixture(scope="session")
def mesh(
    request: pytest.FixtureRequest, processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    found: Mesh = request.param(tmp_path_factory.mktemp(request.param.name), processes)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def transport(mesh: Mesh) -> Iterator[Mesh]:
    """A transport with a second node. The nodes are stopped after the test."""
    yield mesh
    mesh.clear()


@pytest.fixture
def any_transport(transport: Mesh) -> Mesh:
    """The same, and Zenoh without a network besides."""
    return transport


@pytest.fixture
def middle_transport(transport: Mesh) -> Mesh:
    """A transport with a server in the middle, which can be killed while both nodes keep running."""
    return transport


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mesh" in metafunc.fixturenames:
        chosen = [each for each in MESHES if "any_transport" in metafunc.fixturenames or not each.embedded]
        if "middle_transport" in metafunc.fixturenames:
            chosen = [each for each in chosen if each.has_middle]
        metafunc.parametrize("mesh", chosen, ids=[each.name for each in chosen], indirect=True, scope="session")


@pytest.fixture(params=KINDS)
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Logs]:
    """One kind of log; what it opened is closed with the test."""
    found = KINDS[request.param](tmp_path)
    yield found
    found.close()


@pytest.fixture
def log(logs: Logs) -> Log:
    """An empty log of that kind."""
    return logs.open()
