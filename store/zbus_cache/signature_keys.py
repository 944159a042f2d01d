"""How the arguments of a function become the key of an entry, worked out once and compiled.

Binding arguments by `inspect` takes ten times as long as moka's `get`. So a function is made with the very parameters
of the one that it stands for: Python itself binds them, defaults and keywords included, and refuses what is wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Hashable
from numbers import Number
from typing import Any

from zbus import ConfigInvalid

from .templates import KeyTemplate, fields_of

# `get` finds None for a key that is not there: what is kept is never None.
SOURCE = """
def make(_zbus_get, _zbus_miss, _zbus_on_type_error, _zbus_key, _zbus_defaults):
    _zbus_hits = _zbus_misses = 0
    def call({parameters}):
        nonlocal _zbus_hits, _zbus_misses
        try:
            _zbus_found = _zbus_get({key})
        except TypeError as _zbus_error:
            raise _zbus_on_type_error(_zbus_error) from _zbus_error
        if _zbus_found is not None:
            _zbus_hits += 1
            return _zbus_found
        _zbus_misses += 1
        return _zbus_miss({key}, ({args}), {{{kwargs}}})
    return call, lambda: (_zbus_hits, _zbus_misses)
"""


class SignatureKeys:
    """The parameters of a function, and the key that is made of them."""

    def __init__(self, function: Callable[..., Any], key: str | Callable[..., Hashable] | None) -> None:
        if not callable(function) or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigInvalid("cached", f"{function!r} is not a function that returns one value")
        self._signature = inspect.signature(function)
        self._parameters = list(self._signature.parameters.values())
        names = [each.name for each in self._parameters]
        if any(name.startswith("_zbus_") for name in names):
            raise ConfigInvalid("cached", "the names of parameters must not begin with '_zbus_'")
        if key is not None and not isinstance(key, str) and not callable(key):
            raise ConfigInvalid("key", f"{key!r} is neither a template nor a callable")
        self._key_fields = fields_of(key, "key", names) if isinstance(key, str) else []
        if isinstance(key, str) and not self._key_fields:
            raise ConfigInvalid("key", f"{key!r} has no field, so all calls would be the same; it may name: {names}")
        self._key = key

    def check(self, template: KeyTemplate) -> None:
        """Raise `ConfigInvalid` if an expression names what is no argument, or what the key does not tell apart.

        Calls that share an entry must share the fields, too, or an event would let the entry of one of them stay.
        """
        known = [each.name for each in self._parameters]
        for name in template.names:
            fields_of(f"{{{name}}}", "invalidate_on", known)
        distinguished = self._key_fields if isinstance(self._key, str) else None if self._key is None else []
        if distinguished is not None and not set(template.names) <= set(distinguished):
            reason = "the key must tell apart what the event names: put the same fields into key='…', or leave it out"
            raise ConfigInvalid("invalidate_on", f"{template.template!r}: {reason}")

    def texts(self, template: KeyTemplate, values: dict[str, Any]) -> tuple[str, ...]:
        """What the fields of an expression are for these arguments; raises `ConfigInvalid` or `KeyInvalid`."""
        if self._key is None:
            for name in template.names:
                check_text(name, values[name.partition(".")[0]])
        return template.write(values)

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def compile(
        self,
        get: Callable[..., Any],
        miss: Callable[[Hashable, tuple[Any, ...], dict[str, Any]], Coroutine[Any, Any, Any]],
        on_type_error: Callable[[TypeError], Exception],
    ) -> tuple[Callable[..., Any], Callable[[], tuple[int, int]]]:
        """The function that reads, and what tells how many hits and misses it had."""
        args, kwargs = self._forwarded()
        source = SOURCE.format(
            parameters=self._parameter_source(),
            key=self._key_source(args, kwargs),
            args="".join(args),
            kwargs="".join(kwargs),
        )
        made: dict[str, Any] = {}
        exec(compile(source, "<zbus.cached>", "exec"), made)  # noqa: S102 - of the names of parameters, nothing else
        defaults = [each.default for each in self._parameters]
        call, counted = made["make"](get, miss, on_type_error, self._key, defaults)
        return call, counted

    def _parameter_source(self) -> str:
        """The parameters as they are written, their defaults by number."""
        bare = [
            each.replace(annotation=each.empty, default=each.default if each.default is each.empty else _Default(at))
            for at, each in enumerate(self._parameters)
        ]
        return str(inspect.Signature(bare))[1:-1]

    def _forwarded(self) -> tuple[list[str], list[str]]:
        args, kwargs = [], []
        for each in self._parameters:
            if each.kind is each.VAR_POSITIONAL:
                args.append(f"*{each.name}, ")
            elif each.kind is each.VAR_KEYWORD:
                kwargs.append(f"**{each.name}, ")
            elif each.kind is each.KEYWORD_ONLY:
                kwargs.append(f"{each.name!r}: {each.name}, ")
            else:
                args.append(f"{each.name}, ")
        return args, kwargs

    def _key_source(self, args: list[str], kwargs: list[str]) -> str:
        if isinstance(self._key, str):
            return f"f{self._key!r}"
        if self._key is not None:
            named = [f"**{{{each}}}, " for each in kwargs]
            return f"_zbus_key({''.join(args + named)})"
        parts = [
            f"frozenset({each.name}.items())" if each.kind is each.VAR_KEYWORD else each.name
            for each in self._parameters
        ]
        return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def check_text(name: str, value: Any) -> None:
    """Refuse what equals something of another text: as a key, 1.0 and True are 1, and as texts they are not.

    >>> check_text("todo_id", 7)
    >>> check_text("todo_id", True)
    Traceback (most recent call last):
    zbus.errors.ConfigInvalid: todo_id: True is equal to what an event would spell otherwise: pass an int or a str
    """
    if isinstance(value, int | str | Number) and type(value) not in (int, str):
        raise ConfigInvalid(name, f"{value!r} is equal to what an event would spell otherwise: pass an int or a str")


class _Default:
    """Stands for a default in the text of a signature."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __repr__(self) -> str:
        return f"_zbus_defaults[{self._at}]"
