"""A durable name as one subscription uses it: claimed, acknowledged, given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zbus.errors import ZbusError
from zbus.ports.log import Cursors, Lease
from zbus.util.mailbox import Calls

STORE_S = 0.02

Run = Callable[..., "asyncio.Future[Any]"]


class Acknowledgements:
    """Positions only rise. Those that nobody awaits are stored together, some milliseconds later."""

    def __init__(self, cursors: Cursors, run: Run, name: str, keys: Sequence[str]) -> None:
        self.name, self._cursors, self._run, self._keys = name, cursors, run, keys
        self.acknowledged = 0
        self._claiming: asyncio.Future[Lease] | None = None
        self._token = ""
        self._timer: asyncio.TimerHandle | None = None
        self._calls: Calls | None = None  # once a position is awaited

    async def claim(self, start: int) -> int:
        """Take the name and return its position, which is `start` where it is new.

        Cancelled, the claim goes on; the next attempt finds it, and `give_back` ends it.
        """
        if self._claiming is None:
            self._claiming = self._run(self._cursors.claim, self.name, self._keys, start)
        try:
            self._token, self.acknowledged = await asyncio.shield(self._claiming)
        except ZbusError:
            self._claiming = None
            raise
        return self.acknowledged

    def handled(self, offset: int) -> None:
        """The reader asked for more: everything up to `offset` is acknowledged, and stored soon."""
        if offset > self.acknowledged and self._claiming is not None:
            self.acknowledged = offset
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(STORE_S, self._store)

    async def acknowledge(self, offset: int) -> None:
        """Return once the position is on disk. Cancelled, it may or may not have been stored."""
        loop = asyncio.get_running_loop()
        calls = self._calls = self._calls or Calls(loop)
        stored: asyncio.Future[None] = loop.create_future()

        def settle(error: ZbusError | None) -> None:
            if not stored.done():
                stored.set_exception(error) if error is not None else stored.set_result(None)

        self.acknowledged = max(self.acknowledged, offset)
        self._cursors.advance(self.name, self._token, offset, partial(calls.soon, settle))
        await stored

    async def give_back(self) -> None:
        """Store the position and let others have the name. Cancelled, it goes on in the background."""
        if self._claiming is not None:
            claiming, self._claiming = self._claiming, None
            await asyncio.shield(asyncio.ensure_future(self._give_back(claiming)))

    async def _give_back(self, claiming: asyncio.Future[Lease]) -> None:
        try:
            token, claimed = await claiming
        except ZbusError:
            return
        if self.acknowledged > claimed:
            self._store()
        await self._run(self._cursors.release, self.name, token)

    def _store(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._cursors.advance(self.name, self._token, self.acknowledged)
