"""Servers, routers and nodes that die or freeze under load: with a log nothing acknowledged is lost, and order is kept.

The times here are short; `tests/faults/test_mesh_faults.py` runs the same at full length and on every transport.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from mesh_scenarios import middle_killed_under_load, publisher_killed_and_replaced, reader_frozen
from mesh_support import WITH_MIDDLE, ZenohPeers, Zmq, at_once

pytestmark = pytest.mark.timeout(120)


def test_a_server_killed_and_replaced_under_load_costs_nothing(tmp_path: Path) -> None:
    at_once(*[partial(middle_killed_under_load, tmp_path / kind.name, kind, 1.0, 1) for kind in WITH_MIDDLE])


def test_a_publishing_process_replaced_and_a_reading_one_that_froze_lose_nothing(tmp_path: Path) -> None:
    at_once(
        partial(publisher_killed_and_replaced, tmp_path / "replaced", Zmq, 1),
        partial(reader_frozen, tmp_path / "frozen", ZenohPeers, 6.0),
    )
