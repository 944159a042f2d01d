"""Questions from node to node: one reply, or an error that says what is true; the asker's end is seen at the far end.

All transports have their turn in `tests/faults/test_mesh_faults.py`, and in the contract suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_request import asker_killed_in_the_middle, requests_and_their_ends, server_killed_in_the_middle
from mesh_support import Nats, ZenohPeers, Zmq, mesh_of

pytestmark = pytest.mark.timeout(120)


def test_requests_between_nodes_end_as_they_should(tmp_path: Path) -> None:
    with mesh_of(tmp_path, ZenohPeers) as mesh:
        requests_and_their_ends(mesh)


def test_a_server_killed_in_the_middle_is_an_error_in_bounded_time_and_its_successor_answers(tmp_path: Path) -> None:
    with mesh_of(tmp_path, Zmq) as mesh:
        server_killed_in_the_middle(mesh)


def test_an_asker_killed_in_the_middle_leaves_a_server_that_answers_others(tmp_path: Path) -> None:
    with mesh_of(tmp_path, Nats) as mesh:
        asker_killed_in_the_middle(mesh)
