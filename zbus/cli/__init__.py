"""The command `zbus`, a thin layer over the library. Data goes to stdout, messages and progress go to stderr."""

from .app import main

__all__ = ["main"]
