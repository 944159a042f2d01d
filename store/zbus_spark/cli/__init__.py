"""`zbus pipeline`: Spark's jobs over a log. The core finds this by its entry point."""

from zbus.cli.apps import lazy_app

app = lazy_app("Work on a whole log with Spark: here by default, or on a cluster.", "zbus_spark.cli.commands:app")
