"""Defects that are put into a copy of zbus, to see that the simulator finds them.

Each is a replacement of a few lines. The simulator runs on the copy in another process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "tests" / "sim" / "scenarios.py"


class Mutant(NamedTuple):
    """A defect: where it is, what it replaces, and within how many seeds a scenario must show it."""

    name: str
    file: str
    before: str
    after: str
    scenario: str
    within: int
    also: tuple[str, str, str] | None = None  # a second replacement, if two mechanisms protect from the defect


MUTANTS = (
    Mutant(
        "acknowledges before the commit",
        "zbus/publish/publisher.py",
        "            return await entry.commits.add(row)\n",
        "            entry.commits.add(row)\n            offset = Offset(0)\n"
        "            offset.identity = (self.publisher_id, sequence)\n            return offset\n",
        "aimed_kills",
        100,
    ),
    Mutant(
        "advances a position past an open gap",
        "zbus/mesh/peer.py",
        "            self._claims.note_head(beacon.head)\n            return\n",
        "            self._context.covered(self.id, self.branch, beacon.head)\n            return\n",
        "three_nodes",
        150,
    ),
    Mutant(
        "continues a restored log where the lost one ended, and compares no digests",
        "zbus/ports/lineage.py",
        "return min(known[self.parent], self.before) if self.parent in known else None",
        "return max(known.values(), default=None)",
        "restored_logs",
        60,
        (
            "zbus/mesh/origins/claims.py",
            "        if mark is None or shared is None:\n",
            "        if mark is None or shared is None or mark:\n",
        ),
    ),
    Mutant(
        "does not notice that a log has other events than before",
        "zbus/mesh/log_service.py",
        "        if until is None or (mark",
        "        if until is not None or (mark",
        "reverted_machines",
        10,
    ),
    Mutant(
        "uses a position in one copy of a log for the other copy",
        "zbus/mesh/origins/known_logs.py",
        "        return {each: min(offset, split.get(each, offset)) for each, offset in known.items()}\n",
        "        return dict(known) if split is not None else {}\n",
        "resumed_snapshots",
        60,
    ),
    Mutant(
        "forgets the past events that a log owes",
        "zbus/mesh/origins/known_logs.py",
        "            self._owed[origin] = dict.fromkeys(expressions, 0) | self.owed_by(origin)\n",
        "            pass\n",
        "past_events_that_are_owed",
        150,
    ),
    Mutant(
        "counts an unknown identity as a duplicate",
        "zbus/mesh/dedup.py",
        "        if at < 0 or sequence > skipped[at][1]:\n            return Arrival.DUPLICATE\n",
        "        if at >= -1:\n            return Arrival.DUPLICATE\n",
        "parallel_bridges",
        60,
    ),
    Mutant(
        "reverses the order after a failed send, with a log",
        "zbus/mesh/send_queue.py",
        "self._send([(row_of(event), event.offset) for event in events])",
        "self._send([(row_of(event), event.offset) for event in reversed(events)])",
        "three_nodes",
        20,
    ),
    Mutant(
        "reverses the order after a failed send, without a log",
        "zbus/mesh/send_queue.py",
        "self._backlog.extendleft(reversed(taken))",
        "self._backlog.extendleft(taken)",
        "without_a_log_and_disconnected",
        20,
    ),
)


def copy_with(mutant: Mutant, folder: Path) -> Path:
    """Copy zbus to a folder and put the defect in. Returns the folder to put first on the path."""
    shutil.copytree(ROOT / "zbus", folder / "zbus", ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in filter(None, ((mutant.file, mutant.before, mutant.after), mutant.also)):
        file = folder / name
        text = file.read_text()
        assert text.count(before) == 1, f"{name} has changed: write the defect anew"
        file.write_text(text.replace(before, after))
    return folder


def find_in_copy(folder: Path, mutant: Mutant) -> int | None:
    """Run a scenario on a copy until it fails. Returns the seed, or None."""
    path = os.pathsep.join([str(folder), str(ROOT / "adapters"), str(ROOT / "store")])
    program = f"""
import zbus
from zbus.sim.scenarios.runner import run_seeds
from zbus.sim.scenarios.scenario import load_scenarios
assert zbus.__file__.startswith({str(folder)!r}), zbus.__file__
(scenario,) = [each for each in load_scenarios({str(SCENARIOS)!r}) if each.name == {mutant.scenario!r}]
print(next((result.seed for result in run_seeds(scenario, range({mutant.within})) if result.failed), "none"))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return None if done.stdout.strip() == "none" else int(done.stdout)
