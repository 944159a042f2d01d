"""Keys of entries from the arguments of a function, compiled once per function.

Binding arguments with `inspect` takes ten times as long as moka's `get`. So the wrapper is compiled with the same
parameters as its function: Python itself binds them, including defaults and keywords, and rejects invalid calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Hashable
from numbers import Number
from typing import Any

from zbus import ConfigInvalid

from .templates import KeyTemplate, fields_of

# `get` returns None for a missing key: a stored result is never None.
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
    """The parameters of a function, and the key that is built from its arguments."""

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
            raise ConfigInvalid("key", f"{key!r} has no field, so all calls would share one entry; fields: {names}")
        self._key = key

    def check(self, template: KeyTemplate) -> None:
        """Raise `ConfigInvalid` if a field of the expression is not an argument, or is not part of the key.

        Calls that share an entry must also share the fields; otherwise an event would not find the shared entry.
        """
        known = [each.name for each in self._parameters]
        for name in template.names:
            fields_of(f"{{{name}}}", "invalidate_on", known)
        distinguished = self._key_fields if isinstance(self._key, str) else None if self._key is None else []
        if distinguished is not None and not set(template.names) <= set(distinguished):
            reason = "the key must contain every field of the event's key: add the fields to key='…', or omit key"
            raise ConfigInvalid("invalidate_on", f"{template.template!r}: {reason}")

    def texts(self, template: KeyTemplate, values: dict[str, Any]) -> tuple[str, ...]:
        """Return the texts of an expression's fields for these arguments. Raises `ConfigInvalid` or `KeyInvalid`."""
        if self._key is None:
            for name in template.names:
                check_text(name, values[name.partition(".")[0]])
        return template.write(values)

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, including defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def compile(
        self,
        get: Callable[..., Any],
        miss: Callable[[Hashable, tuple[Any, ...], dict[str, Any]], Coroutine[Any, Any, Any]],
        on_type_error: Callable[[TypeError], Exception],
    ) -> tuple[Callable[..., Any], Callable[[], tuple[int, int]]]:
        """Return the wrapper, and a function that returns its hits and misses."""
        args, kwargs = self._forwarded()
        source = SOURCE.format(
            parameters=self._parameter_source(),
            key=self._key_source(args, kwargs),
            args="".join(args),
            kwargs="".join(kwargs),
        )
        made: dict[str, Any] = {}
        exec(compile(source, "<zbus.cached>", "exec"), made)  # noqa: S102 - the source contains only names of parameters
        defaults = [each.default for each in self._parameters]
        call, counted = made["make"](get, miss, on_type_error, self._key, defaults)
        return call, counted

    def _parameter_source(self) -> str:
        """Return the parameter list as source text, with defaults referred to by number."""
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
    """Reject a value that equals one with another text: as keys, 1.0 and True equal 1, but their texts differ.

    >>> check_text("todo_id", 7)
    >>> check_text("todo_id", True)
    Traceback (most recent call last):
    zbus.errors.ConfigInvalid: todo_id: True equals a value that an event's key spells differently: pass an int or a str
    """
    if isinstance(value, int | str | Number) and type(value) not in (int, str):
        reason = f"{value!r} equals a value that an event's key spells differently: pass an int or a str"
        raise ConfigInvalid(name, reason)


class _Default:
    """A placeholder for a default in the source text of a signature."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __repr__(self) -> str:
        return f"_zbus_defaults[{self._at}]"
