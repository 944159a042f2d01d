"""`aclose()` ends within `close_timeout_s` and a second, whatever the network, the other nodes or handlers do.

All transports have their turn in `tests/faults/test_mesh_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mesh_close import handler_hangs, middle_gone, receiver_frozen, repair_under_way
from mesh_support import Mesh, Nats, Wire, ZenohPeers, Zmq, at_once, mesh_of

pytestmark = pytest.mark.timeout(120)


def test_closing_ends_in_time_when_a_server_or_another_node_is_frozen(tmp_path: Path) -> None:
    at_once(
        lambda: middle_gone(tmp_path / "server", Nats, "frozen"),
        lambda: _on(tmp_path / "receiver", ZenohPeers, receiver_frozen),
    )


def test_closing_ends_in_time_while_a_repair_or_a_handler_goes_on(tmp_path: Path) -> None:
    at_once(
        lambda: _on(tmp_path / "repair", ZenohPeers, repair_under_way),
        lambda: _on(tmp_path / "handler", Zmq, lambda mesh: handler_hangs(mesh, "stubborn")),
    )


def _on(directory: Path, kind: type[Wire], story: Callable[[Mesh], None]) -> None:
    with mesh_of(directory, kind) as mesh:
        story(mesh)
