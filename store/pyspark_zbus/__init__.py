"""Where Spark looks for the format `zbus`: it imports `pyspark_zbus` and takes its `DefaultSource`."""

from zbus_spark.source import ZbusSource as DefaultSource

__all__ = ["DefaultSource"]
