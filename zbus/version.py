"""The version of zbus. The distribution takes its version from this file."""

__version__ = "0.1.0"
