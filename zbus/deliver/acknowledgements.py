"""The position of a durable subscription: claimed, advanced by acknowledgements, released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zbus.errors import CursorError, WrongLoop, ZbusError
from zbus.keys import includes
from zbus.observe.records import record_reason
from zbus.ports.log import Cursors, Lease
from zbus.util.mailbox import Calls
from zbus.util.runtime import Runtime

STORE_S = 0.02

Run = Callable[..., "asyncio.Future[Any]"]


class Acknowledgements:
    """Advances one cursor. Positions only rise. Those that no caller awaits are stored together after `STORE_S`."""

    def __init__(self, cursors: Cursors, run: Run, name: str, keys: Sequence[str], runtime: Runtime) -> None:
        self.name, self._cursors, self._run, self._keys, self._runtime = name, cursors, run, keys, runtime
        self._loop = asyncio.get_running_loop()
        self.acknowledged = 0
        self.is_new = False  # whether the name did not exist before it was claimed
        self._claiming: asyncio.Future[Lease] | None = None
        self._token = ""
        self._timer: asyncio.TimerHandle | None = None
        self._lost: CursorError | None = None
        self._calls: Calls | None = None  # once a position is stored

    async def claim(self, start: int) -> int:
        """Claim the name and return its position. A new name starts at `start`.

        If cancelled, the claim continues in the background; the next call reuses it, and `release` ends it.
        """
        if self._claiming is None:
            self._claiming = self._run(self._cursors.claim, self.name, self._keys, start)
        try:
            lease = await asyncio.shield(self._claiming)
        except ZbusError:
            self._claiming = None
            raise
        self._token, self.acknowledged = lease.token, lease.offset
        self.is_new = not lease.keys
        self._report_added_keys(lease)
        return self.acknowledged

    def handled(self, offset: int) -> None:
        """Acknowledge everything up to `offset`, because the subscriber asked for the next event. Stored soon.

        Raises `CursorError` if the lease was lost: another subscriber then receives the same events.
        """
        if self._lost is not None:
            raise CursorError(*self._lost.args)
        if offset > self.acknowledged and self._claiming is not None:
            self.acknowledged = offset
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(STORE_S, self._store)

    async def acknowledge(self, offset: int) -> None:
        """Acknowledge everything up to `offset`; return when it is on disk. If cancelled, it may have been stored."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise WrongLoop("acknowledge")
        stored: asyncio.Future[None] = loop.create_future()

        def settle(error: ZbusError | None) -> None:
            if not stored.done():
                stored.set_exception(error) if error is not None else stored.set_result(None)

        self.acknowledged = max(self.acknowledged, offset)
        self._cursors.advance(self.name, self._token, offset, partial(self._on_loop().soon, settle))
        await stored

    async def release(self) -> None:
        """Store the position and release the name. If cancelled, this continues in the background."""
        if self._claiming is not None:
            claiming, self._claiming = self._claiming, None
            await asyncio.shield(asyncio.ensure_future(self._release(claiming)))

    async def _release(self, claiming: asyncio.Future[Lease]) -> None:
        try:
            token, claimed, _ = await claiming
        except ZbusError:
            return
        if self.acknowledged > claimed:
            self._store()
        await self._run(self._cursors.release, self.name, token)

    def _report_added_keys(self, lease: Lease) -> None:
        """Warn if the position was reached without some of the key expressions: it says nothing about their events."""
        added = [each for each in self._keys if not any(includes(known, each) for known in lease.keys)]
        if lease.keys and lease.offset and added:
            reason = (
                f"the durable subscription {self.name!r} did not have the key expressions {', '.join(added)} before: "
                f"their events up to offset {lease.offset} are not delivered. To receive them, use another name, or "
                "move its position: zbus log cursors LOG --reset NAME --to OFFSET"
            )
            name = self.name
            with self._runtime.running():
                record_reason("DURABLE_KEYS_ADDED", logging.WARNING, code="keys_added", reason=reason, durable=name)

    def _store(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._cursors.advance(
            self.name, self._token, self.acknowledged, partial(self._on_loop().soon, self._note_result)
        )

    def _note_result(self, error: ZbusError | None) -> None:
        if isinstance(error, CursorError) and self._claiming is not None:
            self._lost = error

    def _on_loop(self) -> Calls:
        if self._calls is None:
            self._calls = Calls(asyncio.get_running_loop())
        return self._calls
