"""The files of a log: the database with its tables, the head record, and the manifest of the cold tier."""

import sys

from zbus.errors import ConfigInvalid

if sys.platform == "win32":  # everything that opens a log imports this package first
    raise ConfigInvalid(
        "log",
        "a log needs Linux or macOS, whose file locks it uses. On Windows, zbus works without a log (log=None); with "
        "one, it runs in WSL 2",
    )
