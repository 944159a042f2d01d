"""Files with scenarios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zbus.sim.scenarios.scenario import load_scenarios


def test_a_scenario_imports_the_service_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop_beside_it", raising=False)
    (tmp_path / "shop_beside_it.py").write_text("async def bill(bus): ...\n")
    file = tmp_path / "scenarios.py"
    file.write_text(
        "import zbus\nfrom shop_beside_it import bill\n\n\n"
        "@zbus.sim.scenario()\nasync def billing(world):\n    await world.node('a', program=bill)\n"
    )

    assert [each.name for each in load_scenarios(file)] == ["billing"]
