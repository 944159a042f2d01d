"""The process that the offload tests kill: it offloads a log, and at the stage named ends as if the power went."""

from __future__ import annotations

import os
import signal
import sys

from spark_support import spark

from zbus_spark.jobs.offload import offload

SEGMENT_EVENTS = 8192


def main(log: str, stage: str, times: int) -> None:
    """Die when the stage is reached for the so-manieth time; `times` 0 says so on stdout and goes on."""
    seen = 0

    def reached(now: str, _done: int, _total: int) -> None:
        nonlocal seen
        if now == stage:
            seen += 1
            if times == 0:
                print(now, flush=True)
            elif seen == times:
                os.kill(os.getpid(), signal.SIGKILL)

    offload(spark(), log, segment_events=SEGMENT_EVENTS, progress=reached)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
