"""The networked promises at full size: 50,000 events while a node is away, processes frozen for 15 s, servers killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_scenarios import (
    away_while_the_publisher_publishes,
    both_sides_restart,
    killed_before_the_first_event,
    loop_beside_a_catch_up,
    middle_frozen,
    middle_killed_under_load,
    new_processes_are_found,
    publisher_frozen,
    publisher_killed_and_replaced,
    reader_frozen,
)
from mesh_support import WIRES, WITH_MIDDLE, Middle, Wire

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

on_every_wire = pytest.mark.parametrize("kind", WIRES, ids=[each.name for each in WIRES])
with_a_middle = pytest.mark.parametrize("kind", WITH_MIDDLE, ids=[each.name for each in WITH_MIDDLE])


@on_every_wire
def test_50_000_events_published_while_a_durable_reader_was_killed_all_reach_it(
    tmp_path: Path, kind: type[Wire]
) -> None:
    away_while_the_publisher_publishes(tmp_path, kind, events=50_000)


@on_every_wire
def test_50_000_events_reach_a_durable_reader_although_the_publisher_restarted_too(
    tmp_path: Path, kind: type[Wire]
) -> None:
    both_sides_restart(tmp_path, kind, events=50_000)


@on_every_wire
def test_a_durable_name_made_an_instant_before_a_kill_misses_none_of_50_000(tmp_path: Path, kind: type[Wire]) -> None:
    killed_before_the_first_event(tmp_path, kind, events=50_000)


@with_a_middle
def test_a_server_killed_and_replaced_five_times_under_load_costs_nothing(tmp_path: Path, kind: type[Middle]) -> None:
    middle_killed_under_load(tmp_path, kind, away_s=4.0, times=5)


@on_every_wire
def test_a_publishing_process_killed_and_replaced_ten_times_costs_nothing(tmp_path: Path, kind: type[Wire]) -> None:
    publisher_killed_and_replaced(tmp_path, kind, times=10)


@on_every_wire
def test_a_reading_process_frozen_for_15_s_loses_nothing(tmp_path: Path, kind: type[Wire]) -> None:
    reader_frozen(tmp_path, kind, frozen_s=15.0)


@on_every_wire
def test_a_publishing_process_frozen_for_15_s_loses_nothing(tmp_path: Path, kind: type[Wire]) -> None:
    publisher_frozen(tmp_path, kind, frozen_s=15.0)


@with_a_middle
def test_a_server_frozen_for_15_s_costs_nothing(tmp_path: Path, kind: type[Middle]) -> None:
    middle_frozen(tmp_path, kind, frozen_s=15.0)


@on_every_wire
def test_a_catch_up_of_50_000_events_leaves_the_loop_to_others(tmp_path: Path, kind: type[Wire]) -> None:
    loop_beside_a_catch_up(tmp_path, kind, events=50_000)


@pytest.mark.parametrize("logged", [True, False], ids=["with-a-log", "without-a-log"])
@on_every_wire
def test_the_first_event_of_30_new_processes_reaches_a_running_reader_within_a_second(
    tmp_path: Path, kind: type[Wire], logged: bool
) -> None:
    new_processes_are_found(tmp_path, kind, processes=30, logged=logged)
