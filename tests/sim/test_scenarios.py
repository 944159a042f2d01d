"""The scenarios of zbus itself, with a few hundred seeds. `make sim` runs 2,000, `make faults` 20,000."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from sim_mutants import SCENARIOS

from zbus.sim.faults import KINDS
from zbus.sim.scenarios.runner import run_seeds
from zbus.sim.scenarios.scenario import Scenario, load_scenarios
from zbus.sim.world import World

SEEDS = 300
ALL = load_scenarios(SCENARIOS)
SOUND = [each for each in ALL if not each.known_failure]
KNOWN = [each for each in ALL if each.known_failure]


@pytest.mark.parametrize("scenario", SOUND, ids=[each.name for each in SOUND])
def test_every_invariant_holds(scenario: Scenario) -> None:
    failed = [result for result in run_seeds(scenario, scenario.seeds(0, SEEDS)) if result.failed]

    assert [(result.seed, str(result.violations[0])) for result in failed] == []
    gc.collect()
    left = [each for each in gc.get_objects() if isinstance(each, World)]
    assert left == [], "a world stays in memory"


@pytest.mark.parametrize("scenario", KNOWN, ids=[each.name for each in KNOWN])
def test_a_known_failure_still_fails(scenario: Scenario) -> None:
    """If this test fails, the defect is fixed: remove the mark."""
    failed = any(result.failed for result in run_seeds(scenario, scenario.known_seeds))
    assert failed, f"{scenario.known_failure}: no longer true"


@pytest.mark.parametrize(
    ("name", "seed"), [("parallel_bridges", 13), ("parallel_bridges", 77), ("flipped_bits", 20050), ("disks_fail", 26)]
)
def test_a_seed_that_once_failed_holds(name: str, seed: int) -> None:
    (scenario,) = [each for each in SOUND if each.name == name]

    assert [str(each) for result in run_seeds(scenario, [seed]) for each in result.violations] == []


def test_every_known_failure_says_why_and_has_a_seed() -> None:
    assert [each.name for each in ALL if each.known_failure and not each.known_seeds] == []
    assert len(KNOWN) >= 3


def test_the_shares_of_the_scenarios_add_up_to_all_seeds() -> None:
    assert sum(each.share for each in SOUND) == pytest.approx(1.0, abs=0.05)


def test_the_scenarios_use_every_kind_of_fault() -> None:
    source = SCENARIOS.read_text() + (Path(SCENARIOS).parents[2] / "zbus/sim/faults.py").read_text()
    assert [kind for kind in KINDS if f"{kind}=(" not in source] == []
