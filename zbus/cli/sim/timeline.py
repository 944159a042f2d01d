"""The timeline of one run: a line for each step, a column for each node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbus.sim.scenarios.runner import Result
    from zbus.sim.trace import Trace

COLUMN = 34
ON_THE_NETWORK = ("arrived", "sent", "duplicated", "dropped", "cut", "request", "reply", "end")


def timeline(name: str, result: Result, trace: Trace, frames: bool) -> str:
    """Return the timeline of a run as text. Without `frames`, what happens on the network is left out."""
    nodes = sorted({step.node for step in trace.steps if step.node})
    lines = [f"{name}, seed {result.seed}, trace {result.hash}", _row("seconds", nodes, {node: node for node in nodes})]
    for step in trace.steps:
        if not frames and step.kind.partition(" ")[0] in ON_THE_NETWORK:
            continue
        text = " ".join([step.kind, *[_text(value) for value in step.values]])
        if step.node:
            lines.append(_row(f"{step.at_s:.6f}", nodes, {step.node: text}))
        else:
            lines.append(f"{step.at_s:>12.6f}  -- {text}")
    lines += [f"BROKEN {violation}" for violation in result.violations]
    return "".join(f"{line}\n" for line in lines)


def _row(time: str, nodes: list[str], texts: dict[str, str]) -> str:
    """Return a line with each text in its node's column. A text that is too long continues to the right."""
    line = f"{time:>12}  "
    for at, node in enumerate(nodes):
        if node in texts:
            line = line.ljust(14 + at * COLUMN) + texts[node]
    return line.rstrip()


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return f"[{len(value)} bytes]"
    if isinstance(value, int) and value > 1 << 40:
        return f"{value:x}"[:6]
    return str(value)
