"""Names of a package that are imported on first use, because their modules are slow to import or seldom needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from .renamed import unknown_attribute

_NONE: Mapping[str, str] = MappingProxyType({})


def lazy_names(package: str, modules: Mapping[str, str], renamed: Mapping[str, str] = _NONE) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: it imports a name from the module that `modules` gives for it.

    A module of the package itself is given as `{"name": ".name"}`. Any other name raises `AttributeError`, with a hint
    if `renamed` has its replacement.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise unknown_attribute(f"module {package!r}", name, renamed)
        module = import_module(modules[name], package)
        return module if modules[name] == f".{name}" else getattr(module, name)

    return find
