"""The command `zbus`: a thin veneer over the library. Data goes to stdout, prose and progress to stderr."""

from .app import main

__all__ = ["main"]
