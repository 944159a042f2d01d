"""All benchmarks, each compared with its peer: a table for people, and one JSON line per row in `results/`.

    python benchmarks/run.py [--quick] [--only NAME] [--markdown]

The table marks missed targets; the exit code is 1 only if a benchmark could not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from _harness import RESULTS, Row, Sizes, machine
from _table import markdown, table
from rich.console import Console

BENCHMARKS = (
    "durable_publish",
    "publish_many",
    "single_publish",
    "no_log",
    "replay",
    "verify",
    "many_keys",
    "backup",
    "subscriptions",
    "cached_read",
    "footprint",
    "observed",
    "schema_check",
    "on_nats",
    "on_zmq",
    "on_zenoh",
    "raw_bridge",
    "zmq_publishers",
    "found_after_start",
    "sse_clients",
    "http_publish",
    "console_frames",
    "spark_scan",
    "spark_rollup",
    "spark_sink",
    "spark_offload",
    "spark_beside",
)


def main() -> int:
    """Run the benchmarks, then print and store the rows."""
    arguments = _arguments()
    # Without a terminal, the table is as wide as necessary.
    notes, out = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 200)
    found_machine = machine()
    rows: list[Row] = []
    failed = False
    for name in arguments.only or BENCHMARKS:
        begin = time.monotonic()
        try:
            rows += importlib.import_module(name).rows(Sizes(arguments.quick))
        except Exception:
            failed = True
            notes.print_exception()
        notes.print(f"{name}: {time.monotonic() - begin:.0f} s", style="dim")
    where = store(rows, found_machine, arguments.quick)
    if arguments.markdown:
        print(markdown(rows))
    else:
        out.print(table(rows))
    notes.print(_summary(found_machine), style="dim", highlight=False)
    notes.print(f"written to {where}", style="dim", highlight=False)
    return 1 if failed else 0


def store(rows: list[Row], found_machine: dict[str, Any], quick: bool) -> Path:
    """Store one JSON line per row."""
    RESULTS.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    where = RESULTS / f"{stamp}.json"
    common = {"at": stamp, "quick": quick, "machine": found_machine}
    where.write_text("".join(json.dumps(row.as_json() | common) + "\n" for row in rows))
    return where


def _summary(found: dict[str, Any]) -> str:
    return (
        f"{found['cpu']}, {found['cores']} cores, Linux {found['kernel']}, {found['file_system']},"
        f" fsync p50 {found['fsync_us_p50']:.0f} µs, Python {found['python']}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure zbus against its peers.")
    parser.add_argument("--quick", action="store_true", help="use small sizes, only to check that everything runs")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="run only this benchmark; repeatable")
    parser.add_argument("--markdown", action="store_true", help="print the table as GitHub markdown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
