"""Recording what others publish: `record=["shop/**"]`, and a sink that records everything.

Each event is in the recorder's log once, by identity; recorders do not send on what they recorded. All transports have
their turn in `tests/faults/test_mesh_faults.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_record import recorder_beside_a_third_node, sink_restarts
from mesh_support import Nats, ZenohPeers

pytestmark = pytest.mark.timeout(120)


def test_a_sink_records_everything_once_and_nothing_twice_after_a_restart(tmp_path: Path) -> None:
    sink_restarts(tmp_path, ZenohPeers)


def test_a_recorder_keeps_what_it_was_asked_to_and_sends_none_of_it_on(tmp_path: Path) -> None:
    recorder_beside_a_third_node(tmp_path, Nats)
