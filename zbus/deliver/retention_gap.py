"""Report of a subscription that retention has passed: the events between its position and the log's start are gone."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from zbus.errors import LogTrimmed
from zbus.event import Event
from zbus.observe.records import EVENT_GAP, record_reason

from .host import Host

GAP_KEY = "@zbus/gap"


def report_retention_gap(host: Host, keys: tuple[str, ...], durable: str | None, error: LogTrimmed) -> None:
    """Report the events that a subscription missed: with the counters, a log record, and an event on `@zbus/gap`."""
    gap: dict[str, Any] = {"keys": keys, "durable": durable, "after": error.after, "until": error.low_water}
    gap["missed"] = error.missed
    host.dispatcher.count("missed_by_retention", error.missed)
    reason = (
        "retention removed events that a subscription had not read; it continues with the oldest event that is left"
    )
    with host.runtime.running():
        record_reason(EVENT_GAP, logging.WARNING, code="gap_retention", reason=reason, **gap)
    payload = msgspec.json.encode(gap | {"open": False})
    event = Event(0, 0, host.runtime.time_ns(), GAP_KEY, payload, {"content-type": "application/json"})
    host.dispatcher.unstored([event])
