"""`@bus.on`: a handler that runs for every event of a subscription, as long as the bus is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from zbus.errors import PayloadInvalid, SchemaInvalid, SubscriberLagged
from zbus.event import Event
from zbus.observe.records import EVENT_INVALID, EVENT_RETRY, EVENT_RETRY_LIMIT_EXCEEDED, correlated, record

from .subscriber import EventSubscriber

Handler = Callable[[Event], Awaitable[object]]
RETRY_S = (0.05, 30.0)


async def serve(
    subscription: EventSubscriber, handler: Handler, count: Callable[[str, int], None], retries: int | None = None
) -> None:
    """Hand events to `handler`, one after the other, until the subscription ends.

    A handler that raises is reported. With a durable name the same event is tried again, with pauses that grow to
    half a minute, because going on would acknowledge it; without one the next event follows. `retries` says how
    often it is tried again, in either case.
    """
    if retries is None and subscription.durable is None:
        retries = 0
    async with subscription:
        while True:
            try:
                event = await subscription.next()
            except SubscriberLagged:
                continue  # recorded where it was noticed, and counted in `dropped`
            except SchemaInvalid:
                continue  # recorded and counted where it was noticed, and passed over: trying again would not help
            except PayloadInvalid as error:
                count("invalid_payloads", 1)
                record(EVENT_INVALID, logging.WARNING, reason=str(error))
                continue
            if event is None:
                return
            with correlated(event.trail):
                await _handle(handler, event, count, retries)


async def _handle(handler: Handler, event: Event, count: Callable[[str, int], None], retries: int | None) -> None:
    pause, tried = RETRY_S[0], 0
    while True:
        try:
            await handler(event)
            return
        except Exception as error:
            count("handler_errors", 1)
            again = retries is None or tried < retries
            fields: dict[str, Any] = {"key": event.key, "offset": event.offset, "tried": tried + 1}
            if not again and retries:
                count("retry_limit_exceeded", 1)
                record(EVENT_RETRY_LIMIT_EXCEEDED, logging.ERROR, exc_info=error, retries=retries, **fields)
                return
            record(EVENT_RETRY, logging.ERROR, exc_info=error, again_in_s=pause if again else None, **fields)
            if not again:
                return
        await asyncio.sleep(pause)
        count("redelivered", 1)
        pause, tried = min(RETRY_S[1], pause * 2), tried + 1
