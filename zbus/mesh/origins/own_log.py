"""The log of this node as other nodes see it: its incarnation, and copies of it that other nodes use.

A copy that was opened later has an incarnation of its own. A copy of a running machine shares the incarnation of the
original, so only a digest shows it; and a machine that was reverted to a snapshot continues its incarnation with other
events. In both cases this log begins another incarnation, so that other nodes can tell the events apart.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from zbus.errors import ZbusError
from zbus.mesh.host import Host
from zbus.observe.records import EVENT_RETRY, ORIGIN_CLONED, ORIGIN_REWOUND, record_reason
from zbus.ports.lineage import NO_BRANCH, Branch, Incarnation, Lineage, Mark
from zbus.ports.log import Log
from zbus.util.runtime import Runtime

COPIES_MAX = 100  # of this log, that are reported
SEPARATE_S = 60.0  # another incarnation, because of a copy, at most this often


class OwnLog:
    """The incarnation of the log of this node. Lives on the loop.

    `renew_identities` gives its publishers new ids. `began(incarnation)` is called when the log has begun another
    incarnation than this one.
    """

    def __init__(
        self,
        origin: int,
        host: Host,
        runtime: Runtime,
        renew_identities: Callable[[], None],
        began: Callable[[int], None],
    ) -> None:
        self._origin, self._log, self._run, self._count = origin, host.log, host.run, host.count
        self._runtime, self._renew_identities, self._began = runtime, renew_identities, began
        self.lineage = host.log.lineage if host.log is not None else Lineage((Incarnation(0, 1),))
        self._separating: asyncio.Task[None] | None = None  # compares this log with what another node knows of it
        self._separated_at = -math.inf
        self._copies: set[int] = set()  # incarnations of copies that were reported
        self._closing = False

    @property
    def branch(self) -> Branch:
        """The current incarnation as frames and beacons name it."""
        return self.lineage.branch if self._log is not None else NO_BRANCH

    def is_copy(self, branch: Branch, offset: int, digest: bytes) -> bool:
        """Return whether a frame that names this log comes from a copy of it, and report that once.

        If the copy has the same incarnation, only its digest shows it. Then this log begins another one.
        """
        if self._log is None or not branch.id:
            return False  # an echo
        if branch.id == self.lineage.current.id:
            if digest:
                self._separate(self._compare_digest, self._log, branch, offset, digest)
            return False
        until = self.lineage.until(branch.id)
        if until is not None and offset <= until:
            return False  # a late frame of an earlier process
        self._report_copy(branch.id)
        return True

    def reverted(self, mark: Mark) -> None:
        """Note that another node knows other events of this incarnation: this machine was reverted to a snapshot."""
        if self._log is not None and mark.incarnation == self.lineage.current.id:
            self._separate(self._leave_incarnation, self._log, mark)

    def copies_reported(self, incarnations: tuple[int, ...]) -> None:
        """Report copies that another node receives, and this one perhaps does not."""
        for each in incarnations:
            if each and self.lineage.until(each) is None:
                self._report_copy(each)

    def close(self) -> list[asyncio.Task[None]]:
        """Stop. Return the tasks to wait for."""
        self._closing = True
        ending = [self._separating] if self._separating is not None else []
        for task in ending:
            task.cancel()
        return ending

    def _separate(self, separate: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        if self._separating is None and not self._closing:
            self._separating = asyncio.get_running_loop().create_task(self._try(separate, args))

    async def _try(self, separate: Callable[..., Coroutine[Any, Any, None]], args: tuple[object, ...]) -> None:
        try:
            await separate(*args)
        except ZbusError as error:
            record_reason(EVENT_RETRY, logging.WARNING, code="confirm_failed", reason=str(error), origin=self._origin)
        finally:
            self._separating = None

    async def _compare_digest(self, log: Log, branch: Branch, offset: int, digest: bytes) -> None:
        """Compare a digest with that of this log, and begin another incarnation if they differ."""
        own = await self._run(log.digest, offset) if offset <= await self._run(log.head) else b""
        if own != digest and branch.id == self.lineage.current.id:
            self._report_copy(branch.id)
            await self._begin_incarnation(log)

    async def _leave_incarnation(self, log: Log, mark: Mark) -> None:
        before = self.lineage.current
        await self._begin_incarnation(log)
        if self.lineage.current == before:
            return
        reason = (
            f"another node knows other events of this log up to offset {mark.offset}: this machine was reverted to "
            "a snapshot, or copied. The log begins another incarnation, so that its new events are received"
        )
        offsets = {"known": mark.offset, "shared": max(0, before.first - 1)}
        names = {"origin": f"{self._origin:x}", "incarnation": f"{self.lineage.current.id:x}"}
        record_reason(ORIGIN_REWOUND, logging.WARNING, code="own_log_rewound", reason=reason, **names, **offsets)

    async def _begin_incarnation(self, log: Log) -> None:
        """Begin another incarnation, so that other nodes can tell the events from here on from those of the other log.

        At most once in `SEPARATE_S`, because a stranger may send any number of digests.
        """
        now = self._runtime.monotonic()
        if now - self._separated_at < SEPARATE_S:
            return
        self._separated_at = now
        self._renew_identities()  # first: no event of the new incarnation has an id that the other copy uses
        await self._run(log.begin_incarnation)
        before, self.lineage = self.lineage.current.id, log.lineage
        self._began(before)

    def _report_copy(self, incarnation: int) -> None:
        if incarnation in self._copies or len(self._copies) >= COPIES_MAX:
            return
        self._copies.add(incarnation)
        self._count("copies_found", 1)
        reason = (
            "another node uses a copy of the log of this one. Its events are received as those of another log. Close "
            "one of the nodes, or give it a log of its own"
        )
        fields = {"origin": f"{self._origin:x}", "other": f"{incarnation:x}"}
        fields["incarnation"] = f"{self.lineage.current.id:x}"
        record_reason(ORIGIN_CLONED, logging.ERROR, code="own_log_copied", reason=reason, **fields)
