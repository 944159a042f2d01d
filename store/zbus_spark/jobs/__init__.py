"""Spark jobs over a log: functions from DataFrames with the columns of a log to a DataFrame."""

from .coverage import coverage
from .gaps import gaps
from .rollup import rollup
from .sessions import sessions

__all__ = ["coverage", "gaps", "rollup", "sessions"]
