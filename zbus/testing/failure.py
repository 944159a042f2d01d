"""The report of a failed world: what was broken, by which faults, and the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbus.sim import World

SHOWN_VIOLATIONS = 20
LINE = 160  # a log record may be long


def explain(world: World, test: str, lines: int) -> str:
    """Return the text of a failure. `test` is the argument of pytest that selects the test."""
    return "\n".join(_explained(world, test, lines))


def _explained(world: World, test: str, lines: int) -> Iterator[str]:
    yield f"seed {world.seed}, {world.now:.3f} virtual seconds, trace {world.trace.hash}"
    yield f"repeat it: pytest {shlex.quote(test)} --zbus-seed {world.seed}"
    violations = world.ledger.violations
    if violations:
        yield "broken invariants:"
        yield from (f"  {each}" for each in violations[:SHOWN_VIOLATIONS])
        if len(violations) > SHOWN_VIOLATIONS:
            yield f"  and {len(violations) - SHOWN_VIOLATIONS} more"
    if world.choices:
        yield "choices: " + ", ".join(f"{name} {number}" for name, number in world.choices.items())
    yield from _faults(world)
    yield from _steps(world, lines)


def _faults(world: World) -> Iterator[str]:
    plan = world.plan
    if plan is not None:
        drop, duplicate, (_, delay_s) = plan.conditions.drop, plan.conditions.duplicate, plan.conditions.delay_s
        yield f"network: {drop:.0%} dropped, {duplicate:.0%} duplicated, delays up to {delay_s * 1000:g} ms"
        yield "faults of the plan:" if plan.faults else "faults of the plan: none"
        yield from (f"  {fault}" for fault in plan.faults)
    if world.faults_injected:
        counts = ", ".join(f"{kind} {number}" for kind, number in world.faults_injected.items())
        yield f"faults that happened: {counts}"


def _steps(world: World, lines: int) -> Iterator[str]:
    """Return the steps that lead to the first broken invariant, or to the end."""
    steps = [step for step in world.trace.steps if not step.is_frame]
    broken = next((number for number, step in enumerate(steps, 1) if step.kind == "broken"), len(steps))
    shown = steps[:broken][-lines:]
    if shown:
        yield f"the last {len(shown)} steps before it, without frames on the network (--zbus-trace N shows more):"
        yield from (_short(f"  {step}") for step in shown)


def _short(line: str) -> str:
    return line if len(line) <= LINE else f"{line[: LINE - 1]}…"
