"""How the source is arranged: where clocks, chance and threads may be used, and how large a package may be.

The core takes the time, randomness and threads from its node's `Runtime`, or a simulator could not run it.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "zbus"
HOST_MEMBERS_MAX = 6
PACKAGE_FILES_MAX = 16
HAS_CODE = {CORE / "cli", CORE / "sim"}  # the entry point of the command is `zbus.cli:main`; `zbus.sim.world(…)`

# `cli` runs commands, not nodes; `blocking` has a loop on a thread of its own; `util` is where it is wrapped; `sim` is
# where it is simulated.
MAY_USE_THE_SYSTEM = ("zbus/cli/", "zbus/sim/", "zbus/util/", "zbus/blocking.py")
# The entry points, where a program that does not simulate gets the real runtime, and what adapters use without a node.
MAY_NAME_REAL = (
    *MAY_USE_THE_SYSTEM,
    "zbus/bridge/bridge.py",
    "zbus/node.py",
    "zbus/observe/counters.py",
    "zbus/observe/throttle.py",
)
# Where mechanisms are defined that default to the real runtime. In the core they get the node's runtime instead.
MECHANISMS = ("zbus/observe/", "zbus/util/")

# Their threads write log records for the node that opened them.
STARTED_BY_A_NODE = ("adapters", "store/zbus_cache", "store/zbus_log")

MEMBERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.AnnAssign)

SYSTEM_MODULES = {"_thread", "random", "secrets", "time"}
SYSTEM_NAMES = {
    "asyncio.to_thread",
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.ThreadPoolExecutor",
    "datetime.date.today",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "os.getpid",
    "os.urandom",
    "platform.node",
    "platform.uname",
    "socket.gethostname",
    "threading.Thread",
    "threading.Timer",
    "uuid.uuid1",
    "uuid.uuid4",
}


def files(folder: Path = CORE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def in_any(path: Path, prefixes: tuple[str, ...]) -> bool:
    return str(path.relative_to(ROOT)).startswith(prefixes)


def imported(tree: ast.AST) -> dict[str, str]:
    """The names that a module imports from elsewhere, and what each stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                names[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                names[each.asname or each.name] = f"{node.module}.{each.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """The full name of an expression such as `time.monotonic`, if it begins with an imported one."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return None if base is None else f"{base}.{node.attr}"
    return None


def system_uses(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Where a module reads a clock, draws a random number, or starts a thread itself, and how."""
    tree = ast.parse(source)
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and (name := dotted(node, names)) is not None:
            if name in SYSTEM_NAMES or ("." in name and name.partition(".")[0] in SYSTEM_MODULES):
                yield node, name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            executor = node.args[0] if node.args else None
            if node.func.attr == "run_in_executor" and isinstance(executor, ast.Constant) and executor.value is None:
                yield node, "run_in_executor(None)"


def test_the_core_reads_clocks_draws_chance_and_starts_threads_only_through_its_runtime() -> None:
    found = [
        f"{place(path, node)}: {name}"
        for path in files()
        if not in_any(path, MAY_USE_THE_SYSTEM)
        for node, name in system_uses(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "from time import monotonic\nmonotonic()",
        "from time import time_ns as now\nread = now",
        "import secrets\nsecrets.randbits(3)",
        "import random\nrandom.uniform(0, 1)",
        "import threading\nthreading.Thread(target=print)",
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1)",
        "import concurrent.futures\nconcurrent.futures.ThreadPoolExecutor(1)",
        "from datetime import UTC, datetime\ndatetime.now(UTC)",
        "import datetime as dt\ndt.datetime.now()",
        "import os\nos.getpid()",
        "import platform\nplatform.node()",
        "loop = get()\nloop.run_in_executor(None, print)",
    ],
)
def test_a_direct_use_of_the_system_is_noticed_at_its_line(source: str) -> None:
    assert {getattr(node, "lineno", 0) for node, _ in system_uses(source)} == {2}


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nlock = threading.Lock()",
        "import asyncio\nasync def wait(): await asyncio.sleep(1)",
        "from datetime import datetime\ndatetime.fromtimestamp(0)",
        "def read(runtime): return runtime.time_ns()",
        "def read(entry): return entry.time.time()",
        "loop = get()\nloop.run_in_executor(executor, print)",
    ],
)
def test_what_goes_through_the_runtime_or_the_loop_is_allowed(source: str) -> None:
    assert list(system_uses(source)) == []


def names_real(node: ast.AST) -> bool:
    # `random`: of `Backoff`, which the real runtime itself needs, and so cannot import it.
    return any(isinstance(each, ast.Name) and each.id in ("REAL", "random") for each in ast.walk(node))


def test_the_real_runtime_is_named_only_where_no_node_has_given_another_one() -> None:
    found = [
        place(path, node)
        for path in files()
        if not in_any(path, MAY_NAME_REAL)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and names_real(node)
    ]
    assert found == []


def injected(source: str) -> dict[str, tuple[str, int]]:
    """The functions and classes that default to the real runtime: the argument, and its place in a call."""
    found: dict[str, tuple[str, int]] = {}

    def look(function: ast.AST, name: str, own: int) -> None:
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = [*function.args.posonlyargs, *function.args.args]
            first = len(given) - len(function.args.defaults)
            for at, default in enumerate(function.args.defaults, first):
                if names_real(default):
                    found[name] = given[at].arg, at - own
            for each, only in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
                if only is not None and names_real(only):
                    found[name] = each.arg, sys.maxsize

    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    look(member, node.name, own=1)
        else:
            look(node, getattr(node, "name", ""), own=0)
    return found


def not_injected(source: str, mechanisms: dict[str, tuple[str, int]]) -> Iterator[tuple[ast.AST, str]]:
    """Where a mechanism is used without the argument that replaces the real runtime."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        if isinstance(function, ast.Name) and function.id in mechanisms:
            name, at = mechanisms[function.id]
            starred = any(isinstance(each, ast.Starred) for each in node.args)
            if not any(each.arg == name for each in node.keywords) and (starred or len(node.args) <= at):
                yield node, f"{function.id} without {name}"


def test_the_core_hands_its_runtime_to_every_mechanism_that_could_do_without() -> None:
    mechanisms: dict[str, tuple[str, int]] = {}
    for path in files():
        if in_any(path, MECHANISMS):
            mechanisms |= injected(path.read_text())
    assert mechanisms.keys() >= {"Backoff", "Counters", "Identities", "LoopThread", "Throttle", "Window"}
    found = [
        f"{place(path, node)}: {what}"
        for path in files()
        if not in_any(path, MAY_USE_THE_SYSTEM)
        for node, what in not_injected(path.read_text(), mechanisms)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("use", "missing"),
    [
        ("Made(1)", True),
        ("Made[int](1)", True),
        ("Made(*all)", True),
        ("Made(1, clock)", False),
        ("Made(1, clock=clock)", False),
        ("made()", True),
        ("made(time_ns=clock)", False),
        ("other()", False),
    ],
)
def test_a_mechanism_that_is_used_with_the_real_runtime_is_noticed(use: str, missing: bool) -> None:
    mechanisms = injected(
        "class Made:\n    def __init__(self, max, clock=REAL.monotonic): ...\n"
        "def made(*, time_ns=REAL.time_ns): ...\ndef other(clock=None): ..."
    )
    assert bool(list(not_injected(use, mechanisms))) is missing


def test_every_thread_of_a_store_or_transport_has_the_run_id_of_its_node() -> None:
    found = []
    for path in [each for folder in STARTED_BY_A_NODE for each in files(ROOT / folder)]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func, imported(tree)) == "threading.Thread":
                (target,) = [each.value for each in node.keywords if each.arg == "target"]
                inherits = isinstance(target, ast.Call) and ast.unparse(target.func) == "inherit"
                if not inherits and ast.unparse(target) != "self._main":  # made by `inherit` when the log was opened
                    found.append(f"{place(path, node)}: target={ast.unparse(target)}")
    assert found == []


def set_loops(source: str) -> Iterator[ast.AST]:
    """Where a module loops over a set that it makes in the same place."""
    for node in ast.walk(ast.parse(source)):
        loops = [node] if isinstance(node, (ast.For, ast.AsyncFor)) else getattr(node, "generators", [])
        if isinstance(node, ast.SetComp):
            continue  # its result has no order either
        for loop in loops:
            made = loop.iter.func if isinstance(loop.iter, ast.Call) else loop.iter
            if isinstance(made, (ast.Set, ast.SetComp)) or ast.unparse(made) in ("set", "frozenset"):
                yield loop.iter


def test_no_order_in_the_core_depends_on_hashes() -> None:
    """The order of a set differs from run to run; a dict is an ordered set."""
    assert [place(path, node) for path in files() for node in set_loops(path.read_text())] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("for each in {1, 2}: ...", 1),
        ("[each for each in {key for key in keys}]", 1),
        ("for each in set(keys): ...", 1),
        ("for each in {key: None for key in keys}: ...", 0),
        ("for each in sorted(set(keys)): ...", 0),
        ("{each for each in set(keys)}", 0),
    ],
)
def test_a_loop_over_a_set_is_noticed(source: str, found: int) -> None:
    assert len(list(set_loops(source))) == found


def test_a_host_has_at_most_six_members() -> None:
    hosts = {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == "Host":
                members = [each for each in node.body if isinstance(each, MEMBERS)]
                hosts[place(path, node)] = len(members)
    assert {str(path.parent.relative_to(CORE)) for path in CORE.rglob("host.py")} >= {"deliver", "mesh", "publish"}
    assert len(hosts) >= 3
    assert {where: members for where, members in hosts.items() if members > HOST_MEMBERS_MAX} == {}


def test_every_package_of_the_core_says_in_one_docstring_what_it_is() -> None:
    for folder in sorted({path.parent for path in files()} - {CORE}):
        module = folder / "__init__.py"
        assert module.is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"
        body = ast.parse(module.read_text()).body
        assert ast.get_docstring(ast.parse(module.read_text())), f"{module.relative_to(ROOT)} has no docstring"
        if folder not in HAS_CODE:
            assert len(body) == 1, f"{place(module, body[1])}: only a docstring belongs here"


def test_no_module_imports_with_two_dots() -> None:
    found = [
        place(path, node)
        for folder in (CORE, ROOT / "adapters", ROOT / "store")
        for path in files(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level > 1
    ]
    assert found == []


def test_packages_of_the_core_stay_small() -> None:
    sizes = {
        str(folder.relative_to(ROOT)): len([*folder.glob("*.py")]) - 1  # without __init__.py
        for folder in {path.parent for path in files()}
    }
    assert {folder: size for folder, size in sizes.items() if size > PACKAGE_FILES_MAX} == {}


def test_every_package_is_in_every_list_of_the_project() -> None:
    """A package that a list leaves out would pass every check that reads the list."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = (ROOT / "adapters", ROOT / "store")
    found = {path.parent.name for folder in folders for path in folder.glob("zbus_*/__init__.py")}
    linter = project["tool"]["importlinter"]
    of_core = [each for each in linter["contracts"] if each.get("source_modules") == ["zbus"]]
    lists = {
        "wheel": {Path(each).name for each in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]},
        "mypy": set(project["tool"]["mypy"]["packages"]),
        "import-linter": set(linter["root_packages"]),
        "cycles": {name for each in linter["contracts"] for name in each.get("ancestors", ())},
        "forbidden in the core": {name for each in of_core for name in each["forbidden_modules"]},
    }
    assert {name: sorted(found - listed) for name, listed in lists.items() if found - listed} == {}


# Only the log computes with offsets: those of another log may have gaps.

OFFSETS = ("_after", "_covered", "_head", "_low_water", "_offset", "_position", "_until")  # ends of names
MAY_COMPUTE_OFFSETS = ("zbus/ports/", "zbus/sim/", "store/zbus_spark/offsets.py")  # `sim` has a log of its own


def named(node: ast.AST) -> Iterator[str]:
    """The names and attributes in an expression, but not those inside a call or an index."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif not isinstance(node, (ast.Call, ast.Subscript)):
        for each in ast.iter_child_nodes(node):
            yield from named(each)


def offset_arithmetic(source: str) -> Iterator[ast.AST]:
    """Where a module adds 1 to an offset, or subtracts 1 from one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            sides = [node.left, node.right]
        elif isinstance(node, ast.AugAssign):
            sides = [node.target, node.value]
        else:
            continue
        if isinstance(node.op, (ast.Add, ast.Sub)) and any(
            isinstance(one, ast.Constant)
            and one.value == 1
            and any(f"_{name}".rstrip("_").endswith(OFFSETS) for name in named(other))
            for one, other in (sides, reversed(sides))
        ):
            yield node


def test_only_the_log_computes_with_offsets() -> None:
    folders = (CORE, ROOT / "adapters", ROOT / "store" / "zbus_cache", ROOT / "store" / "zbus_spark")
    found = [
        place(path, node)
        for folder in folders
        for path in files(folder)
        if not in_any(path, MAY_COMPUTE_OFFSETS)
        for node in offset_arithmetic(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "after + 1",
        "1 + until",
        "read(event.offset - 1)",
        "self._position += 1",
        "Span(max(0, (self.start_offset or 0) - 1))",
        "low_water + 1 < first",
    ],
)
def test_arithmetic_with_an_offset_is_noticed(source: str) -> None:
    assert len(list(offset_arithmetic(source))) == 1


@pytest.mark.parametrize(
    "source",
    ["log.before(offset)", "sequence + 1", "to_ns(after) + 1", "after + window", "heads[0] + 1", "overhead + 1"],
)
def test_arithmetic_with_anything_else_is_allowed(source: str) -> None:
    assert list(offset_arithmetic(source)) == []
