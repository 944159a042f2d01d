"""The same seed gives the same trace: in each repetition, in another process, and whatever the hash seed is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sim_mutants import SCENARIOS

from zbus.sim.scenarios.runner import run_seed
from zbus.sim.scenarios.scenario import Scenario, load_scenarios

ALL = {each.name: each for each in load_scenarios(SCENARIOS)}
REPEATS = 100
PROGRAM = f"""
from zbus.sim.scenarios.runner import run_seed
from zbus.sim.scenarios.scenario import load_scenarios
for scenario in load_scenarios({str(SCENARIOS)!r}):
    print(scenario.name, *[run_seed(scenario, seed)[0].hash for seed in (3, 4)])
"""


def hashes(hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def test_every_scenario_has_the_same_trace_in_processes_with_different_hash_seeds() -> None:
    first = hashes("0")

    assert first == hashes("12345")
    assert len(first.splitlines()) == len(ALL)
    assert len({line.split()[1] for line in first.splitlines()}) > len(ALL) // 2, "traces of scenarios hardly differ"


@pytest.mark.parametrize("name", ["three_nodes"])
def test_a_hundred_repetitions_have_one_trace(name: str) -> None:
    found = {run_seed(ALL[name], 7)[0].hash for _ in range(REPEATS)}

    assert len(found) == 1


def test_two_runs_have_the_same_steps_and_another_seed_has_others() -> None:
    scenario: Scenario = ALL["three_nodes"]
    first, second, other = (run_seed(scenario, seed, keep_trace=True)[1] for seed in (7, 7, 8))

    assert list(first.lines()) == list(second.lines())
    assert list(first.lines()) != list(other.lines())
    assert first.hash != other.hash


def test_keeping_the_steps_does_not_change_the_run() -> None:
    scenario = ALL["aimed_kills"]

    assert run_seed(scenario, 5)[0].hash == run_seed(scenario, 5, keep_trace=True)[0].hash
