"""`@bus.on`: a handler that runs for every event of a subscription, as long as the bus is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from zbus.errors import PayloadInvalid, SchemaInvalid, SubscriberLagged
from zbus.event import Event
from zbus.observe.records import EVENT_INVALID, EVENT_RETRY, EVENT_RETRY_LIMIT_EXCEEDED, correlated, record
from zbus.util.backoff import Backoff

from .subscriber import EventSubscriber

Handler = Callable[[Event], Awaitable[object]]
RETRY_S = (0.05, 30.0)


async def serve(
    subscription: EventSubscriber,
    handler: Handler,
    count: Callable[[str, int], None],
    uniform: Callable[[float, float], float],
    retries: int | None = None,
) -> None:
    """Hand events to `handler`, one after the other, until the subscription ends.

    A handler that raises is reported. With a durable name the same event is tried again, with pauses that grow to
    half a minute, because going on would acknowledge it; without one the next event follows. `retries` says how
    often it is tried again, in either case. `uniform` shortens each pause by chance, so that handlers that failed
    together do not try again together.
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
            with correlated(event.correlation):
                await _handle(handler, event, count, Backoff(*RETRY_S, uniform=uniform), retries)


async def _handle(
    handler: Handler, event: Event, count: Callable[[str, int], None], pauses: Backoff, retries: int | None
) -> None:
    tried = 0
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
            pause_s = pauses.next() if again else None
            again_in_s = None if pause_s is None else round(pause_s, 3)
            record(EVENT_RETRY, logging.ERROR, exc_info=error, again_in_s=again_in_s, **fields)
            if pause_s is None:
                return
        await asyncio.sleep(pause_s)
        count("redelivered", 1)
        tried += 1
