"""Frames of `zbus top` from the event stream `/api/live` of a running `zbus serve`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Any

import msgspec

from zbus.util.mailbox import Mailbox

from .counts import Rate
from .frame import CursorLag, Frame, KeyRate, NodeSeen, Quantiles, dropped_of
from .live_feed import LiveFeed

WAITING_MAX = 10

Found = dict[str, Any] | str | Exception


class UrlFrames:
    """Frames with the metrics of a server. Only the rate of drops is calculated here."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url, self._token = url, token
        self._dropped = Rate()
        self._first = True

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Yield one frame per second until the caller closes the generator."""
        waiting = asyncio.Queue[Found](WAITING_MAX)

        def take(frames: list[Found]) -> None:
            for found in frames:
                if waiting.full():
                    waiting.get_nowait()  # the terminal is stopped: keep only the newest frames
                waiting.put_nowait(found)

        mailbox = Mailbox[Found](asyncio.get_running_loop(), take)
        feed, last = LiveFeed(self._url, self._token, mailbox.post), Frame("", self._url)
        feed.start()
        try:
            while True:
                found = await waiting.get()
                if isinstance(found, Exception):
                    raise found
                if isinstance(found, str):
                    self._first = True  # counts of the outage are unknown, so that the next rates would be wrong
                    yield msgspec.structs.replace(last, trouble=found)
                    continue
                last = self._frame(found)
                if self._first:  # the first frame has no rates yet
                    self._first = False
                    continue
                yield last
        finally:
            feed.close()

    def _frame(self, sent: dict[str, Any]) -> Frame:
        """Build a frame from an object of any version of the server: missing fields stay unknown."""
        stats, rates, latency = _dict(sent, "stats"), _dict(sent, "rates"), _dict(sent, "latency")
        log, dropped = _dict(stats, "log"), dropped_of(stats)
        at = sent.get("at")
        return Frame(
            at=str(at),
            source=self._url,
            head=log.get("head"),
            log_bytes=log.get("bytes"),
            published=stats.get("published"),
            delivered=stats.get("delivered"),
            dropped=dropped,
            published_per_s=rates.get("published_per_s"),
            delivered_per_s=rates.get("delivered_per_s"),
            dropped_per_s=self._dropped.per_s(dropped, _seconds(at)) or 0.0,
            subscriptions=stats.get("subscriptions"),
            commit_ms=_quantiles(latency.get("commit_ms")),
            delivery_ms=_quantiles(latency.get("delivery_ms")),
            topics=tuple(
                KeyRate(str(each.get("key")), int(each.get("events") or 0), float(each.get("events_per_s") or 0))
                for each in _dicts(sent, "topics")
            ),
            cursors=tuple(
                CursorLag(str(each.get("name")), int(each.get("lag") or 0)) for each in _dicts(sent, "cursors")
            ),
            nodes=tuple(
                NodeSeen(
                    str(each.get("name")),
                    bool(each.get("alive")),
                    bool(each.get("has_log")),
                    str(each.get("transport") or ""),
                )
                for each in _dicts(sent, "nodes")
                if not each.get("is_self")
            ),
        )


def _seconds(at: Any) -> float | None:
    try:
        return datetime.fromisoformat(at).timestamp()
    except (TypeError, ValueError):
        return None


def _dict(of: dict[str, Any], name: str) -> dict[str, Any]:
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def _dicts(of: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = of.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _quantiles(found: Any) -> Quantiles | None:
    if not isinstance(found, dict) or found.get("p50") is None or found.get("p99") is None:
        return None
    return Quantiles(float(found["p50"]), float(found["p99"]))
