"""The hint for a retired name. Each table of retired names is beside the names that replaced them.

The tables are `BusConfig.renamed`, `WebSettings.renamed`, and those of the command line in `zbus/cli/renamed.py`.
"""

from __future__ import annotations


def renamed_to(new: str) -> str:
    """Return the hint that names the replacement of a retired name.

    >>> renamed_to("keep")
    'renamed: use keep'
    """
    return f"renamed: use {new}"
