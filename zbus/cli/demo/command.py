"""`zbus demo`: an embedded bus with a durable subscriber that is killed, and a final count of lost events."""

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

STALL_S = 60.0  # time limit without progress; the longest wait is for the child process to start
LIMIT_S = 240.0  # time limit even with progress
TICK_S = 0.25
REPORT_S = 1.0


def demo(
    seconds: Annotated[float, typer.Option(min=1, max=6, metavar="SECONDS", help="Publish for this long.")] = 4.0,
    fault: Annotated[
        str, typer.Option(hidden=True, help="Inject a fault that the demo must detect: skip or forget.")
    ] = "",
) -> None:
    """Publish, deliver, kill -9 a durable subscriber, resume it, publish at full speed, replay by time; then compare.

    It takes about ten seconds, uses a temporary folder, opens no socket, and exits with 1 if an event was lost.
    """
    if fault not in FAULTS:
        raise typer.BadParameter(f"{fault!r} must be one of {', '.join(FAULTS[1:])}", param_hint="--fault")
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
    """Run the demo with a live view on a terminal, or one line per second if stdout is not a terminal."""
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
    """Run the demo. Raises `TimeoutError` if it makes no progress for `STALL_S`, or has not ended after `LIMIT_S`.

    It counts ticks rather than seconds, because a suspended process cannot make progress.
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
        "delivered in this process": play.ledger.delivered,
        "handled in the child process": len(play.worker.handled),
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
    row("acknowledged (on disk)", len(ledger.acknowledged), "publishing")
    row("delivered to 4 subscribers in this process", ledger.delivered, "delivering")
    row("handled by the durable subscriber, killed once", len(ledger.handled), "handling")
    row("acknowledged by the durable subscriber", play.worker.acknowledged)
    row("redelivered to it because not acknowledged", ledger.redelivered)
    row("redelivered to it although acknowledged", len(ledger.seen_again))
    row(f"published at full speed, in batches of {FLOOD_BATCH_EVENTS:,}", len(ledger.flood), "flood")
    row("replayed from the time of the kill", len(ledger.replayed), "replaying")
    row("lost", len(ledger.lost))
    return table
