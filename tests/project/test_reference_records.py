"""The reference page of log records, codes, counters and metrics says what the code says."""

from __future__ import annotations

from pathlib import Path

import reference_records
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import zbus
from zbus.metrics import METRICS


def test_a_change_of_a_table_changes_the_page() -> None:
    before = reference_records.records_page()
    reference_records.CODES["made_up"] = "A code of this test."
    try:
        after = reference_records.records_page()
    finally:
        del reference_records.CODES["made_up"]

    assert "| `made_up` | A code of this test. |" in after
    assert "made_up" not in before
    assert reference_records.pages() == {"records.md": before}


async def test_every_exported_metric_is_in_the_table_with_its_type_and_help(log_path: Path) -> None:
    registry = CollectorRegistry()
    async with zbus.open(log_path) as bus:
        bus.cache(name="todos")
        registry.register(zbus.metrics.collector(bus))
        families = {each.name: each for each in text_string_to_metric_families(generate_latest(registry).decode())}

    found = {name: (each.type, each.documentation) for name, each in families.items()}
    assert found == {name: METRICS[name][:2] for name in found}
    assert METRICS.keys() - found.keys() <= {name for name in METRICS if name.startswith("zbus_bridge_")} | {
        "zbus_nodes",
        "zbus_gaps_open",
    }
