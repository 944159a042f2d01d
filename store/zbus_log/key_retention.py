"""Retention by key: events of some keys are removed at another age than the rest, and so from the middle of the log.

Age follows the order of offsets: for each age there is an offset up to which events are too old. A pass removes the
events of this age after the offset that the last pass reached. That offset is stored, so that nothing is examined
twice, unless the rules change. A block of which only a part is old enough is examined again after a while.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection

from zbus.errors import LogDamaged
from zbus.keys import KeySet
from zbus.observe.records import record
from zbus.util.memo import Memo

from .age_clock import PREFIX as CLOCK
from .file.database import log_errors, transaction
from .file.tables import BLOCK, get_low_water
from .retention import Rules, too_old_until
from .write.removal import Removal

BLOCKS_PER_STEP = 32  # that have no event to remove
PART_OF_AGE = 16  # of its age has passed when a part of a block is examined again
KEYS_KEPT_MAX = 200_000
UNSAVED_BLOCKS_MAX = 64


class KeyRetention:
    """Used by the writer's thread only."""

    def __init__(self, path: str, connection: Connection, removal: Removal, rules: Rules) -> None:
        self._path, self._connection, self._removal, self._default = path, connection, removal, rules.max_age_s
        self._sets = [(KeySet([expression]), age_s) for expression, age_s in rules.keys]
        self._known = Memo[str, float | None](KEYS_KEPT_MAX)
        finite = {age_s for age_s in (rules.max_age_s, *[age_s for _, age_s in rules.keys]) if age_s is not None}
        # Events of the longest age, if nothing is kept longer, go with the low-water mark.
        self._ages = sorted(finite - {rules.longest_age_s})
        self._names = {age_s: json.dumps([rules.max_age_s, rules.keys, age_s]) for age_s in self._ages}
        self._again_at: dict[float, float] = {}
        self._work: list[tuple[float, int]] = []
        found: dict[str, int] = dict(connection.exec_driver_sql("SELECT rule, until FROM examined").all())
        self._until: dict[float, int] = {age_s: found.get(name, 0) for age_s, name in self._names.items()}
        self._saved = dict(self._until)

    def age_of(self, key: str) -> float | None:
        """Return the age at which events of a key are removed; None: never. The first match among the rules counts."""
        if key not in self._known:
            self._known[key] = next((age_s for keys, age_s in self._sets if key in keys), self._default)
        return self._known[key]

    def step(self, now_ns: int, limit: Callable[[int], int], at_once: bool) -> tuple[int, bool]:
        """Remove some events. Returns how many, and whether there may be more to do.

        `limit` reduces an offset to what cursors permit. `at_once`: examine parts of blocks now.
        """
        if not self._work:
            self._plan(now_ns, limit, at_once)
        if not self._work:
            return 0, False
        age_s, target = self._work[0]
        target = limit(target)
        removed = self._advance(age_s, target)
        if self._until[age_s] >= target:
            self._work.pop(0)
        return removed, bool(self._work or removed)

    def _plan(self, now_ns: int, limit: Callable[[int], int], at_once: bool) -> None:
        low_water = get_low_water(self._connection)
        for age_s in self._ages:
            at = self._until[age_s] = max(self._until[age_s], low_water)
            target = limit(too_old_until(self._connection, age_s, now_ns))
            if not at_once and time.monotonic() < self._again_at.get(age_s, 0.0):
                target = min(target, (target + 1) // BLOCK * BLOCK - 1)
            elif (target + 1) % BLOCK:
                self._again_at[age_s] = time.monotonic() + age_s / PART_OF_AGE
            if target > at:
                self._work.append((age_s, target))

    def _advance(self, age_s: float, target: int) -> int:
        """Examine the next blocks until one has events to remove. Returns how many were removed."""
        for _ in range(BLOCKS_PER_STEP):
            at = self._until[age_s]
            if at >= target:
                break
            block = (at + 1) // BLOCK
            self._until[age_s] = end = min(target, block * BLOCK + BLOCK - 1)
            try:
                with log_errors(self._path, writing=True):
                    chosen = self._removal.choose(block, end, lambda key: self.age_of(key) != age_s)
                    if chosen.offsets:
                        return self._removal.remove(chosen, self._save)
            except LogDamaged as error:  # its events stay until the low-water mark passes them
                record("LOG_TASK_FAILED", logging.WARNING, error, path=self._path)
            except BaseException:  # such as a full disk: the next step examines this block again
                self._until[age_s] = at
                raise
        if self._until[age_s] - self._saved[age_s] >= UNSAVED_BLOCKS_MAX * BLOCK:
            with transaction(self._connection):
                self._save()
        return 0

    def _save(self) -> None:
        names = json.dumps(list(self._names.values()))
        values = json.dumps([(self._names[age_s], until) for age_s, until in self._until.items()])
        self._connection.exec_driver_sql(
            "DELETE FROM examined WHERE rule NOT IN (SELECT value FROM json_each(?1)) AND substr(rule, 1, ?2) != ?3",
            (names, len(CLOCK), CLOCK),
        )
        self._connection.exec_driver_sql(
            "INSERT OR REPLACE INTO examined SELECT value ->> 0, value ->> 1 FROM json_each(?)", (values,)
        )
        self._saved = dict(self._until)
