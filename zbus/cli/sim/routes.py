"""`zbus sim routes`: which event reaches which subscriber, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, note, show, write


def routes(
    scenario: Annotated[Path, typer.Argument(help="TOML file with nodes, subscriptions and events.")],
    only_wrong: Annotated[bool, typer.Option("--only-wrong", help="Show only what is not as expected.")] = False,
    json: JsonOption = False,
) -> None:
    """Show which event reaches which subscriber, and why or why not. Exit code 1 if that is not as expected."""
    from zbus.sim.scenarios.declared import load_declared
    from zbus.sim.scenarios.routes import find_routes

    report = find_routes(load_declared(scenario))
    shown = [each for each in report.routes if each.wrong or not only_wrong]
    if json:
        for each in shown:
            write(encode_json(_fields(each)))
    elif shown:
        table = Table("event", "from", "key", "subscription", "node", "delivered", "why")
        for each in shown:
            place = (str(each.event), each.source, each.key, each.subscription, each.node)
            table.add_row(*place, _delivered(each), each.why)
        show(table)
    for difference in report.differences:
        note(f"zbus: {difference}")
    if report.differences:
        raise typer.Exit(1)


def _delivered(route: Any) -> str:
    said = "yes" if route.delivered else "no"
    if route.disagrees:
        return f"{said} (defect)"
    if route.wrong:
        return f"{said} (not expected)" if route.delivered else f"{said} (expected)"
    return said


def _fields(route: Any) -> dict[str, Any]:
    fields = route._asdict() | {"wrong": route.wrong}
    return {{"source": "from"}.get(name, name): value for name, value in fields.items()}
