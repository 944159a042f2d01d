"""Charts as self-contained HTML: lines in SVG with text beside them, so that both are readable on any screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 1000.0, 200.0

STYLE = """
.chart{display:grid;grid-template-columns:auto 1fr;gap:.2rem .6rem;margin:0}
.chart .scale{display:flex;flex-direction:column;justify-content:space-between;text-align:right}
.chart .scale,.chart .times,.legend{font-size:.8rem;color:var(--quiet);font-variant-numeric:tabular-nums}
.chart .times{grid-column:2;display:flex;justify-content:space-between;gap:1rem}
.chart svg{width:100%;height:13rem;display:block;background:var(--panel);border-radius:.3rem}
.chart path{fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.chart .rule{stroke:var(--rule);stroke-width:1;vector-effect:non-scaling-stroke}
.chart .hit{fill:transparent}.chart .hit:hover{fill:var(--hover)}
.first{stroke:var(--first)}.second{stroke:var(--second)}
.legend span{margin-right:1rem}.legend svg{width:1.2rem;height:.6rem;margin-right:.3rem}.legend line{stroke-width:3}
.bars{display:grid;grid-template-columns:minmax(6rem,auto) 1fr auto;gap:.35rem .6rem;align-items:center;margin:0}
.bars .name{overflow-wrap:anywhere;font-family:ui-monospace,monospace;font-size:.85rem;max-width:24rem}
.bars .value{text-align:right;font-variant-numeric:tabular-nums;font-size:.85rem}
.bars svg{width:100%;height:.9rem;display:block}.bars rect{fill:var(--first)}
"""


class Line(NamedTuple):
    """One line of a chart: its name and its values, with None for a missing value."""

    name: str
    values: Sequence[float | None]


def nice(value: float) -> float:
    """Round a value up to a number that is easy to read on an axis.

    >>> nice(37), nice(0.0123), nice(0)
    (50.0, 0.02, 1.0)
    """
    if value <= 0:
        return 1.0
    step = 1.0
    while step > value:
        step /= 10
    while step * 10 <= value:
        step *= 10
    return next(float(f"{step * each:g}") for each in (1, 2, 5, 10) if step * each >= value)


def lines(label: str, drawn: Sequence[Line], times: Sequence[str], shown: Callable[[float], str]) -> str:
    """Return a chart of one or two lines over the same times."""
    points = len(times)
    top = nice(max((value for line in drawn for value in line.values if value is not None), default=0.0))
    step = _WIDTH / max(1, points)
    paths = [
        f'<path class="{style}" d="{_path(line.values, step, top)}"/>'
        for line, style in zip(drawn, ("first", "second"), strict=False)
    ]
    rules = "".join(
        f'<line class="rule" x1="0" x2="{_WIDTH:g}" y1="{y:g}" y2="{y:g}"/>' for y in (_HEIGHT / 2, _HEIGHT)
    )
    hits = "".join(
        f'<rect class="hit" x="{index * step:.2f}" y="0" width="{step:.2f}" height="{_HEIGHT:g}">'
        f"<title>{escape(_tooltip(index, time, drawn, shown))}</title></rect>"
        for index, time in enumerate(times)
    )
    ends = dict.fromkeys((times[0], times[-1])) if times else {}
    return (
        f'<div class="chart"><div class="scale"><span>{escape(shown(top))}</span><span>{escape(shown(top / 2))}</span>'
        f'<span>0</span></div><svg role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
        f'preserveAspectRatio="none">{rules}{"".join(paths)}{hits}</svg>'
        f'<div class="times">{"".join(f"<span>{escape(each)}</span>" for each in ends)}</div></div>{_legend(drawn)}'
    )


def bars(rows: Sequence[tuple[str, float]], shown: Callable[[float], str]) -> str:
    """Return a bar chart with one bar for each name."""
    top = max((value for _, value in rows), default=0.0) or 1.0
    drawn = "".join(
        f'<span class="name">{escape(name)}</span>'
        f'<svg aria-hidden="true"><rect width="{100 * value / top:.2f}%" height="100%" rx="2"/></svg>'
        f'<span class="value">{escape(shown(value))}</span>'
        for name, value in rows
    )
    return f'<div class="bars">{drawn}</div>'


def _path(values: Sequence[float | None], step: float, top: float) -> str:
    """Return an SVG path that joins adjacent values. A value without neighbours is a dot."""
    drawn: list[str] = []
    pen_down = False
    for index, value in enumerate(values):
        if value is None:
            pen_down = False
            continue
        x, y = (index + 0.5) * step, _HEIGHT * (1 - max(0.0, value) / top)
        drawn.append(f"L{x:.2f} {y:.2f}" if pen_down else f"M{x:.2f} {y:.2f}h0")
        pen_down = True
    return "".join(drawn)


def _tooltip(index: int, time: str, drawn: Sequence[Line], shown: Callable[[float], str]) -> str:
    values = [(line.name, line.values[index]) for line in drawn]
    return f"{time}: " + ", ".join(f"{name} {'–' if value is None else shown(value)}" for name, value in values)


def _legend(drawn: Sequence[Line]) -> str:
    if len(drawn) < 2:
        return ""
    mark = '<svg viewBox="0 0 12 6" aria-hidden="true"><line class="{}" x1="0" x2="12" y1="3" y2="3"/></svg>'
    named = zip(drawn, ("first", "second"), strict=False)
    return (
        '<p class="legend">'
        + "".join(f"<span>{mark.format(style)}{escape(line.name)}</span>" for line, style in named)
        + "</p>"
    )
