"""The networked promises at full size and on every transport: 50,000 events while a node is away, processes frozen for
15 s, servers killed, transports switched, and what else `tests/mesh/` show on one transport each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mesh_close import handler_hangs, middle_gone, receiver_frozen, repair_under_way, request_in_flight
from mesh_record import recorder_beside_a_third_node, sink_killed_at_its_first_start, sink_restarts
from mesh_request import asker_killed_in_the_middle, requests_and_their_ends, server_killed_in_the_middle
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
from mesh_support import WIRES, WITH_MIDDLE, Mesh, Middle, Wire, mesh_of
from mesh_switch import MOVES, both_switch, forth_and_back, old_and_new_mesh

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

on_every_wire = pytest.mark.parametrize("kind", WIRES, ids=[each.name for each in WIRES])
on_every_move = pytest.mark.parametrize("move", MOVES, ids=[f"{old.name}-to-{new.name}" for old, new in MOVES])
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


@on_every_wire
@pytest.mark.parametrize("story", [sink_restarts, sink_killed_at_its_first_start, recorder_beside_a_third_node])
def test_what_is_recorded_is_there_once(tmp_path: Path, kind: type[Wire], story: Callable[..., None]) -> None:
    story(tmp_path, kind)


@on_every_wire
@pytest.mark.parametrize(
    "story",
    [
        requests_and_their_ends,
        server_killed_in_the_middle,
        asker_killed_in_the_middle,
        receiver_frozen,
        repair_under_way,
        request_in_flight,
    ],
)
def test_requests_and_closing_end_as_they_should(
    tmp_path: Path, kind: type[Wire], story: Callable[[Mesh], None]
) -> None:
    with mesh_of(tmp_path, kind) as mesh:
        story(mesh)


@on_every_wire
@pytest.mark.parametrize("behaviour", ["hang", "stubborn"])
def test_closing_ends_in_time_while_a_handler_hangs(tmp_path: Path, kind: type[Wire], behaviour: str) -> None:
    with mesh_of(tmp_path, kind) as mesh:
        handler_hangs(mesh, behaviour)


@with_a_middle
@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_closing_ends_in_time_when_the_server_is_gone(tmp_path: Path, kind: type[Middle], how: str) -> None:
    middle_gone(tmp_path, kind, how)


@on_every_move
@pytest.mark.parametrize("first", ["publisher-first", "reader-first"])
def test_both_nodes_switch_under_load_at_different_moments(
    tmp_path: Path, move: tuple[type[Wire], type[Wire]], first: str
) -> None:
    with old_and_new_mesh(tmp_path, *move) as (mesh, new):
        both_switch(mesh, new, first)


@on_every_move
def test_a_reader_moves_forth_and_back_between_two_transports_under_load(
    tmp_path: Path, move: tuple[type[Wire], type[Wire]]
) -> None:
    with old_and_new_mesh(tmp_path, *move) as (mesh, new):
        forth_and_back(mesh, new)
