"""Mapping of Spark's errors to `SparkFailed`: one line instead of a Java stack trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from zbus.errors import ZbusError

# The end of the traceback that a Python worker of Spark sends back.
_OURS = re.compile(r"^.*?\bzbus\w*\.(?:\w+\.)*([A-Z]\w+): (.+)$", re.MULTILINE)
_PYTHON = re.compile(r"^\s*(\w+(?:\.\w+)*(?:Error|Exception)): (.+)$", re.MULTILINE)
_LINE_MAX = 500
_CAUSES_MAX = 20


class SparkFailed(ZbusError):
    """Raised when a Spark job fails. Nothing was written unless the message says otherwise."""

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason, kind)
        self.reason, self.kind = reason, kind

    def __str__(self) -> str:
        return self.reason


@contextmanager
def spark_errors() -> Iterator[None]:
    """Raise errors of Spark as `SparkFailed`, with only the reason."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise to_spark_failed(error) from error


def to_spark_failed(error: BaseException) -> SparkFailed:
    """Return a `SparkFailed` with the message of zbus if zbus raised the error, else the first line of Spark's."""
    text = "\n".join([str(error), *_causes(error)])
    if found := _OURS.findall(text):
        return SparkFailed(found[-1][1].strip(), found[-1][0])
    if isinstance(error, PySparkException) and (condition := error.getCondition()):
        raised = _PYTHON.findall(text)
        line = f"{raised[-1][0]}: {raised[-1][1]}" if raised else _first_line(text)
        return SparkFailed(f"Spark: {line[:_LINE_MAX]}", condition)
    return SparkFailed(f"Spark: {_first_line(text)[:_LINE_MAX]}")


def _causes(error: BaseException) -> Iterator[str]:
    """Yield the Java causes of an error: the reason of a streaming query is found only there."""
    cause = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    for _ in range(_CAUSES_MAX):
        cause = cause.getCause() if cause is not None else None
        if cause is None:
            return
        yield str(cause.toString())


def _first_line(text: str) -> str:
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip()]
    messages = [line for line in lines if not line.startswith(("at ", "An error occurred while calling"))]
    return (messages or lines or ["it failed without a message"])[0]
