"""Retention of one log, step by step on the writer's thread: old events first, then the keys that lost their events.

So are purges, which remove the events of some keys whatever their age.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import Connection

from zbus.keys import KeySet
from zbus.observe.records import record_reason
from zbus.ports.log import Cursor

from .age_clock import AgeClock, load_clock, save_clock
from .file.database import transaction
from .file.tables import get_low_water
from .key_retention import KeyRetention
from .purging import Purge
from .retention import Rules, newest_time_ns, plan, trim_step
from .write.cursors import SqliteCursors
from .write.removal import Removal
from .write.removed_identities import FOREVER_S, RemovedIdentities
from .write.unused_keys import UnusedKeys
from .write.writer import Writer

EXPIRE_S = 10.0  # at most this often


class Step(NamedTuple):
    """The result of one step."""

    removed: int  # how many events
    more: bool  # whether there may be more to do
    held_by: str | None = None  # the cursor that limits retention


class Pruner:
    """Used by the writer's thread only. Commits continue between the steps."""

    def __init__(
        self,
        path: str,
        connection: Connection,
        writer: Callable[[], Writer],
        cursors: SqliteCursors,
        rules: Rules = Rules(),  # noqa: B008 - it is immutable
        cursor_ttl_s: float | None = None,
        dedup_s: float = 0.0,
    ) -> None:
        self._path, self._connection, self._writer, self._cursors = path, connection, writer, cursors
        self._unused = UnusedKeys(connection, lambda names: writer().forget_keys(names))
        by_key_s = [age_s for _, age_s in rules.keys]
        ages_s = [each for each in (rules.max_age_s, cursor_ttl_s, *by_key_s) if each is not None]
        self._reports_clock = bool(ages_s)
        # Before the first event of this process, whose clock may be wrong.
        self._stored_clock = load_clock(connection)
        ages_s += [min(dedup_s, FOREVER_S)] if dedup_s or not ages_s else []
        self._clock = AgeClock(self._stored_clock, newest_time_ns(connection), ages_s)
        self._cursor_ttl_s, self._expire_at = cursor_ttl_s, 0.0
        self._started = False
        self.reader: tuple[str, int] | None = None  # for which events after an offset are kept; set by any thread
        self._identities = RemovedIdentities(connection, dedup_s, self._clock.now_ns)
        self._removal = Removal(path, connection, writer, self._identities)
        self._by_key: tuple[Rules, KeyRetention] | None = None  # of the last rules

    def step(self, rules: Rules) -> Step:
        """Remove some events that `rules` do not keep, because a user asked for it. The clock is believed."""
        return self._step(rules, None)

    def periodic_step(self, rules: Rules) -> Step:
        """Remove some events that the settings do not keep. A clock that jumps removes few at once."""
        if not self._started:
            self._started = True
            self._unused.look_for_more(self._events_left())
        now_ns = self._clock.now_ns()
        jump_ns = self._clock.take_jump()
        if jump_ns is not None and self._reports_clock:
            self._report_clock(round(jump_ns / 1e9))
        self.save_clock()
        if self._cursor_ttl_s is not None and time.monotonic() >= self._expire_at:
            self._expire_at = time.monotonic() + min(EXPIRE_S, self._cursor_ttl_s / 10)
            self._cursors.expire_unused(self._cursor_ttl_s, now_ns)
        return self._step(rules, now_ns)

    def save_clock(self) -> None:
        """Store the time of retention if it is due, so that a restart does not make a wrong clock right."""
        if self._clock.is_due(self._stored_clock):
            state = self._clock.state
            with transaction(self._connection):
                save_clock(self._connection, state)
            self._stored_clock = state

    def begin_purge(self, keys: KeySet) -> Purge:
        """Return a purge of all events that are in the log now."""
        return Purge(self._connection, self._removal, keys, self._writer().head)

    def purge_step(self, purge: Purge) -> bool:
        """Do a part of a purge, and at its end remove the keys without events. Returns whether there is more to do."""
        if not purge.is_done:
            purge.step()
            if purge.is_done and purge.removed:
                self._unused.begin_anew()
            return not purge.is_done or purge.removed > 0
        return self._unused.step()

    def _step(self, rules: Rules, now_ns: int | None) -> Step:
        if self._unused.is_due(self._events_left()):
            self._unused.step()
            return Step(0, True)
        # Each step plans again, because sizes are estimates and cursors move.
        target, held_by = plan(self._connection, rules, self._writer().head, self._lowest(), now_ns)
        offloaded_until = rules.until or 0 if rules.offloaded else 0
        removed, more = trim_step(self._connection, target, self._identities, offloaded_until)
        if not more and rules.keys:
            removed, more, held_by = self._step_by_key(rules, now_ns, held_by)
        self._unused.events_removed(removed)
        return Step(removed, more, held_by)

    def _lowest(self) -> Cursor | None:
        """Return the cursor or reader that is furthest behind, where retention stops."""
        lowest, reader = self._cursors.lowest(), self.reader
        if reader is None or (lowest is not None and lowest.offset <= reader[1]):
            return lowest
        return Cursor(*reader, (), 0, None)

    def _step_by_key(self, rules: Rules, now_ns: int | None, held_by: str | None) -> Step:
        if self._by_key is None or self._by_key[0] != rules:
            self._by_key = rules, KeyRetention(self._path, self._connection, self._removal, rules)
        lowest, held = self._lowest(), [held_by]

        def limit(offset: int) -> int:
            if lowest is None or rules.ignore_cursors or offset <= lowest.offset:
                return offset
            held[0] = lowest.name
            return lowest.offset

        at_once, time_ns = now_ns is None, time.time_ns() if now_ns is None else now_ns
        removed, more = self._by_key[1].step(time_ns, limit, at_once)
        return Step(removed, more, held[0])

    def _events_left(self) -> int:
        return self._writer().head - get_low_water(self._connection)

    def _report_clock(self, ahead_s: int) -> None:
        prune = f"zbus log prune {shlex.quote(self._path)} --max-age 1h would remove the old events of all keys now"
        reason = (
            f"the clock of this machine is {ahead_s} s ahead of the time that age retention uses, which follows it "
            "slowly, so that a wrong clock does not remove every event. If the clock is right, as after a long pause, "
            f"nothing needs to be done, and events stay longer than usual; {prune}"
            if ahead_s > 0
            else f"the clock of this machine is {-ahead_s} s behind the time that age retention used before. Age "
            "retention follows it, so events stay longer than usual. If the clock is right, nothing needs to be done; "
            f"otherwise set it: events are published with a wrong time. {prune}"
        )
        record_reason(
            "LOG_CLOCK_JUMPED", logging.WARNING, code="clock_jumped", reason=reason, path=self._path, ahead_s=ahead_s
        )
