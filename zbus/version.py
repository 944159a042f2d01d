"""The version of zbus: the one place where it is written, also for the distribution."""

__version__ = "0.1.0"
