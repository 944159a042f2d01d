"""`aclose()` ends within `close_timeout_s` and a second, whatever the network, the other nodes or handlers do.

All transports have their turn in `tests/faults/test_mesh_faults.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_close import handler_hangs, middle_gone, receiver_frozen, repair_under_way
from mesh_support import Nats, ZenohPeers, Zmq, mesh_of

pytestmark = pytest.mark.timeout(120)


def test_closing_ends_in_time_when_the_server_is_frozen(tmp_path: Path) -> None:
    middle_gone(tmp_path, Nats, "frozen")


def test_closing_ends_in_time_when_another_node_is_frozen_while_it_receives(tmp_path: Path) -> None:
    with mesh_of(tmp_path, ZenohPeers) as mesh:
        receiver_frozen(mesh)


def test_closing_ends_in_time_while_a_repair_waits_for_a_frozen_node(tmp_path: Path) -> None:
    with mesh_of(tmp_path, ZenohPeers) as mesh:
        repair_under_way(mesh)


def test_closing_ends_in_time_while_a_handler_does_not_let_itself_be_cancelled(tmp_path: Path) -> None:
    with mesh_of(tmp_path, Zmq) as mesh:
        handler_hangs(mesh, "stubborn")
