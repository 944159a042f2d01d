"""Random damage to every file of a log: each is reported, or changes nothing. There is no third outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import Base, make_closed, make_killed, make_purged, make_tiered, run_case

MAKERS = (make_closed, make_killed, make_purged, make_tiered)
CASES, NIGHTLY_CASES = 75, 2500  # for each of the four logs


@pytest.fixture(scope="module", params=MAKERS, ids=lambda make: make.__name__.removeprefix("make_"))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    make: Callable[[Path], Base] = request.param
    return make(tmp_path_factory.mktemp("damage") / "base")


def run(base: Base, seeds: range, folder: Path) -> Counter[str]:
    """Run the cases and return how often each outcome occurred."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_case(base, seed, folder)
        assert not outcome.wrong, f"seed {seed}, {outcome.damage}: {outcome.wrong[:3]}; reported: {outcome.reports[:3]}"
        outcomes[outcome.name] += 1
    return outcomes


def test_damage_is_reported_or_changes_nothing(base: Base, tmp_path: Path) -> None:
    outcomes = run(base, range(CASES), tmp_path / "case")

    assert outcomes["reported"] > CASES // 4
    assert outcomes["unchanged"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_damage_is_reported_or_changes_nothing_ten_thousand_times(base: Base, tmp_path: Path) -> None:
    run(base, range(1000, 1000 + NIGHTLY_CASES), tmp_path / "case")
