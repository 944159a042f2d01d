"""The job `rollup` and its report."""

from __future__ import annotations

import random
from collections import defaultdict
from html.parser import HTMLParser
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from pipeline_support import BEGIN_NS, Stored, at, frame, plain

from zbus.errors import ConfigInvalid
from zbus_spark.jobs import rollup
from zbus_spark.jobs.charts import nice
from zbus_spark.jobs.report import POINTS_MAX, collect, render, write_report
from zbus_spark.jobs.rollup import totals

MINUTE_NS = 60_000_000_000


def shop(events: int, minutes: int, seed: int = 1) -> list[Stored]:
    dice = random.Random(seed)
    made = []
    for number in range(events):
        time_ns = BEGIN_NS + dice.randrange(minutes * MINUTE_NS)
        sent = {"sent-at-ns": str(time_ns - dice.randrange(5_000_000))} if number % 3 else {}
        key = dice.choice(["a/b", "a/c", "shop/orders/created"])
        made.append(Stored(1, number, key, time_ns, bytes(dice.randrange(50)), sent))
    return made


def expected(events: list[Stored], window_ns: int) -> list[tuple[Any, ...]]:
    """The same in plain Python."""
    windows: dict[tuple[int, str], list[Stored]] = defaultdict(list)
    for each in events:
        windows[each.published_ns // window_ns * window_ns, each.key].append(each)
    rows = []
    for (start, key), its in sorted(windows.items()):
        taken = sorted((each.published_ns - int(each.headers["sent-at-ns"])) // 1000 for each in its if each.headers)
        p50, p99 = (taken[ceil(len(taken) * share) - 1] if taken else None for share in (0.5, 0.99))
        size, rate = sum(len(each.payload) for each in its), len(its) / (window_ns / 1e9)
        rows.append((at(start), at(start + window_ns), key, len(its), size, pytest.approx(rate), p50, p99, len(taken)))
    return rows


def test_windows_equal_those_computed_from_all_events() -> None:
    events = shop(3000, minutes=7)

    found = rollup(frame(events), "2 minutes").orderBy("start", "key").collect()

    assert plain(found) == expected(events, 2 * MINUTE_NS)


def test_an_invalid_header_gives_no_latency() -> None:
    texts = ("soon", "", "1e18", "9" * 30, str(-(1 << 63)), "1.5", str(BEGIN_NS - 7999), str(BEGIN_NS + 5000))
    events = [Stored(headers={"began": text}) for text in texts]

    (row,) = rollup(frame(events), latency_header="began").collect()

    # One event took 7 µs; of one the clock was 5 µs ahead, which is shown and not hidden.
    assert (row["events"], row["measured"], row["latency_us_p50"], row["latency_us_p99"]) == (8, 2, -5, 7)


def test_nanoseconds_keep_all_their_digits() -> None:
    events = [Stored(published_ns=BEGIN_NS + MINUTE_NS - 1), Stored(published_ns=BEGIN_NS + MINUTE_NS)]
    late = [Stored(published_ns=BEGIN_NS + 1999, headers={"sent-at-ns": str(BEGIN_NS)})]

    found = rollup(frame(events + late)).orderBy("start").collect()

    assert [(row["events"], row["latency_us_p50"]) for row in found] == [(2, 1), (1, None)]


@pytest.mark.parametrize("window", ["", "a while", "0 seconds", "1 month", "-1s"])
def test_an_invalid_window_is_rejected(window: str) -> None:
    with pytest.raises(ConfigInvalid, match="not a duration"):
        rollup(frame([]), window)


class Page(HTMLParser):
    """Collects the visible text of a page, and fails on an unclosed tag."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_report_is_one_well_formed_page_with_the_metrics(tmp_path: Path) -> None:
    events = shop(600, minutes=5)
    df = frame(events)
    rolled = rollup(df).persist()
    by_key = totals(rolled).collect()

    write_report(tmp_path / "report.html", "app.db", df, rolled, "1 minute")

    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    for row in by_key:
        assert {row["key"], f"{row['events']:,}", f"{row['bytes']:,}"} <= set(page.texts)
    assert "600" in page.texts
    titles = [each for each in page.texts if ": p50 " in each]
    assert len(titles) == 5  # a point for each minute
    assert len([path for path in page.of("path") if path["d"]]) == 3  # the rate, p50 and p99
    assert not any(name in ("script", "link", "img", "iframe") for name, _ in page.tags)
    assert not any("href" in attributes or "src" in attributes for _, attributes in page.tags)
    assert "url(" not in text
    assert "prefers-color-scheme:dark" in text
    assert {"name": "viewport", "content": "width=device-width,initial-scale=1"} in page.of("meta")


def test_text_from_a_log_cannot_inject_html() -> None:
    hostile = "a/<script>alert(1)</script>\"'&/<b>"
    metrics_of = frame([Stored(key=hostile, headers={"<i>": "1"})])

    metrics = collect(metrics_of, rollup(metrics_of, latency_header="<i>"), "1 minute", "<i>")
    page = Page(render("</title><script>x</script>", "1 minute", metrics, "<i>"))
    unmeasured = Page(render("<b>", "1 minute", metrics._replace(measured=0) if metrics else None, "<script>"))

    assert hostile in page.texts
    for each in (page, unmeasured):
        assert not any(name in ("script", "b", "i") for name, _ in each.tags)


def test_a_report_of_no_events_says_so() -> None:
    nothing = frame([])

    page = Page(render("app.db", "1 minute", collect(nothing, rollup(nothing), "1 minute", "x"), "x"))

    assert "There are no events in this range." in page.texts


def test_a_long_time_range_has_a_limited_number_of_points_and_loses_no_event() -> None:
    year_ns = 365 * 24 * 60 * MINUTE_NS
    events = [Stored(published_ns=BEGIN_NS + place * year_ns // 9) for place in range(10)]
    df = frame(events)

    metrics = collect(df, rollup(df), "1 minute", "x")

    assert metrics is not None
    assert len(metrics.rates) <= POINTS_MAX
    full = sum(metrics.rates[:-1]) * metrics.point_ms / 1000
    last_s = (metrics.end - metrics.begin).total_seconds() - (len(metrics.rates) - 1) * metrics.point_ms / 1000
    assert full + metrics.rates[-1] * last_s == pytest.approx(10)


def test_an_axis_ends_at_a_round_number_over_the_highest_value() -> None:
    for value in (0.00013, 0.1, 0.3, 1, 1.01, 7, 99, 100, 101, 123_456_789):
        assert value <= nice(value) <= value * 2.5
        assert f"{nice(value):e}"[0] in "125"
