"""`zbus broker`: a broker process for ZMQ nodes. Its first line on stdout says where it listens."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbus.cli.apps import new_app
from zbus.cli.options import JsonOption, ReportIntervalOption
from zbus.cli.render.output import encode_json, note, write
from zbus.errors import ConfigInvalid

if TYPE_CHECKING:
    from .broker import Broker

__all__ = ["app"]

app = new_app()


@app.command()
def broker(
    xsub: Annotated[str, typer.Option(help="Where publishers connect.")] = "tcp://127.0.0.1:*",
    xpub: Annotated[str, typer.Option(help="Where subscribers connect.")] = "tcp://127.0.0.1:*",
    report_interval: ReportIntervalOption = 5.0,
    hwm: Annotated[int, typer.Option(min=1, help="Messages in flight to one subscriber.")] = 10_000,
    max_message_bytes: Annotated[int, typer.Option(min=1, help="A larger message ends its connection.")] = 64 << 20,
    stall_timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Skip a slow subscriber that has blocked the others for N s."),
    ] = 1.0,
    curve_secret: Annotated[Path | None, typer.Option(help="The broker's secret key file: encrypt.")] = None,
    curve_allow: Annotated[Path | None, typer.Option(help="A folder of the public keys that may connect.")] = None,
    new_keys: Annotated[Path | None, typer.Option(metavar="DIR", help="Make a pair of keys there, and end.")] = None,
    name: Annotated[str, typer.Option(help="The name of the new keys.")] = "node",
    json: JsonOption = False,
) -> None:
    """Carry events between ZMQ nodes: publishers send to XSUB, subscribers receive from XPUB.

    The first line on stdout is JSON with the endpoints. Reports of subscriptions and rates go to stderr, or
    with --json to stdout. Ctrl-C and SIGTERM end it.
    """
    from .address.options import ZmqOptions, check_endpoint, validated
    from .broker import Broker

    if new_keys is not None:
        _make_keys(new_keys, name)
        return
    for field, endpoint in (("xsub", xsub), ("xpub", xpub)):
        try:
            check_endpoint(endpoint)
        except ValueError as error:
            raise ConfigInvalid(field, str(error)) from None
    given: dict[str, Any] = {
        "hwm": hwm,
        "max_message_bytes": max_message_bytes,
        "stall_s": stall_timeout,
        "curve_secret": curve_secret,
        "curve_allow": curve_allow,
    }
    _run(Broker(xsub, xpub, validated(ZmqOptions, given)), report_interval, json)


def _run(running: Broker, report_s: float, json: bool) -> None:
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        write(encode_json({"ready": True, "xsub": running.xsub, "xpub": running.xpub}))
        while not ended.wait(report_s or None):
            report = running.report()
            if json:
                write(encode_json(report))
            else:
                note(_line(report))
    finally:
        running.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(report: dict[str, Any]) -> str:
    counted = "".join(f", {reason} {number:,}" for reason, number in report["counts"].items())
    return (
        f"{report['subscriptions']:,} subscriptions, {report['nodes']:,} nodes, "
        f"{report['messages_per_s']:,.0f} messages/s, {report['bytes_per_s']:,.0f} bytes/s, "
        f"{report['messages']:,} messages in all{counted}"
    )


def _make_keys(folder: Path, name: str) -> None:
    from .io.curve import make_keys

    public, secret = make_keys(folder, name)
    write(encode_json({"public": str(public), "secret": str(secret)}))
    note(f"give {public.name} away, keep {secret.name} to yourself")
