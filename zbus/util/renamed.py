"""The hint for a retired name. Each table of retired names is beside the names that replaced them.

The tables are `BusConfig.renamed`, `WebSettings.renamed`, `_RENAMED` in a module, and those of the command line in
`zbus/cli/renamed.py`. A class has a `Renamed` for each retired attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn


def renamed_to(new: str) -> str:
    """Return the hint that names the replacement of a retired name.

    >>> renamed_to("keep")
    'renamed: use keep'
    """
    return f"renamed: use {new}"


class Renamed:
    """A retired attribute of a class: reading it raises `AttributeError` with the replacement.

    `__getattr__` would do the same for all names, but it slows down every attribute of the class.

    >>> class Stream:
    ...     take = Renamed("next_batch")
    >>> Stream().take
    Traceback (most recent call last):
    AttributeError: 'Stream' object has no attribute 'take'; renamed: use next_batch
    """

    def __init__(self, new: str) -> None:
        self._new, self._old = new, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise unknown_attribute(f"{owner.__name__!r} object", self._old, {self._old: self._new})


def unknown_attribute(
    owner: str, name: str, renamed: Mapping[str, str], instead: Mapping[str, str] = MappingProxyType({})
) -> AttributeError:
    """Return the error for an attribute that does not exist, with a hint if it was renamed or `instead` has one.

    >>> print(unknown_attribute("module 'zbus'", "LogOwned", {"LogOwned": "LogLocked"}))
    module 'zbus' has no attribute 'LogOwned'; renamed: use LogLocked
    """
    hint = renamed_to(renamed[name]) if name in renamed else instead.get(name, "")
    hint = f"; {hint}" if hint else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")
