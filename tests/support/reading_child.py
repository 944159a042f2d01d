"""Reads a log as a task of Spark does, in a process of its own: `reading_child.py LOG UNTIL FAIL_ON_DATA_LOSS`.

It prints how many rows the first batch has, waits for a line, reads the rest, and prints what it has read in all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class Reading:
    """Such a process, from the test's end; the first batch is read when it is made."""

    def __init__(self, log: Path, until: int, fail_on_data_loss: bool = True) -> None:
        command = [sys.executable, __file__, str(log), str(until), str(int(fail_on_data_loss))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.first = int(self._process.stdout.readline())

    def go_on(self) -> dict[str, Any]:
        """Let it read the rest: rows, the error that ended it, and the largest batch in bytes."""
        reported, _ = self._process.communicate("\n", timeout=60)
        found: dict[str, Any] = json.loads(reported)
        return found


def main(log: str, until: int, fail_on_data_loss: bool) -> None:
    from zbus.keys import KeySet
    from zbus.ports.log import Span
    from zbus_spark import local
    from zbus_spark.columns import SCHEMA, Columns

    span, choice = local.plan(log, KeySet.all(), Span(0, until))
    reading = local.batches(log, choice, span, Columns(SCHEMA), fail_on_data_loss)
    batch = next(reading)
    rows, largest, sums, error, last = batch.num_rows, batch.nbytes, [], "", 0
    print(rows, flush=True)
    sys.stdin.readline()
    try:
        for batch in reading:
            rows, largest = rows + batch.num_rows, max(largest, batch.nbytes)
            last = batch.column("offset")[-1].as_py()
            sums += [sum(payload) for payload in batch.column("payload").to_pylist() if len(payload) > 1_000_000]
    except Exception as failed:
        error = type(failed).__name__
    print(json.dumps({"rows": rows, "error": error, "largest": largest, "sums": sums, "last": last}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
