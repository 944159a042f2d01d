"""A stream of Spark as a command: it goes on until Ctrl-C or SIGTERM, and ends between two batches."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pyspark.sql import DataFrame

from zbus_spark.failures import reduced

LOOK_S = 0.2


def follow_stream(
    stream: DataFrame, handle: Callable[[DataFrame, int], None], checkpoint: Path | None, once: bool
) -> None:
    """Hand each batch to `handle`, until there is no more (`once`) or somebody ends the command."""
    if checkpoint is not None:
        checkpoint.mkdir(parents=True, exist_ok=True)  # where it cannot be made, nothing is begun
    with tempfile.TemporaryDirectory(prefix="zbus-pipeline-") as folder, _told_to_end() as ended:
        place = str(checkpoint.absolute()) if checkpoint else folder
        writer = stream.writeStream.outputMode("append").option("checkpointLocation", place).foreachBatch(handle)
        query = (writer.trigger(availableNow=True) if once else writer).start()
        try:
            while query.isActive and not ended.wait(LOOK_S):
                pass
        finally:
            query.stop()
        if (error := query.exception()) is not None:
            raise reduced(error)


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    if threading.current_thread() is not threading.main_thread():
        yield ended
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
