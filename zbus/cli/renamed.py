"""Retired commands, options and values, each with its replacement.

They are not accepted any more, so `--help` does not list them. A user who still writes one gets a usage
error that names the replacement.
"""

from __future__ import annotations

COMMANDS = {"zbus log retain": "zbus log prune"}

_REPORTS = {"--report-s": "--report-interval"}
OPTIONS = {
    "zbus": {"--records": "--logging", "--records-level": "--logging-level"},
    "zbus monitor": {"--records": "--system-events"},
    "zbus bridge": {"--retain-age": "--max-age", "--retain-size": "--max-bytes"} | _REPORTS,
    "zbus broker": {"--stall-s": "--stall-timeout"} | _REPORTS,
    "zbus serve": {"--host-name": "--allowed-host"},
    "zbus log prune": {
        "--age": "--max-age",
        "--bytes": "--max-bytes",
        "--events": "--max-events",
        "--upto": "--until",
        "--past-cursors": "--ignore-cursors",
    },
    "zbus schema check": {"--number": "--limit"},
    "zbus pipeline offload": {"--keep-age": "--max-age", "--keep-events": "--max-events"},
}
VALUES = {"zbus bridge": {"--direction": {"forth": "forward", "back": "reverse"}}}
