"""A Spark stream as a command: it runs until Ctrl-C or SIGTERM, and stops between two batches."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from zbus.cli.render.output import note
from zbus_spark.failures import to_spark_failed

LOOK_S = 0.2


def follow_stream(
    stream: DataFrame, handle: Callable[[DataFrame, int], None], checkpoint: Path | None, once: bool
) -> int:
    """Pass each batch to `handle` until the command is stopped, or with `once` until all events were read.

    Reports events that are later than the watermark, and therefore dropped, on stderr. Returns the number of groups
    (such as the windows of a key) that they belong to, counted per batch; the number of events is at least as high.
    """
    if checkpoint is not None:
        checkpoint.mkdir(parents=True, exist_ok=True)  # fail before the query starts if it cannot be created
    with tempfile.TemporaryDirectory(prefix="zbus-pipeline-") as folder, _stop_signals() as stopped:
        place = str(checkpoint.absolute()) if checkpoint else folder
        writer = stream.writeStream.outputMode("append").option("checkpointLocation", place).foreachBatch(handle)
        query = (writer.trigger(availableNow=True) if once else writer).start()
        late = _LateEvents(query)
        try:
            while query.isActive and not stopped.wait(LOOK_S):
                late.report()
        finally:
            query.stop()
        late.report()
        if (error := query.exception()) is not None:
            raise to_spark_failed(error)
        return late.groups


class _LateEvents:
    """Counts events that a query dropped as later than its watermark; Spark reports them only in its progress data."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query, self._seen, self.groups = query, "", 0

    def report(self) -> None:
        """Report on stderr the events that were dropped since the last call."""
        last = self._query.lastProgress
        if last is None or last["timestamp"] <= self._seen:  # comparable as text: ISO, in UTC, of one length
            return
        fresh = [each for each in self._query.recentProgress if each["timestamp"] > self._seen]
        self._seen = last["timestamp"]
        dropped = sum(state["numRowsDroppedByWatermark"] for each in fresh for state in each["stateOperators"])
        if dropped:
            self.groups += dropped
            watermark = fresh[-1]["eventTime"].get("watermark", "the watermark")
            note(
                f"dropped: late events of {dropped:,} windows that ended before {watermark}; "
                "a longer --watermark would include them"
            )


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    stopped = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stopped.set()

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
