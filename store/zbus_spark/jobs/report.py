"""The HTML report of a rollup: one self-contained file, with a light and a dark theme, readable on a phone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus.util.atomic_file import write_atomically

from .charts import STYLE, Line, bars, lines
from .durations import milliseconds
from .rollup import ACCURACY, LATENCY_HEADER, measures, totals

POINTS_MAX = 240  # points of a line: more would not be visible
KEYS_MAX = 20

_PAGE_STYLE = """
:root{color-scheme:light dark;--text:#1c2430;--quiet:#5b6675;--ground:#fff;--panel:#f4f6f9;--rule:#d7dde6;
--first:#2563b8;--second:#b4460f;--hover:#0001}
@media(prefers-color-scheme:dark){:root{--text:#e4e9f0;--quiet:#9aa6b5;--ground:#12161c;--panel:#1b212a;--rule:#343d4a;
--first:#6ea8fe;--second:#ff9d5c;--hover:#fff2}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:70rem;font:16px/1.5 system-ui,sans-serif;color:var(--text);
background:var(--ground)}
h1{font-size:1.5rem;overflow-wrap:anywhere;margin:.5rem 0}h2{font-size:1.1rem;margin:2rem 0 .6rem}
p{margin:.4rem 0}.quiet{color:var(--quiet)}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(8rem,1fr));gap:.6rem;margin:1rem 0}
dl div{background:var(--panel);border-radius:.3rem;padding:.6rem .8rem}
dt{font-size:.8rem;color:var(--quiet)}dd{margin:0;font-size:1.25rem;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid var(--rule);font-variant-numeric:tabular-nums;
white-space:nowrap}
th:first-child,td:first-child{text-align:left;font-family:ui-monospace,monospace}
"""


class ReportData(NamedTuple):
    """The data of the page. `latency` is p50 and p99 in µs for each point in time, or None without measurements."""

    events: int
    bytes: int
    keys: int
    measured: int
    begin: datetime
    end: datetime
    point_ms: int
    rates: list[float]
    latency: list[list[float | None]]
    by_events: list[Row]
    by_bytes: list[Row]


def write_report(
    file: Path, log: str, events: DataFrame, rolled: DataFrame, window: str, latency_header: str = LATENCY_HEADER
) -> None:
    """Write the report of a rollup and its events. The file is written atomically."""
    page = render(log, window, collect(events, rolled, window, latency_header), latency_header)
    write_atomically(file, page.encode(), file.with_name(f".{file.name}.{os.getpid()}"))


def collect(events: DataFrame, rolled: DataFrame, window: str, latency_header: str) -> ReportData | None:
    """Compute the data of the page, or return None if there are no events. A line has at most `POINTS_MAX` points."""
    window_us = milliseconds("window", window) * 1000
    whole = rolled.agg(
        F.sum("events").alias("events"),
        F.sum("bytes").alias("bytes"),
        F.count_distinct("key").alias("keys"),
        F.sum("measured").alias("measured"),
        F.unix_micros(F.min("start")).alias("begin"),
        F.unix_micros(F.max("end")).alias("end"),
    ).collect()[0]
    if not whole["events"]:
        return None
    windows = (whole["end"] - whole["begin"]) // window_us
    each = -(-windows // POINTS_MAX)  # windows in one point
    points = -(-windows // each)

    def point(time: str) -> Any:
        return F.expr(f"(unix_micros({time}) - {whole['begin']}) div {each * window_us}").alias("point")

    counts = {row[0]: row[1] for row in rolled.groupBy(point("start")).agg(F.sum("events")).collect()}
    last = windows - (points - 1) * each  # the last point may have fewer windows
    seconds = [(each if index < points - 1 else last) * window_us / 1e6 for index in range(points)]
    found: dict[int, list[float | None]] = {}
    if whole["measured"]:
        latency = F.percentile_approx("latency_us", [0.5, 0.99], ACCURACY)
        timed = measures(events, latency_header).where("latency_us IS NOT NULL")
        found = {row[0]: row[1] for row in timed.groupBy(point("published_at")).agg(latency).collect()}
    by_key = totals(rolled)
    return ReportData(
        whole["events"],
        whole["bytes"],
        whole["keys"],
        whole["measured"],
        _utc(whole["begin"]),
        _utc(whole["end"]),
        each * window_us // 1000,
        [counts.get(index, 0) / seconds[index] for index in range(points)],
        [found.get(index, [None, None]) for index in range(points)],
        by_key.take(KEYS_MAX),
        by_key.orderBy(F.desc("bytes"), "key").take(KEYS_MAX),
    )


def render(log: str, window: str, data: ReportData | None, latency_header: str) -> str:
    """Return the page. Text from the log is escaped, and the page can neither load resources nor run scripts."""
    body = _body(window, data, latency_header) if data else "<p>There are no events in this range.</p>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(log)} – zbus rollup</title><style>{_PAGE_STYLE}{STYLE}</style></head>"
        f"<body><h1>{escape(log)}</h1>{body}</body></html>\n"
    )


def _body(window: str, data: ReportData, latency_header: str) -> str:
    begin, point = data.begin.timestamp(), data.point_ms / 1000
    times = [_shown(datetime.fromtimestamp(begin + index * point, UTC)) for index in range(len(data.rates))]
    cards = (("events", f"{data.events:,}"), ("payload", size(data.bytes)), ("keys", f"{data.keys:,}"))
    seconds = (data.end - data.begin).total_seconds()
    return "".join(
        (
            f'<p class="quiet">{_shown(data.begin)} to {_shown(data.end)} UTC, windows of {escape(window)}</p>',
            "<dl>",
            *(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cards),
            f"<div><dt>events per second</dt><dd>{rate(data.events / seconds)}</dd></div></dl>",
            "<h2>Events per second</h2>",
            lines("Events per second over time", [Line("events per second", data.rates)], times, rate),
            "<h2>End-to-end latency</h2>",
            _latency(data, times, latency_header),
            "<h2>Keys with the most events</h2>",
            bars([(row["key"], row["events"]) for row in data.by_events], lambda value: f"{value:,.0f}"),
            "<h2>Keys with the most bytes</h2>",
            bars([(row["key"], row["bytes"]) for row in data.by_bytes], size),
            "<h2>Keys</h2>",
            _table(data.by_events, data.keys),
        )
    )


def _latency(data: ReportData, times: Sequence[str], header: str) -> str:
    if not data.measured:
        return f"<p>No event has the header <code>{escape(header)}</code>, which is needed to measure latency.</p>"
    share = f"{data.measured:,} of {data.events:,} events have the header"
    drawn = [Line(name, [point[index] for point in data.latency]) for index, name in enumerate(("p50", "p99"))]
    return (
        f'<p class="quiet">Time from the producer\'s header to publishing; {share} <code>{escape(header)}</code>.</p>'
        f"{lines('Latency percentiles over time', drawn, times, duration)}"
    )


def _table(rows: Sequence[Row], keys: int) -> str:
    columns = (
        "key",
        "events",
        "bytes",
        "windows",
        "events/s, busiest window",
        "p50, slowest window",
        "p99, slowest window",
    )
    body = "".join(
        f"<tr><td>{escape(row['key'])}</td><td>{row['events']:,}</td><td>{row['bytes']:,}</td><td>{row['windows']:,}</td>"
        f"<td>{rate(row['rate_max'])}</td>"
        + "".join(
            f"<td>{'' if row[each] is None else duration(row[each])}</td>" for each in row.asDict() if "latency" in each
        )
        + "</tr>"
        for row in rows
    )
    more = f'<p class="quiet">and {keys - len(rows):,} other keys</p>' if keys > len(rows) else ""
    head = "".join(f"<th>{each}</th>" for each in columns)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def rate(value: float) -> str:
    """Format a number of events per second.

    >>> rate(1234.5), rate(0.25)
    ('1,234', '0.25')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def size(value: float) -> str:
    """Format a number of bytes.

    >>> size(512), size(1_500_000)
    ('512 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def duration(value_us: float) -> str:
    """Format a latency.

    >>> duration(87), duration(1500), duration(2_000_000)
    ('87 µs', '1.5 ms', '2 s')
    """
    if abs(value_us) < 1000:
        return f"{value_us:.3g} µs"
    return f"{value_us / 1000:.3g} ms" if abs(value_us) < 1_000_000 else f"{value_us / 1_000_000:,.4g} s"


def _utc(time_us: int) -> datetime:
    return datetime.fromtimestamp(time_us // 1_000_000, UTC).replace(microsecond=time_us % 1_000_000)


def _shown(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"
