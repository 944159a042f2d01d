"""A frame as a full terminal screen, or as one plain line."""

from __future__ import annotations

from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zbus.cli.render.eventline import printable

from .frame import Frame, Quantiles

METRIC_COLUMNS = 26  # width of one metric, in terminal columns
SIDE_LINES_MAX = 8
LINE_TOPICS = 3
UNKNOWN = "-"


def screen(frame: Frame, width: int, height: int, keys: str, *, wide: bool = True) -> RenderableType:
    """Return as much of a frame as fits the screen. `keys` is the hint about the keyboard.

    With `wide`, the tables fill the terminal, so that columns keep their place from one frame to the next.
    """
    metrics = _metrics(frame, max(1, width // METRIC_COLUMNS))
    side = min(SIDE_LINES_MAX, max(len(frame.cursors), len(frame.nodes)) + 1) if frame.cursors or frame.nodes else 0
    used = 1 + metrics.row_count + 2 + (side + 1 if side else 0)  # title, metrics, blank line, heading, side tables
    rows = max(1, height - used - 1)
    parts: list[RenderableType] = [_title(frame, keys), metrics, Text(), _topics(frame, rows, wide)]
    if side:
        parts += [Text(), _side(frame, side - 1, wide)]
    return Group(*parts)


def line(frame: Frame) -> str:
    """Return a frame as one line, for a file or a pipe."""
    parts = [
        f"{frame.at} {printable(frame.source)}",
        f"head {_count(frame.head)}",
        f"published {_rate(frame.published_per_s)}/s",
        f"delivered {_rate(frame.delivered_per_s)}/s",
        f"dropped {_rate(frame.dropped_per_s)}/s",
        f"delivery {_latency(frame.delivery_ms)}",
    ]
    if frame.cursors:
        most = max(frame.cursors, key=lambda each: each.lag)
        parts.append(f"lag {most.lag:,} ({printable(most.name)})")
    busy = [f"{printable(each.key)} {each.events_per_s:,.1f}/s" for each in frame.topics[:LINE_TOPICS]]
    parts += [f"keys {', '.join(busy)}"] if busy else []
    parts += [printable(frame.trouble)] if frame.trouble else []
    return "; ".join(parts)


def _title(frame: Frame, keys: str) -> Text:
    """Return the title line. The source is last, because it may be long and is then truncated."""
    title = Text("zbus top", "bold", no_wrap=True, overflow="ellipsis").append(f"  {_clock(frame.at)}  {keys}", "dim")
    if frame.trouble:
        title.append(f"  {printable(frame.trouble)}", "bold red")
    return title.append(f"  {printable(frame.source)}", "bold green")


def _metrics(frame: Frame, columns: int) -> Table:
    """Return a table of the metrics that are known. The first three are always shown."""
    size = UNKNOWN if frame.log_bytes is None else _size(frame.log_bytes)
    shown = [
        ("published/s", _rate(frame.published_per_s), "bold cyan"),
        ("delivered/s", _rate(frame.delivered_per_s), "bold cyan"),
        ("dropped/s", _rate(frame.dropped_per_s), "bold red" if frame.dropped_per_s else "bold"),
    ]
    more = [
        ("log head", _count(frame.head)),
        ("log size", size),
        ("subscriptions", _count(frame.subscriptions)),
        ("dropped", _count(frame.dropped)),
        ("commit", _latency(frame.commit_ms)),
        ("delivery", _latency(frame.delivery_ms)),
    ]
    shown += [(name, value, "bold") for name, value in more if value != UNKNOWN]
    table = Table.grid(padding=(0, 2, 0, 0))
    cells = [Text(f"{name} ", "dim", no_wrap=True).append(value, style) for name, value, style in shown]
    for at in range(0, len(cells), columns):
        table.add_row(*cells[at : at + columns])
    return table


def _topics(frame: Frame, rows: int, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=wide)
    table.add_column("key", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("events/s", justify="right", no_wrap=True)
    table.add_column("events", justify="right", no_wrap=True)
    for each in frame.topics[:rows]:
        busy = "" if each.events_per_s else "dim"
        table.add_row(
            Text(printable(each.key), busy or "green"),
            Text(f"{each.events_per_s:,.1f}", busy),
            Text(f"{each.events:,}", busy),
        )
    return table


def _side(frame: Frame, rows: int, wide: bool) -> Table:
    """Return the durable subscriptions and the nodes, side by side."""
    both = Table.grid(expand=wide, padding=(0, 2))
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    cursors = Table(box=None, pad_edge=False, header_style="dim", expand=wide)
    cursors.add_column("durable subscription", ratio=1, no_wrap=True, overflow="ellipsis")
    cursors.add_column("behind", justify="right", no_wrap=True)
    for cursor in sorted(frame.cursors, key=lambda each: (-each.lag, each.name))[:rows]:
        cursors.add_row(Text(printable(cursor.name)), Text(f"{cursor.lag:,}", "bold yellow" if cursor.lag else ""))
    nodes = Table(box=None, pad_edge=False, header_style="dim", expand=wide)
    nodes.add_column("node", ratio=1, no_wrap=True, overflow="ellipsis")
    nodes.add_column("log", no_wrap=True)
    nodes.add_column("state", no_wrap=True)
    for node in sorted(frame.nodes, key=lambda each: (not each.alive, each.name))[:rows]:
        state = Text("here", "green") if node.alive else Text("gone", "bold red")
        nodes.add_row(Text(printable(node.name)), "yes" if node.has_log else "no", state)
    both.add_row(cursors if frame.cursors else "", nodes if frame.nodes else "")
    return both


def _count(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}"


def _rate(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:,.1f}"


def _latency(found: Quantiles | None) -> str:
    return UNKNOWN if found is None else f"{found.p50:,.1f}/{found.p99:,.1f} ms"


def _size(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def _clock(at: str) -> str:
    try:
        return f"{datetime.fromisoformat(at).astimezone():%H:%M:%S}"
    except ValueError:
        return ""
