"""Generator of docs/reference from the code: settings, command line, errors, and the pages of `reference_api` and
`reference_records`.

`make reference` writes the pages. `tests/project/test_reference.py` fails if a page differs from what this generates.
The text does not depend on the machine: neither on the width of the terminal nor on the environment.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import reference_api
import reference_records
import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from reference_records import GENERATED, escaped

import zbus.errors
from zbus.bridge.config import BridgeConfig
from zbus.cli.app import app
from zbus.config import BusConfig
from zbus_web.http.settings import TokenSettings, WebSettings


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    own = {"settings.md": settings_page(), "cli.md": cli_page(), "errors.md": errors_page()}
    return own | reference_api.pages() | reference_records.pages()


def write(folder: Path) -> None:
    """Write all pages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


# Settings.


def settings_page() -> str:
    """Return the page of all settings: of a bus, of the web server, and of a bridge."""
    return _page(
        "Settings",
        "Settings of a bus are arguments of `zbus.open`, fields of `zbus.BusConfig`, environment variables, or keys of "
        "a TOML file that `config=` or `ZBUS_CONFIG` names. An argument takes precedence over a variable, a variable "
        "over the file, and the file over the default. The key in the file is the name of the setting. In a variable, "
        "a list is separated by commas, and a table is a JSON object. A setting under a retired name is an error that "
        "names the new one.",
        "## Bus",
        _settings(BusConfig, "ZBUS_"),
        "`DYN_EVENT_PLANE` selects the transport if no other source sets it.",
        "## Web server",
        "Settings of `zbus serve` and of `zbus_web`. In the TOML file they are keys of the table `[web]`.",
        _settings(WebSettings, "ZBUS_WEB_"),
        "### Tokens",
        "Each element of `tokens` is a table `[[web.tokens]]` with these keys.",
        _settings(TokenSettings),
        "## Bridge",
        "Settings of `zbus.Bridge` and of `zbus bridge`. In the TOML file of `zbus bridge --config` they are keys of a "
        "table `[[bridge]]`. They have no environment variables.",
        _settings(BridgeConfig),
    )


def _settings(model: type[BaseModel], prefix: str | None = None) -> str:
    heads = ["Setting", *(["Variable"] if prefix else []), "Type", "Default", "Description"]
    rows = []
    for name, field in model.model_fields.items():
        variable = [f"`{prefix}{name.upper()}`"] if prefix else []
        description = ". ".join(filter(None, (_sentence(field.description or ""), _limits(field))))
        rows.append([f"`{name}`", *variable, _type(field.annotation), _default(field), description])
    return _table(heads, rows)


def _type(annotation: Any) -> str:
    """Return a type in the words of a TOML file."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        *first, last = (f"`{each}`" for each in arguments)
        return " or ".join(filter(None, (", ".join(first), last)))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(each) for each in arguments if each is not types.NoneType)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if origin is tuple:
        return f"list of {_type(arguments[0])}s"
    if origin is dict:
        return f"table of {_type(arguments[1])}s"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "string", bool: "boolean", int: "integer", float: "number", SecretStr: "string", Path: "path"}
    return names[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "unset"
    if value in ("", (), {}):
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def _limits(field: FieldInfo) -> str:
    """Return the limits of a value, such as "From 1 to 65535"."""
    limits = {
        name: getattr(each, name)
        for each in field.metadata
        for name in ("gt", "ge", "lt", "le", "min_length", "max_length")
        if getattr(each, name, None) is not None
    }
    words = {
        "gt": "greater than {}",
        "ge": "at least {}",
        "lt": "less than {}",
        "le": "at most {}",
        "min_length": "length at least {}",
        "max_length": "length at most {}",
    }
    return _sentence(", ".join(words[name].format(value) for name, value in limits.items()))


# Command line.


def cli_page() -> str:
    """Return the page of all commands and their options."""
    parts: list[str] = []
    for path, command in commands():
        parts += [f"## {path}", f"```text\n{_usage(path, command)}\n```", _paragraphs(command.help or "")]
        shown = [each for each in command.params if not getattr(each, "hidden", False)]
        arguments = [each for each in shown if each.param_type_name == "argument"]
        options = [each for each in shown if each.param_type_name == "option"]
        if arguments:
            parts.append(_table(["Argument", "Description"], [_row(each, command) for each in arguments]))
        if options:
            parts.append(_table(["Option", "Description"], [_row(each, command) for each in options]))
        if hasattr(command, "list_commands"):
            context = command.context_class(command)
            found = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
            rows = [
                [f"[`{path} {name}`](#{f'{path} {name}'.replace(' ', '-')})", _sentence(each.get_short_help_str(1000))]
                for name, each in found
            ]
            parts.append(_table(["Command", "Description"], rows))
    return _page(
        "Command line",
        "Data goes to stdout, messages go to stderr. The exit code is 0, 1 for an error of the log or the machine, or "
        "2 for an error in the call. Every command has the option `--help`. `python -m zbus` is the same as `zbus`.",
        *parts,
    )


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its path, including the commands of other packages."""

    def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield path, command
        if hasattr(command, "list_commands"):
            context = command.context_class(command)
            for name in command.list_commands(context):
                yield from walk(f"{path} {name}", command.get_command(context, name))

    return walk("zbus", typer.main.get_command(app))


def _usage(path: str, command: Any) -> str:
    return " ".join([path, *command.collect_usage_pieces(command.context_class(command))])


def _row(parameter: Any, command: Any) -> list[str]:
    """Return the spelling and the help of a parameter, with its default, its limits and its variable."""
    spelling, text = parameter.get_help_record(command.context_class(command))
    if parameter.param_type_name == "argument":
        spelling = spelling.rpartition(" <")[0]
    text, _, details = text.partition("  [")
    more = f" ({escaped(details.removesuffix(']'))})" if details else ""
    return [f"`{spelling}`", f"{_sentence(text)}.{more}"]


# Errors.


def errors_page() -> str:
    """Return the page of all errors: the tree with state and remedy, then each class."""
    tree = inspect.getdoc(zbus.errors) or ""
    lines = [line for line in tree.splitlines() if line.startswith("    ")]
    parts = ["## Tree", "```text\n" + inspect.cleandoc("\n".join(lines)) + "\n```"]
    for error in error_classes():
        parts += [f"## {error.__name__}", _paragraphs(inspect.getdoc(error) or ""), f"Base class: {_parent(error)}."]
        fields = [
            name for name in inspect.signature(error.__init__).parameters if name not in ("self", "args", "kwargs")
        ]
        if fields:
            parts.append(f"Fields: {', '.join(f'`{name}`' for name in fields)}.")
    return _page(
        "Errors",
        "Every error of zbus is a `zbus.ZbusError`. Each states what is true of the data and what to do next. Errors "
        "can be pickled, with their fields.",
        *parts,
    )


def error_classes() -> list[type[Exception]]:
    """Return the errors of `zbus.errors` in the order of the file."""
    found = vars(zbus.errors).values()
    return [
        each
        for each in found
        if inspect.isclass(each) and issubclass(each, zbus.errors.ZbusError) and each.__module__ == "zbus.errors"
    ]


def _parent(error: type[Exception]) -> str:
    parent = error.__bases__[0]
    known = parent.__module__ == "zbus.errors"
    return f"[`{parent.__name__}`](#{parent.__name__.lower()})" if known else f"`{parent.__name__}`"


# Markdown.


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([GENERATED, f"# {title}", *filter(None, parts)]) + "\n"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads)]
    lines += [["---"] * len(lines[0]), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _paragraphs(text: str) -> str:
    """Return text with each paragraph on one line: where the source wraps it does not matter."""
    return "\n\n".join(escaped(" ".join(each.split())) for each in inspect.cleandoc(text).split("\n\n"))


def _sentence(text: str) -> str:
    return escaped(text[:1].upper() + text[1:]).rstrip(".")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
