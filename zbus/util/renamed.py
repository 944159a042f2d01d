"""The hint for a retired name. Each table of retired names is beside the names that replaced them.

The tables are `BusConfig.renamed`, `WebSettings.renamed`, `_RENAMED` in a module, and those of the command line in
`zbus/cli/renamed.py`. A class has a `Renamed` for each retired attribute, and a function with retired arguments has the
decorator `renamed_arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


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


def renamed_arguments(**renamed: str) -> Callable[[F], F]:
    """Decorate a function or a `NamedTuple`: a retired keyword argument raises `TypeError` with the replacement.

    >>> @renamed_arguments(keep_events="max_events")
    ... def offload(*, max_events: int) -> None: ...
    >>> offload(keep_events=1)
    Traceback (most recent call last):
    TypeError: offload() got an unexpected keyword argument 'keep_events'; renamed: use max_events
    """

    def decorate(of: F) -> F:
        is_class = isinstance(of, type)
        call: Callable[..., Any] = of.__new__ if is_class else of

        @wraps(call)
        def checked(*args: Any, **given: Any) -> Any:
            for old in renamed.keys() & given.keys():
                reason = f"got an unexpected keyword argument {old!r}; {renamed_to(renamed[old])}"
                raise TypeError(f"{of.__name__}() {reason}")
            return call(*args, **given)

        if not is_class:
            return checked  # type: ignore[return-value]
        of.__new__ = checked  # type: ignore[method-assign]
        return of

    return decorate
