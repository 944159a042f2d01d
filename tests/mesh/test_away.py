"""A node that was away: killed, and back on its own log, it gets what it missed from the publisher's log.

The sizes here are small; `tests/faults/test_mesh_faults.py` runs the same at full size.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from mesh_scenarios import (
    away_while_the_publisher_publishes,
    both_sides_restart,
    killed_before_the_first_event,
)
from mesh_support import WIRES, ZenohPeers, at_once

pytestmark = pytest.mark.timeout(120)


def test_a_durable_reader_that_was_killed_gets_everything_once_it_is_back_on_every_transport(tmp_path: Path) -> None:
    at_once(*[partial(away_while_the_publisher_publishes, tmp_path / kind.name, kind, 5_000) for kind in WIRES])


def test_a_durable_reader_gets_everything_although_the_publisher_restarted_too(tmp_path: Path) -> None:
    at_once(*[partial(both_sides_restart, tmp_path / kind.name, kind, 500) for kind in WIRES])


def test_a_durable_name_made_an_instant_before_a_kill_misses_nothing(tmp_path: Path) -> None:
    killed_before_the_first_event(tmp_path, ZenohPeers, events=200)
