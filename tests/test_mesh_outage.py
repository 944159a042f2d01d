"""Servers, routers and nodes that die or freeze under load: with a log nothing acknowledged is lost, and order is kept.

The times here are short; `tests/faults/test_mesh_faults.py` runs the same at full length.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_scenarios import (
    middle_frozen,
    middle_killed_under_load,
    publisher_frozen,
    publisher_killed_and_replaced,
    reader_frozen,
)
from mesh_support import WIRES, WITH_MIDDLE, Middle, Wire

pytestmark = pytest.mark.timeout(120)

on_every_wire = pytest.mark.parametrize("kind", WIRES, ids=[each.name for each in WIRES])
with_a_middle = pytest.mark.parametrize("kind", WITH_MIDDLE, ids=[each.name for each in WITH_MIDDLE])


@with_a_middle
def test_a_server_killed_and_replaced_under_load_costs_nothing(tmp_path: Path, kind: type[Middle]) -> None:
    middle_killed_under_load(tmp_path, kind, away_s=1.0, times=1)


@on_every_wire
def test_a_publishing_process_killed_and_replaced_costs_nothing(tmp_path: Path, kind: type[Wire]) -> None:
    publisher_killed_and_replaced(tmp_path, kind, times=1)


@on_every_wire
def test_a_reading_process_that_froze_loses_nothing(tmp_path: Path, kind: type[Wire]) -> None:
    reader_frozen(tmp_path, kind, frozen_s=6.0)


@on_every_wire
def test_a_publishing_process_that_froze_loses_nothing(tmp_path: Path, kind: type[Wire]) -> None:
    publisher_frozen(tmp_path, kind, frozen_s=3.0)


@with_a_middle
def test_a_server_that_froze_costs_nothing(tmp_path: Path, kind: type[Middle]) -> None:
    middle_frozen(tmp_path, kind, frozen_s=3.0)
