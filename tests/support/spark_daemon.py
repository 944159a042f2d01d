"""Spark's Python daemon for the tests, which imports the modules of its workers before it forks them.

A worker takes most of a second to import pandas, pyarrow and zbus, and Spark starts one for each plan of a read. The
daemon of Spark itself imports nothing, because threads do not survive a fork: here no library starts a thread.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading

if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    from pyspark.daemon import manager

    for name in (sys.argv[1], "pyspark.worker", "pandas", "pyarrow", "zbus_spark.source"):
        importlib.import_module(name)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
    manager()
