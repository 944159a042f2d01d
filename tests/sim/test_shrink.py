"""Shrinking finds a small run that fails in the same way."""

from __future__ import annotations

from zbus.sim import Faults, World, scenario
from zbus.sim.scenarios.runner import run_seed
from zbus.sim.scenarios.shrink import shrink

MANY = Faults(kill=(3, 3), freeze=(3, 3), partition=(3, 3), for_s=(0.5, 6.0))


@scenario()
async def fails_if_a_node_was_frozen(world: World) -> None:
    nodes = world.choose("nodes", 2, 6)
    for number in range(nodes):
        await world.node(f"n{number}")
    events = world.choose("events", 10, 500)

    @world.invariant
    def nothing_is_frozen_while_there_are_twenty_events(world: World) -> str | None:
        return "frozen" if world.faults_injected.get("freeze") and events >= 20 else None

    await world.play(MANY, 10.0)


def test_a_failure_is_shrunk_to_the_fault_that_causes_it_with_few_nodes_and_events() -> None:
    result, _ = run_seed(fails_if_a_node_was_frozen, 3)
    assert result.failed
    assert result.planned == 9

    smallest = shrink(fails_if_a_node_was_frozen, result)

    assert len(smallest.overrides.faults or ()) == 1
    assert smallest.result.choices == {"nodes": 2, "events": 20}
    assert smallest.result.symptom == result.symptom
    assert set(smallest.result.faults) == {"freeze"}
    assert smallest.overrides.calm
    again, _ = run_seed(fails_if_a_node_was_frozen, 3, smallest.overrides)
    assert (again.hash, again.violations) == (smallest.result.hash, smallest.result.violations)
    assert smallest.runs <= 200


def test_another_failure_is_not_taken_for_the_same() -> None:
    @scenario()
    async def fails_differently_without_faults(world: World) -> None:
        await world.node("a")

        @world.invariant
        def first(world: World) -> str | None:
            return "first" if world.faults_injected else None

        @world.invariant
        def second(world: World) -> str | None:
            return "second" if world.now > 5 and not world.faults_injected else None

        await world.play(Faults(freeze=(2, 2)), 10.0)

    result, _ = run_seed(fails_differently_without_faults, 0)
    smallest = shrink(fails_differently_without_faults, result)

    assert smallest.result.symptom == result.symptom == "first"
    assert len(smallest.overrides.faults or ()) == 1
