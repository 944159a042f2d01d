"""Implementations are found by name, and the search for them does not slow down each bus."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

import zbus
from zbus import plugins


@pytest.fixture(autouse=True)
def not_searched_yet() -> None:
    plugins._found.cache_clear()


async def test_the_packages_are_searched_for_the_first_bus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def search(*, group: str) -> object:
        searched.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(plugins, "entry_points", search)
    for _ in range(3):
        async with zbus.open("memory"):
            pass

    assert sorted(searched) == ["zbus.fabrics", "zbus.logs"]


async def test_a_log_that_is_installed_while_the_program_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(zbus.ConfigInvalid, match="there is no log 'paper'"):
        await zbus.open("paper://desk").start()

    about = tmp_path / "paper-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[zbus.logs]\npaper = no_such_library:open_log\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(zbus.ConfigInvalid, match="'paper' needs no_such_library, which is missing"):
        await zbus.open("paper://desk").start()
