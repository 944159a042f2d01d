"""The simulator finds known defects that are put into a copy of zbus, and only those."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_mutants import MUTANTS, SCENARIOS, Mutant, copy_with, find_in_copy

from zbus.sim.scenarios.runner import run_seed
from zbus.sim.scenarios.scenario import load_scenarios


@pytest.mark.parametrize("mutant", MUTANTS, ids=[each.name.replace(" ", "-") for each in MUTANTS])
def test_a_known_defect_is_found(mutant: Mutant, tmp_path: Path) -> None:
    seed = find_in_copy(copy_with(mutant, tmp_path), mutant)

    assert seed is not None, f"not found within {mutant.within} seeds"
    (scenario,) = [each for each in load_scenarios(SCENARIOS) if each.name == mutant.scenario]
    assert run_seed(scenario, seed)[0].violations == (), "the unchanged code fails with this seed too"
