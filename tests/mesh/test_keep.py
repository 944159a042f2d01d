"""Recording what others publish: `keep=["shop/**"]`, and a sink that records everything.

Each event is in the recorder's log once, by identity; recorders do not send on what they recorded. All transports have
their turn in `tests/faults/test_mesh_faults.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_record import recorder_beside_a_third_node, sink_restarts
from mesh_support import Nats, ZenohPeers, at_once

pytestmark = pytest.mark.timeout(120)


def test_recorders_and_sinks_keep_each_event_once_and_send_none_of_it_on(tmp_path: Path) -> None:
    at_once(
        lambda: sink_restarts(tmp_path / "sink", ZenohPeers),
        lambda: recorder_beside_a_third_node(tmp_path / "recorder", Nats),
    )
