"""`zbus pipeline`: Spark jobs over a log. The core finds this package through its entry point."""

from zbus.cli.apps import lazy_app

app = lazy_app(
    "Process a whole log with Spark, on this machine by default or on a cluster.", "zbus_spark.cli.commands:app"
)
