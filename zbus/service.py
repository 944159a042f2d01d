"""`@bus.on`: a handler that runs for every event of a subscription, as long as the bus is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .errors import PayloadInvalid, SchemaInvalid, SubscriberLagged
from .event import Event
from .records import EVENT_INVALID, EVENT_RETRY, record
from .subscriber import EventSubscriber

Handler = Callable[[Event], Awaitable[object]]
RETRY_S = (0.05, 30.0)


async def serve(subscription: EventSubscriber, handler: Handler, count: Callable[[str, int], None]) -> None:
    """Hand events to `handler`, one after the other, until the subscription ends.

    A handler that raises is reported. With a durable name the same event is tried again, with pauses
    that grow to half a minute, because going on would acknowledge it; without one the next event follows.
    """
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
            await _handle(subscription, handler, event, count)


async def _handle(
    subscription: EventSubscriber, handler: Handler, event: Event, count: Callable[[str, int], None]
) -> None:
    pause = RETRY_S[0]
    while True:
        try:
            await handler(event)
            return
        except Exception as error:
            count("handler_errors", 1)
            again = subscription.durable is not None
            fields: dict[str, Any] = {"key": event.key, "offset": event.offset, "again_in_s": pause if again else None}
            record(EVENT_RETRY, logging.ERROR, exc_info=error, **fields)
            if not again:
                return
        await asyncio.sleep(pause)
        pause = min(RETRY_S[1], pause * 2)
