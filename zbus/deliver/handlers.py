"""`@bus.on`: runs a handler for every event of a subscription while the bus is open."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from zbus.errors import ConfigInvalid, LogTrimmed, PayloadInvalid, SchemaInvalid, SubscriberLagged
from zbus.event import Event
from zbus.observe.records import (
    EVENT_INVALID,
    EVENT_RETRY,
    EVENT_RETRY_LIMIT_EXCEEDED,
    correlated,
    record,
    record_reason,
)
from zbus.util.backoff import Backoff

from .subscriber import EventSubscriber

Handler = Callable[[Event], Awaitable[object]]
RETRY_S = (0.05, 30.0)


def check_async(handler: object, decorator: str) -> None:
    """Raise `ConfigInvalid` if a handler is a plain function: its result could not be awaited."""
    if not callable(handler):
        raise ConfigInvalid("handler", f"{decorator} needs a function, not {handler!r}")
    if inspect.isfunction(handler) and not inspect.iscoroutinefunction(handler):
        raise ConfigInvalid("handler", f"{decorator} needs an `async def`; {handler.__qualname__} is a plain function")


async def serve(
    subscription: EventSubscriber,
    handler: Handler,
    count: Callable[[str, int], None],
    uniform: Callable[[float, float], float],
    retries: int | None = None,
) -> None:
    """Call `handler` with one event after the other until the subscription ends.

    If the handler raises, the error is logged and counted. A durable subscription retries the same event, with pauses
    that grow to half a minute, because continuing would acknowledge the event; any other continues with the next one.
    `retries` limits the number of retries in both cases. `uniform` shortens each pause at random, so that handlers
    that failed together do not retry together.
    """
    if retries is None and subscription.durable is None:
        retries = 0
    async with subscription:
        while True:
            try:
                event = await subscription.next()
            except (SubscriberLagged, LogTrimmed):
                continue  # the subscription has logged and counted it, and continues after the gap
            except SchemaInvalid:
                continue  # the validators have logged and counted it; a retry would fail again
            except PayloadInvalid as error:
                count("invalid_payloads", 1)
                record_reason(EVENT_INVALID, logging.WARNING, code="payload_invalid", reason=str(error))
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
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise  # the bus is closing; otherwise something that the handler awaited was cancelled
            count("handler_errors", 1)
            again = retries is None or tried < retries
            fields: dict[str, Any] = {"key": event.key, "offset": event.offset, "tried": tried + 1}
            if not again and retries:
                count("retry_limit_exceeded", 1)
                record(EVENT_RETRY_LIMIT_EXCEEDED, logging.ERROR, error, retries=retries, **fields)
                return
            pause_s = pauses.next() if again else None
            again_in_s = None if pause_s is None else round(pause_s, 3)
            record(EVENT_RETRY, logging.ERROR, error, again_in_s=again_in_s, **fields)
            if pause_s is None:
                return
        await asyncio.sleep(pause_s)
        count("redelivered", 1)
        tried += 1


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
