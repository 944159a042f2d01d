"""`zbus pipeline sessions`: group events into sessions by a header or a field of the payload."""

from __future__ import annotations

from typing import Annotated

import typer
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus.cli.options import JsonOption
from zbus.cli.render.output import note
from zbus_spark.jobs import sessions as find_sessions
from zbus_spark.jobs.sessions import columns

from .options import (
    LOCAL,
    AfterOption,
    ColdOption,
    KeyOption,
    LogArgument,
    MasterOption,
    ShownOption,
    UntilOption,
    load,
)
from .progress import working
from .tables import print_rows


def sessions(
    log: LogArgument,
    by: Annotated[
        str, typer.Option(metavar="FIELD", help="Group by header:NAME or payload:FIELD, such as payload:user.id.")
    ],
    gap: Annotated[
        str, typer.Option(metavar="DURATION", help="Time without an event after which a session ends.")
    ] = "30 minutes",
    key: KeyOption = None,
    after: AfterOption = None,
    until: UntilOption = None,
    cold: ColdOption = None,
    rows: ShownOption = 50,
    json: JsonOption = False,
    master: MasterOption = LOCAL,
) -> None:
    """List the sessions of each value of a field, with start, end, number of events, and keys."""
    wanted = columns(by)
    with working("finding sessions", master) as spark:
        found = find_sessions(load(spark, log, wanted, key, after, until, cold), by, gap).persist()
        of_none, with_value = F.col("value").isNull(), F.col("value").isNotNull()
        without = found.where(of_none).agg(F.sum("events")).collect()[0][0] or 0
        print_rows(found if json else found.where(with_value), json, rows, "sessions")
        found.unpersist()
    if without:
        note(f"{without:,} events have no {by} and belong to no session")
