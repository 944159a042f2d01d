"""The zbus log in Spark: a data source, a sink, and jobs over a log.

>>> import zbus_spark
>>> callable(zbus_spark.read)
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zbus.util.lazy_names import lazy_names

if TYPE_CHECKING:
    from .failures import SparkFailed, spark_errors
    from .jobs.backfill import backfill
    from .jobs.coverage import coverage
    from .jobs.gaps import gaps
    from .jobs.offload import Offloaded, offload
    from .jobs.rollup import rollup
    from .jobs.sessions import sessions
    from .jobs.trim import trim
    from .reading import read
    from .removed_events import RemovedEvents, removed_events
    from .starting import session
    from .typed import payload

__all__ = [
    "Offloaded",
    "RemovedEvents",
    "SparkFailed",
    "backfill",
    "coverage",
    "gaps",
    "offload",
    "payload",
    "read",
    "removed_events",
    "rollup",
    "session",
    "sessions",
    "spark_errors",
    "trim",
]

_MODULES = {name: f".jobs.{name}" for name in __all__} | {
    "Offloaded": ".jobs.offload",
    "RemovedEvents": ".removed_events",
    "SparkFailed": ".failures",
    "payload": ".typed",
    "read": ".reading",
    "removed_events": ".removed_events",
    "session": ".starting",
    "spark_errors": ".failures",
}
# Every Spark worker imports this package but needs only the source.
__getattr__ = lazy_names(__name__, _MODULES)
