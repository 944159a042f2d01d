"""Names of log records, codes and counters, as the source uses them and as the tests assert them.

Both are found in the syntax tree, without running anything. `used()` and `asserted()` describe what they can see.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
CATALOG = ROOT / "zbus/observe/catalog.py"
SOURCES = ("zbus", "adapters", "store")
RECORD = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
NAME = re.compile(r"[a-z][a-z0-9_]*")
WRITERS = ("record", "record_reason", "report", "_report")  # the first argument is the name of a record
COUNTERS = ("count", "_count", "add")  # the first argument is the name of a counter


class Used(NamedTuple):
    """Names in the source, each with the place where it was found first."""

    records: dict[str, str]
    codes: dict[str, str]
    counters: dict[str, str]


class Coded(logging.Filter):
    """Keeps the log records that have a reason but no code for programs."""

    def __init__(self) -> None:
        super().__init__()
        self.without: list[dict[str, Any]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        fields = getattr(record, "zbus", {})
        if "reason" in fields and not NAME.fullmatch(str(fields.get("code", ""))):
            self.without.append(fields)
        return True


@cache
def trees(*folders: str) -> dict[Path, ast.Module]:
    """The syntax trees of all Python files in some folders."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in files}


def used() -> Used:
    """Every record, code and counter that the source names in a call that writes or counts it.

    A name must be a literal, a constant of a module, or a choice between two of them. A name that is computed or passed
    on as a parameter is not seen; `catalog` lists those of them that matter, and a test compares the two.
    """
    found = Used({}, {}, {})
    constants = dict(_constants())
    for file, tree in trees(*SOURCES).items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            place, called = f"{file}:{node.lineno}", _called(node)
            if called in WRITERS:
                for name in _texts(node.args[:1], constants, RECORD):
                    found.records.setdefault(name, place)
            for code in _codes(node, called, constants):
                found.codes.setdefault(code, place)
            if called in COUNTERS and (len(node.args) == 2 or called == "add"):
                for name in _texts(node.args[:1], constants, NAME):
                    found.counters.setdefault(name, place)
    return found


def reasons_without_code() -> list[str]:
    """Places that could write a record with a `reason` and without a `code`.

    `record_reason` requires both. A call of `record` must not have a `reason`, and must name its record by a literal or
    a constant: a helper that takes the name as a parameter could pass any fields on. A `reason` inside a dict that is
    passed as `**fields` is not seen here; the fixture that all tests share sees it when it is written.
    """
    found = []
    constants = dict(_constants())
    for file, tree in trees(*SOURCES).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) == "record" and file != Path("zbus/observe/records.py"):
                named = any(_texts(node.args[:1], constants, RECORD))
                if not named or any(each.arg == "reason" for each in node.keywords):
                    found.append(f"{file}:{node.lineno}")
    return found


def asserted() -> set[str]:
    """Every word in a part of a test that can fail because of it.

    These parts count: an `assert`; a comparison anywhere else (a filter, a condition that is waited for); the arguments
    of `pytest.mark.parametrize`, `pytest.raises` and helpers that wait (`until`, `wait_for`, `wait_until`); and the
    value of a variable that one of these parts of the same function uses. In them, whole string literals,
    words with an underscore in longer ones, and constants named like a record count. So do lists, dicts and tuples of a
    test module, which are the cases of `parametrize`. A comparison with `not in` or with 0 does not count: it holds
    without the code that writes or counts.

    This is an approximation. A comparison that only selects records proves nothing by itself, and an `assert` may
    mention a name and yet hold whatever its counter does. Conversely, a name that a helper computes is not seen. The
    check finds what no test looks at; it cannot prove that a test looks closely.
    """
    found: set[str] = set()
    for file, tree in trees("tests").items():
        if file.name == "test_vocabulary.py":
            continue  # it names what others assert
        for function in _functions(tree):
            checked: list[ast.AST] = [node for node in ast.walk(function) if _can_fail(node)]
            variables = {name.id for node in checked for name in ast.walk(node) if isinstance(name, ast.Name)}
            checked += [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                and any(isinstance(name, ast.Name) and name.id in variables for name in ast.walk(node.targets[0]))
            ]
            for node in checked:
                found.update(_words(node))
        for node in tree.body:  # lists of cases, used by `parametrize`
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                found.update(_words(node.value) if isinstance(node.value, ast.List | ast.Dict | ast.Tuple) else ())
    return found


def _functions(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Compare):
        return True
    return isinstance(node, ast.Call) and _called(node) in ("parametrize", "raises", "until", "wait_for", "wait_until")


def _words(node: ast.AST) -> Iterator[str]:
    if _holds_anyway(node):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
        yield from (word for word in re.findall(r"\w+", node.value) if "_" in word)
    elif isinstance(node, ast.Name) and RECORD.fullmatch(node.id):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _words(child)


def _holds_anyway(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    zero = any(isinstance(each, ast.Constant) and each.value == 0 for each in node.comparators)
    return isinstance(node.ops[0], ast.NotIn) or (zero and isinstance(node.ops[0], ast.Eq))


def _called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _codes(node: ast.Call, called: str, constants: dict[str, str]) -> Iterator[str]:
    given = [each.value for each in node.keywords if each.arg == "code"] if called in WRITERS else []
    if called in ("report", "block"):
        given += node.args[1:2]
    elif called in ("_refuse", "NotDynamo"):
        given += node.args[:1]
    yield from _texts(given, constants, NAME)


def _texts(nodes: list[ast.expr], constants: dict[str, str], form: re.Pattern[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.IfExp):
            yield from _texts([node.body, node.orelse], constants, form)
            continue
        text = constants.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
        if isinstance(text, str) and form.fullmatch(text):
            yield text


def _constants() -> Iterator[tuple[str, str]]:
    for tree in trees(*SOURCES).values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                        yield target.id, node.value.value
