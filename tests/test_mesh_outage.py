"""Servers, routers and nodes that die or freeze under load: with a log nothing acknowledged is lost, and order is kept.

The times here are short; `tests/faults/test_mesh_faults.py` runs the same at full length and on every transport.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_scenarios import middle_killed_under_load, publisher_killed_and_replaced, reader_frozen
from mesh_support import WITH_MIDDLE, Middle, ZenohPeers, Zmq

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("kind", WITH_MIDDLE, ids=[each.name for each in WITH_MIDDLE])
def test_a_server_killed_and_replaced_under_load_costs_nothing(tmp_path: Path, kind: type[Middle]) -> None:
    middle_killed_under_load(tmp_path, kind, away_s=1.0, times=1)


def test_a_publishing_process_killed_and_replaced_costs_nothing(tmp_path: Path) -> None:
    publisher_killed_and_replaced(tmp_path, Zmq, times=1)


def test_a_reading_process_that_froze_loses_nothing(tmp_path: Path) -> None:
    reader_frozen(tmp_path, ZenohPeers, frozen_s=6.0)
