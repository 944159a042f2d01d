"""A node that catches up with thousands of events stays responsive: its loop is never late by over 100 ms."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_scenarios import loop_beside_a_catch_up
from mesh_support import ZenohPeers


@pytest.mark.timeout(120)
def test_a_catch_up_leaves_the_loop_to_others(tmp_path: Path) -> None:
    loop_beside_a_catch_up(tmp_path, ZenohPeers, events=10_000)
