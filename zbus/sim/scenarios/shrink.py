"""Shrinking: find the smallest run that still fails, with fewer faults, nodes and events.

Faults are data, and each random source has its own name, so a run without one fault is otherwise the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from zbus.sim.world import Overrides

from .runner import Result, run_seed
from .scenario import Scenario

RUNS_MAX = 200
SHORTEST_S = 0.1


class Shrunk(NamedTuple):
    """The smallest failing run that was found."""

    result: Result
    overrides: Overrides
    runs: int  # how many were tried


def shrink(
    scenario: Scenario, result: Result, runs_max: int = RUNS_MAX, progress: Callable[[int], None] = lambda runs: None
) -> Shrunk:
    """Return the smallest run with the same broken invariant, after at most `runs_max` runs."""
    best = Shrunk(result, Overrides(range(result.planned), result.choices), 0)
    tried = {str(best.overrides)}
    runs = 0
    improved = True
    while improved:
        improved = False
        for smaller in _smaller(best.overrides):
            if str(smaller) in tried:
                continue
            if runs >= runs_max:
                return best._replace(runs=runs)
            runs += 1
            progress(runs)
            tried.add(str(smaller))
            found, _ = run_seed(scenario, result.seed, smaller)
            made = smaller.changed(choices=found.choices)  # a choice is never smaller than its least value
            if found.failed and found.symptom == result.symptom and str(made) != str(best.overrides):
                best = Shrunk(found, made, runs)
                tried.add(str(made))
                improved = True
                break
    return best._replace(runs=runs)


def _smaller(now: Overrides) -> Iterator[Overrides]:
    """Return runs that are a little smaller, those that save most first."""
    faults = now.faults or ()
    if len(faults) > 1:
        half = len(faults) // 2
        yield now.changed(faults=faults[:half])
        yield now.changed(faults=faults[half:])
    for number in faults:
        yield now.changed(faults=[each for each in faults if each != number])
    if not now.calm:
        yield now.changed(calm=True)
    for name, value in now.choices.items():
        for less in dict.fromkeys((0, value // 2, value * 3 // 4, value - 1)):
            if 0 <= less < value:
                yield now.changed(choices=now.choices | {name: less})
    for number in faults:
        for_s = now.shorter.get(number)
        if for_s is None or for_s > SHORTEST_S:
            yield now.changed(shorter=now.shorter | {number: SHORTEST_S if for_s is None else for_s / 2})
