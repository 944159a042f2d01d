"""Reports of how far events are stored by the nodes whose durable subscriptions need them, in both directions.

This node reports to other nodes how far it has stored their events. Other nodes report the same to it, and the
retention of its log waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

from zbus.errors import ZbusError
from zbus.event import NUMBER_MAX
from zbus.mesh.host import Host
from zbus.mesh.log_service import NO_KEYS, NOTHING_KNOWN, Request, request_page
from zbus.observe.records import record_reason
from zbus.ports.log import Log
from zbus.util.runtime import Runtime

from .known_logs import KnownLogs
from .readers import Readers

TIMEOUT_S = 3.0


class ReaderReports:
    """The reports of one node. Lives on the loop."""

    def __init__(self, origin: int, host: Host, retain_s: float, runtime: Runtime) -> None:
        self._origin, self._log, self._run, self._count = origin, host.log, host.run, host.count
        self._runtime = runtime
        self.readers = Readers(retain_s)
        self._sent: dict[int, Mapping[int, int]] = {}  # by origin: the positions that its node knows

    # Reports of other nodes.

    def start(self) -> None:
        """Let retention wait for the nodes whose positions are stored."""
        self.readers.limit_seen(self._runtime.steady_ns())
        self.hold()

    def received(self, node: int, offset: int | None) -> None:
        """Note how far another node has stored the events of this log; None: it no longer needs any."""
        if offset is None:
            self.readers.remove(node)
        else:
            self.readers.reported(node, offset, self._runtime.steady_ns())
        self.hold()

    def hold(self) -> None:
        """Let retention wait for the nodes that need it."""
        if self._log is not None:
            lowest = self.readers.lowest(self._runtime.steady_ns())
            self._log.hold(None if lowest is None else (f"node {lowest.node:x}", lowest.offset))

    async def check(self, log: Log, present: Collection[int]) -> None:
        """Note which nodes are connected, and report those that retention has passed."""
        if not self.readers:
            return
        now_ns = self._runtime.steady_ns()
        for origin in present:
            self.readers.seen(origin, now_ns)
        self.hold()
        for passed in self.readers.take_passed(await self._run(log.low_water), await self._run(log.removed_until)):
            self._count("readers_passed", 1)
            reason = (
                f"retention or a purge removed events of this log that node {passed.node:x} has not stored for its "
                "durable subscriptions, if they want them. The node learns what it missed when it requests events, "
                "except for those that were removed from between others"
            )
            fields = {"origin": f"{passed.node:x}", "offset": passed.offset, "until": passed.passed}
            record_reason("RETENTION_PASSED_NODE", logging.WARNING, code="reader_passed", reason=reason, **fields)
        self.hold()

    # Reports to other nodes.

    async def send(self, present: Collection[int], known_logs: KnownLogs, request: Request, reads: bool) -> None:
        """Report to connected nodes how far their events are stored here, if that has changed.

        `reads` is whether durable subscriptions or `keep` need them. If not, other nodes learn that once: retention
        may wait for what an earlier process reported.
        """
        for origin in present:
            reached = known_logs.of(origin)
            before = self._sent.get(origin, NOTHING_KNOWN if reads else reached)
            # Past events that are owed are still to be requested.
            owed_after = min(known_logs.owed_by(origin).values(), default=NUMBER_MAX)
            known = {each: min(offset, owed_after) for each, offset in reached.items()} if reads else NOTHING_KNOWN
            if known == before:
                continue
            with suppress(ZbusError):  # it is reported again later
                report = partial(request_page, request, origin, NO_KEYS, 0, 0, TIMEOUT_S, probe=True)
                await report(known=known, reader=self._origin, is_reading=reads)
                self._sent[origin] = known
