"""A pytest plugin: the fixture `zbus_world` runs a test in a simulated world, once for each seed.

    async def test_every_order_is_billed(zbus_world):
        await zbus_world.node("shop", log=True, program=take_orders)
        await zbus_world.node("billing", log=True, program=bill)
        await zbus_world.play(zbus.sim.ORDINARY, seconds=30)

The test runs under virtual time, whichever plugin runs other coroutine functions, and even without one. pytest imports
this module in every run of everyone who has zbus installed, so it imports the simulator only for a test that needs it.
"""

from __future__ import annotations

import inspect
import os
import traceback
import unittest
from argparse import ArgumentTypeError
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from .seeds import SEEDS, choose_seeds, parse_seeds

if TYPE_CHECKING:
    from zbus.sim import World

FIXTURE = "zbus_world"
SHOWN_STEPS = 40
KEPT_STEPS = 50_000  # of the trace; a test that runs for long must not fill the memory
MARK = (
    "zbus(seeds=…, **options): run a test that uses `zbus_world` with a number or a list of seeds; "
    "options as for zbus.sim.World, such as converge_s and limit_s"
)


class _Test(NamedTuple):
    """A test that is about to run."""

    world: World
    function: Callable[..., Coroutine[Any, Any, object]]


_TEST = pytest.StashKey[_Test]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("zbus", "zbus: simulated worlds")
    group.addoption(
        "--zbus-seeds",
        type=_number,
        metavar="N",
        help=f"Run each test that uses `{FIXTURE}` with the seeds 0 to N-1 (default: as marked, or {SEEDS}).",
    )
    group.addoption(
        "--zbus-seed",
        action="append",
        default=[],
        type=_seeds,
        metavar="S|A:B",
        help="Run these tests with this seed only, or with the seeds from A to B-1; may be repeated.",
    )
    group.addoption(
        "--zbus-trace",
        type=_number,
        default=SHOWN_STEPS,
        metavar="N",
        help=f"Show the last N steps of a world that failed (default: {SHOWN_STEPS}).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(trylast=True)  # the seed comes after the other parameters
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each seed."""
    if FIXTURE not in metafunc.fixturenames:
        return
    config = metafunc.config
    try:
        marked = _marked(metafunc.definition).get("seeds")
        seeds = choose_seeds(config.getoption("zbus_seed"), config.getoption("zbus_seeds"), marked)
    except (TypeError, ValueError) as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from error
    metafunc.parametrize(FIXTURE, seeds, ids=[f"seed{seed}" for seed in seeds], indirect=True)


@pytest.fixture
def zbus_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A simulated world, in which the test runs under virtual time. When the test ends, the invariants are checked.

    async def test_every_order_is_billed(zbus_world):
        await zbus_world.node("billing", log=True, program=bill)
        await zbus_world.play(zbus.sim.ORDINARY, seconds=30)
    """
    item = request.node
    reason = _unusable(request)
    if reason is not None:
        pytest.fail(f"{item.name} cannot use `{FIXTURE}`: {reason}", pytrace=False)
    from zbus.sim import World

    options = {name: value for name, value in _marked(item).items() if name != "seeds"}
    try:
        world = World(request.param, keep_trace=KEPT_STEPS, **options)
    except TypeError as error:
        pytest.fail(f"@pytest.mark.zbus of {item.name} has an option that zbus.sim.World does not take: {error}")
    item.stash[_TEST] = _Test(world, item.obj)
    yield world
    del item.stash[_TEST]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the hooks of all plugins that run coroutine functions
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Put a function that runs the world in the place of the test, which the fixture has noted.

    Other plugins see a synchronous function and leave it alone, so pytest itself calls it.
    """
    test = pyfuncitem.stash.get(_TEST, None)
    if test is None:
        return (yield)
    before, pyfuncitem.obj = pyfuncitem.obj, partial(_run, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = before


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Leave out the traceback of a broken invariant, which has only lines of the simulator."""
    __tracebackhide__ = True
    try:
        return (yield)
    except Exception as error:
        test = item.stash.get(_TEST, None)
        if test is not None and _is_blameless(test, error):
            raise error.with_traceback(None) from None
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what happened in the world to the report of a failure."""
    report = yield
    test = item.stash.get(_TEST, None)
    if test is not None and call.when == "call" and report.failed:
        from .failure import explain

        lines: int = item.config.getoption("zbus_trace")
        report.sections.append(("zbus world", explain(test.world, _selection(item), lines)))
    return report


def _run(test: _Test, /, **arguments: Any) -> None:
    import zbus.sim

    async def main() -> None:
        async with test.world:
            await test.function(**arguments)

    zbus.sim.run(main())


def _is_blameless(test: _Test, error: BaseException) -> bool:
    """Return whether the world raised an error of its own, not in a call of the test: then no line is to blame."""
    from zbus.sim import InvariantBroken, WorldStuck

    code = getattr(test.function, "__code__", None)
    return isinstance(error, InvariantBroken | WorldStuck) and all(
        frame.f_code is not code for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _unusable(request: pytest.FixtureRequest) -> str | None:
    """Return why a test cannot use the fixture, or None if it can."""
    if request.cls is not None and issubclass(request.cls, unittest.TestCase):
        return "it is a method of a unittest.TestCase"
    if not hasattr(request, "param"):
        return "name it as an argument of the test or of a fixture, so that pytest knows it before the test runs"
    if not inspect.iscoroutinefunction(request.function):
        return "a world runs under virtual time, so the test must be an `async def` function"
    return None


def _marked(item: pytest.Item) -> dict[str, Any]:
    """Return the options of the marks of a test, its class and its module."""
    found: dict[str, Any] = {}
    for mark in item.iter_markers("zbus"):
        if mark.args:
            raise TypeError(f"@pytest.mark.zbus takes only named options, such as seeds={mark.args[0]!r}")
        found = {**mark.kwargs, **found}  # the closest mark comes first
    return found


def _selection(item: pytest.Item) -> str:
    """Return the argument of pytest that selects a test, without its seed if that is its only parameter."""
    _, colons, name = item.nodeid.partition("::")
    callspec = getattr(item, "callspec", None)
    if callspec is not None and list(callspec.params) == [FIXTURE]:
        name = name.partition("[")[0]
    return f"{os.path.relpath(item.path, item.config.invocation_params.dir)}{colons}{name}"


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} must be a number above 0")
    return int(text)


def _seeds(text: str) -> str:
    """Return the text itself, once it was checked: xdist sends options to its workers, but not ranges."""
    try:
        parse_seeds(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return text
