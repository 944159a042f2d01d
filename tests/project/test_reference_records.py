"""The reference page of log records, codes, counters and metrics says what the code says."""

from __future__ import annotations

from pathlib import Path

import reference_records
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import zbus
from zbus.metrics import METRICS


def test_the_page_is_up_to_date() -> None:
    for name, text in reference_records.pages().items():
        page = reference_records.FOLDER / name
        assert page.read_text() == text, f"{page} is out of date: run `make reference`"


def test_a_change_of_a_table_changes_the_page(tmp_path: Path) -> None:
    before = reference_records.records_page()
    reference_records.CODES["made_up"] = "A code of this test."
    try:
        after = reference_records.records_page()
    finally:
        del reference_records.CODES["made_up"]

    assert "| `made_up` | A code of this test. |" in after
    assert "made_up" not in before
    reference_records.write(tmp_path)
    assert (tmp_path / "records.md").read_text() == before


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
