"""`zbus demo`: an embedded bus at work, with a subscriber that is killed; it ends with what was lost."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zbus.cli.failures import ERROR
from zbus.cli.loop import run
from zbus.cli.render.output import is_terminal, note, show, write

from .play import FAULTS, FLOOD_BATCH_EVENTS, Play

STALL_S = 60.0  # without any progress it gives up; the longest wait is for the child process to start
LIMIT_S = 240.0  # and with it too, in the end
TICK_S = 0.25
REPORT_S = 1.0


def demo(
    seconds: Annotated[float, typer.Option(min=1, max=6, help="How long to publish.")] = 4.0,
    fault: Annotated[
        str, typer.Option(hidden=True, help="Break something, to see that the demo notices: skip or forget.")
    ] = "",
) -> None:
    """Publish, deliver, kill -9 a durable subscriber, resume it, publish at full speed, replay by time; then compare.

    It takes about ten seconds, uses a temporary folder, opens no socket, and exits with 1 if anything was lost.
    """
    if fault not in FAULTS:
        raise typer.BadParameter(f"{fault!r} is none of {', '.join(FAULTS[1:])}", param_hint="--fault")
    with tempfile.TemporaryDirectory(prefix="zbus-demo-") as folder:
        try:
            play = run(_run(Path(folder), seconds, fault))
        except TimeoutError as error:
            note(f"zbus: {error}")
            raise typer.Exit(ERROR) from None
    show(_table(play))
    lost, wrong = play.ledger.lost, play.ledger.wrong
    for promise in wrong:
        note(f"zbus: {promise}")
    if lost:
        note(f"zbus: {len(lost)} events were lost")
    if lost or wrong:
        raise typer.Exit(ERROR)
    write(b"nothing was lost\n")


async def _run(folder: Path, seconds: float, fault: str) -> Play:
    """The play, with a live view on a terminal and a line a second where that is none."""
    begun = time.perf_counter()
    console = Console() if is_terminal() else None

    def say(text: str) -> None:
        line = f"{time.perf_counter() - begun:5.2f} s  {text}"
        console.print(line, highlight=False, markup=False) if console is not None else write(f"{line}\n".encode())

    play = Play(folder, say, seconds, fault)
    if console is not None:
        with Live(get_renderable=lambda: _view(play), console=console, transient=True, refresh_per_second=8):
            await _while_it_progresses(play)
    else:
        reporting = asyncio.create_task(_report(play, say))
        try:
            await _while_it_progresses(play)
        finally:
            reporting.cancel()
    return play


async def _while_it_progresses(play: Play) -> None:
    """Run the play. Raises `TimeoutError` if it stops making progress, or has not ended in the end.

    Ticks are counted, not seconds: while this process does not run at all, no progress can be seen.
    """
    playing = asyncio.create_task(play.run())
    progress, quiet = play.progress, 0
    try:
        for _ in range(round(LIMIT_S / TICK_S)):
            done, _ = await asyncio.wait([playing], timeout=TICK_S)
            if done:
                return await playing
            quiet = quiet + 1 if play.progress == progress else 0
            progress = play.progress
            if quiet * TICK_S >= STALL_S:
                raise TimeoutError(f"the demo made no progress for {STALL_S:g} s")
        raise TimeoutError(f"the demo did not end within {LIMIT_S:g} s")
    finally:
        playing.cancel()
        await asyncio.wait([playing])


async def _report(play: Play, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        if play.ledger.acknowledged:
            say(", ".join(f"{name} {events:,}" for name, events in _counts(play).items()))


def _counts(play: Play) -> dict[str, int]:
    return {
        "published and on disk": len(play.ledger.acknowledged) + len(play.ledger.flood),
        "delivered here": play.ledger.delivered,
        "handled in the other process": len(play.worker.handled),
    }


def _view(play: Play) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, events in _counts(play).items():
        table.add_row(name, Text(f"{events:,}", "bold cyan"))
    return table


def _table(play: Play) -> Table:
    ledger, seconds = play.ledger, play.seconds
    table = Table("", "events", "per second", title="zbus demo", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, events: int, phase: str | None = None) -> None:
        table.add_row(name, f"{events:,}", f"{events / seconds[phase]:,.0f}" if phase else "")

    row("published", len(ledger.published), "publishing")
    row("acknowledged: on disk", len(ledger.acknowledged), "publishing")
    row("delivered to 4 subscribers here", ledger.delivered, "delivering")
    row("handled by the durable one, killed once", len(ledger.handled), "handling")
    row("acknowledged by the durable one", play.worker.acknowledged)
    row("redelivered to it, not acknowledged before", ledger.redelivered)
    row("seen again after it had acknowledged", len(ledger.seen_again))
    row(f"published at full speed, in batches of {FLOOD_BATCH_EVENTS:,}", len(ledger.flood), "flood")
    row("replayed from the moment of the kill on", len(ledger.replayed), "replaying")
    row("lost", len(ledger.lost))
    return table
