"""Entry point of the format `zbus`: Spark imports `pyspark_zbus` and uses its `DefaultSource`."""

from zbus_spark.source import ZbusSource as DefaultSource

__all__ = ["DefaultSource"]
