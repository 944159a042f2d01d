"""Synthetic events of a shop over an hour, for `zbus pipeline demo`. The same seed creates the same events."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from zbus.headers import JSON, encode_headers
from zbus.ports.log import Row

HOUR_NS = 3_600_000_000_000
CHUNK_ROWS = 5000
SHOPPERS = 4000

_encode = msgspec.json.Encoder().encode


class ShopPublisher(NamedTuple):
    """A publisher: its key, its share of all events, and its median latency."""

    publisher_id: int
    key: str
    share: float
    latency_us: float


SOURCES = (
    ShopPublisher(0x5A01, "shop/carts/changed", 0.30, 900),
    ShopPublisher(0x5A02, "shop/carts/changed", 0.22, 1100),
    ShopPublisher(0x5A03, "shop/orders/created", 0.14, 2500),
    ShopPublisher(0x5A04, "shop/orders/paid", 0.11, 9000),
    ShopPublisher(0x5A05, "warehouse/stock/changed", 0.13, 1500),
    ShopPublisher(0x5A06, "warehouse/parcels/sent", 0.06, 4000),
    ShopPublisher(0x5A07, "mail/receipts/sent", 0.04, 30_000),
)
LOST = range(4000, 4120)  # sequences of the second source, as if a link had been down
LATE_EVERY = 25_000  # one event in this many is stored late


def rows(events: int, begin_ns: int, seed: int = 7) -> Iterator[list[Row]]:
    """Yield `events` events over an hour in chunks: with a peak in the middle, and a period of slow payments."""
    dice = random.Random(seed)
    sequences = dict.fromkeys(SOURCES, 0)
    shares = [source.share for source in SOURCES]
    chunk: list[Row] = []
    overtaken: Row | None = None
    made = 0
    while made < events:
        source = dice.choices(SOURCES, shares)[0]
        sequence = sequences[source]
        sequences[source] += 1
        if source is SOURCES[1] and sequence in LOST:
            continue
        part = made / events
        # The inverse of a rate that is highest in the middle of the hour.
        time_ns = begin_ns + int(HOUR_NS * (part + 0.09 * math.sin(2 * math.pi * part)))
        row = _row(dice, source, sequence, time_ns, slow=0.55 < part < 0.65)
        made += 1
        if made % LATE_EVERY == 0 and overtaken is None:
            overtaken = row
            continue
        chunk.append(row)
        if overtaken is not None and overtaken.publisher_id == row.publisher_id:
            chunk.append(overtaken)
            overtaken = None
        if len(chunk) >= CHUNK_ROWS:
            yield chunk
            chunk = []
    yield chunk if overtaken is None else [*chunk, overtaken]


def _row(dice: random.Random, source: ShopPublisher, sequence: int, time_ns: int, slow: bool) -> Row:
    shopper = int(SHOPPERS * dice.random() ** 2)
    latency_us = source.latency_us * dice.lognormvariate(0, 0.5)
    if slow and source.key == "shop/orders/paid":
        latency_us *= 12
    payload = {
        "user": {"id": f"u{shopper}"},
        "order": dice.randrange(1_000_000),
        "amount_cents": dice.randrange(300, 40_000),
        "currency": "EUR",
        "items": dice.randrange(1, 9),
    }
    headers = {"session-id": f"s{shopper}", "sent-at-ns": str(time_ns - int(latency_us * 1000))}
    encoded = encode_headers(headers, None, JSON)
    return Row(source.publisher_id, sequence, time_ns, source.key, _encode(payload), encoded)
