"""Tables of rows: for a terminal, and as GitHub markdown."""

from __future__ import annotations

from collections.abc import Sequence

from _harness import Row
from rich.table import Table

HEADINGS = ("benchmark", "zbus", "peer", "ratio", "target", "met", "p50 / p99, zbus", "p50 / p99, peer")


def table(rows: Sequence[Row]) -> Table:
    """Return a table for a terminal."""
    made = Table(*HEADINGS, title="zbus compared with its peers", show_lines=True)
    for row in rows:
        colour = "green" if row.met else "red"
        title, zbus, peer, ratio, target, met, *latencies = cells(row)
        made.add_row(title, zbus, peer, ratio, target, f"[{colour}]{met}[/]", *latencies)
    return made


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as markdown for the README."""
    lines = [" | ".join(HEADINGS), " | ".join(["---"] * len(HEADINGS))]
    lines += [" | ".join(cells(row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row as text."""
    return (
        row.title,
        _amount(row.zbus, row.unit),
        f"{_amount(row.peer, row.unit)} ({row.peer_name})",
        f"{row.ratio:.2f}",
        _target(row),
        _met(row),
        _latency(row, "zbus"),
        _latency(row, "peer"),
    )


def _met(row: Row) -> str:
    if row.broken:
        return f"no, {row.broken}"
    return "yes" if row.met else f"no, {row.reached:.3g} of {row.target:g}"


def _target(row: Row) -> str:
    sign = "≥" if row.target_is == "ratio at least" else "≤"
    if row.target_is == "more than peer at most":
        return f"{sign} {row.target:g} more"
    if row.target_is == "zbus at most":
        return f"{sign} {row.target:g} {row.unit}"
    return f"{sign} {row.target:g}×"


def _amount(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _latency(row: Row, side: str) -> str:
    p50, p99 = row.p50_us.get(side), row.p99_us.get(side)
    return "" if p50 is None or p99 is None else f"{_us(p50)} / {_us(p99)}"


def _us(value: float) -> str:
    if value < 1000:
        return f"{value:.3g} µs"
    return f"{value / 1000:.3g} ms" if value < 1_000_000 else f"{value / 1_000_000:.3g} s"
