"""The pytest plugin, in runs of pytest of their own."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from plugin_support import PLUGIN, is_installed

import zbus.sim

pytest_plugins = ["pytester"]

LOADED = [] if is_installed() else ["-p", PLUGIN]
INI = """
[pytest]
addopts = --strict-markers
filterwarnings = error
"""
LOOP_SCOPE = ["-o", "asyncio_default_fixture_loop_scope=function"]  # or pytest-asyncio warns

# A run with faults that is long enough to show every difference.
SHOP = """
    async def shop(bus):
        orders = await bus.publisher("shop/orders")
        for number in range(100):
            await orders.publish({"id": number})
            await asyncio.sleep(0.1)

    async def bill(bus):
        async with bus.subscribe("shop/orders", durable="billing") as orders:
            async for order in orders:
                await order.ack()

    async def sell(world):
        await world.node("shop", log=True, program=shop)
        await world.node("billing", log=True, program=bill)
        await world.play(zbus.sim.ORDINARY, seconds=10)
"""


class Ran:
    """A run of pytest that has ended."""

    def __init__(self, result: pytest.RunResult) -> None:
        self.code, self.text = result.ret, result.stdout.str() + result.stderr.str()
        self.outcomes = result.parseoutcomes() if result.ret in (0, 1) else {}
        self.outcomes.pop("deselected", None)

    def found(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.text, re.MULTILINE)


class Project:
    """A folder with tests in which pytest runs."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester, self.path = pytester, pytester.path
        pytester.makeini(INI)

    def add(self, source: str, file: str = "test_it.py") -> None:
        shop = dedent(SHOP) if "sell(" in source else ""
        imports = "import asyncio, functools, sys, unittest\nimport pytest\nimport zbus\n"
        (self.path / file).write_text(f"{imports}{shop}\n{dedent(source)}")

    def run(self, *options: str) -> Ran:
        scope = [] if "no:asyncio" in options else LOOP_SCOPE
        return Ran(self._pytester.runpytest_subprocess(*LOADED, *scope, *options, timeout=100))

    def ids(self, *options: str) -> list[str]:
        ran = self.run("--collect-only", "-q", *options)
        assert ran.code == 0, ran.text
        return ran.found(r"^test_it\.py::(\S+)$")


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)


# Plugins for coroutine functions.

WITH = {
    "asyncio in auto mode": ["-o", "asyncio_mode=auto"],
    "asyncio in strict mode": ["-o", "asyncio_mode=strict"],
    "anyio in auto mode": ["-p", "no:asyncio", "-o", "anyio_mode=auto"],
    "asyncio and anyio in auto mode": ["-o", "asyncio_mode=auto", "-o", "anyio_mode=auto", "-W", "default"],
    "none of them": ["-p", "no:asyncio", "-p", "no:anyio"],
}


def hash_here(seed: int) -> str:
    """Return the hash of a run of the same program without pytest."""
    names: dict[str, object] = {"asyncio": asyncio, "zbus": zbus}
    exec(dedent(SHOP), names)

    async def main() -> str:
        async with zbus.sim.world(seed=seed) as world:
            await names["sell"](world)  # type: ignore[operator]
        return world.trace.hash

    return zbus.sim.run(main())


@pytest.mark.parametrize("options", WITH.values(), ids=WITH.keys())
def test_tests_run_in_an_entered_world_whichever_plugin_runs_other_coroutines(
    project: Project, options: list[str]
) -> None:
    project.add(
        """
        async def test_a_function(zbus_world):
            await sell(zbus_world)
            zbus_world.loop.at_close.append(lambda: print("\\nhash", zbus_world.seed, zbus_world.trace.hash))

        begun = []

        def noted(test):
            @functools.wraps(test)
            async def note(**arguments):
                begun.append(arguments)
                await test(**arguments)
            return note

        @noted
        async def test_a_decorated_function(zbus_world):
            assert begun.pop() == {"zbus_world": zbus_world}

        class TestAClass:
            answer = 42

            @pytest.mark.parametrize("number", [1, 2])
            async def test_a_method(self, number, zbus_world, tmp_path):
                node = await zbus_world.node("a", log=True)
                assert isinstance(asyncio.get_running_loop(), zbus.sim.SimLoop)
                assert self.answer == 42 and number in (1, 2) and tmp_path.is_dir()
                assert await (await node.bus.publisher("a/b")).publish(b"") == 1
                await asyncio.sleep(3000)  # virtual seconds
                assert zbus_world.now > 3000

        @pytest.fixture
        def busy(zbus_world):
            return lambda: zbus_world.node("a")

        async def test_a_fixture(busy):
            assert (await busy()).is_alive
        """
    )
    ran = project.run("-v", "-s", *options, "--zbus-seed", "0", "--zbus-seed", "5")

    assert ran.code == 0, ran.text
    assert {name for name in ran.outcomes if name != "warnings"} == {"passed"}
    runs = len(ran.found(r"seed5\S* "))
    assert runs in (5, 9)  # anyio runs them with each of its backends
    assert ran.found(r"^hash (\d \w+)$")[:2] == [f"{seed} {hash_here(seed)}" for seed in (0, 5)]


def test_other_coroutine_functions_are_left_to_their_plugin(project: Project) -> None:
    project.add(
        """
        @pytest.fixture
        async def loop():
            return asyncio.get_running_loop()

        async def test_plain(loop):
            assert asyncio.get_running_loop() is loop
            assert "zbus.sim" not in sys.modules

        async def test_world(zbus_world, loop):
            assert asyncio.get_running_loop() is not loop

        async def test_plain_again(loop):
            assert asyncio.get_running_loop() is loop
        """
    )
    ran = project.run("-o", "asyncio_mode=auto")

    assert ran.outcomes == {"passed": 5}, ran.text


def test_the_plugin_does_not_import_the_simulator_until_a_test_needs_it() -> None:
    code = "import sys, zbus.testing.plugin; print([name for name in sys.modules if name.startswith('zbus.sim')])"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)

    assert found.stdout.strip() == "[]"


# Seeds.

SEEDED = """
    async def test_default(zbus_world): ...

    @pytest.mark.zbus(seeds=2)
    class TestMarked:
        async def test_class(self, zbus_world): ...

        @pytest.mark.zbus(seeds=[9])
        async def test_list(self, zbus_world): ...

    @pytest.mark.parametrize("number", [1, 2])
    async def test_number(zbus_world, number): ...

    async def test_without(): ...
"""


def test_each_seed_is_a_test_of_its_own(project: Project) -> None:
    project.add(SEEDED)

    assert project.ids() == [
        "test_default[seed0]",
        "test_default[seed1]",
        "test_default[seed2]",
        "TestMarked::test_class[seed0]",
        "TestMarked::test_class[seed1]",
        "TestMarked::test_list[seed9]",
        "test_number[1-seed0]",
        "test_number[1-seed1]",
        "test_number[1-seed2]",
        "test_number[2-seed0]",
        "test_number[2-seed1]",
        "test_number[2-seed2]",
        "test_without",
    ]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (
            ["--zbus-seeds", "1"],
            [
                "test_default[seed0]",
                "TestMarked::test_class[seed0]",
                "TestMarked::test_list[seed0]",
                "test_number[1-seed0]",
                "test_number[2-seed0]",
                "test_without",
            ],
        ),
        (
            ["--zbus-seed", "7", "--zbus-seed", "100:102", "-k", "default or list"],
            [f"{test}[seed{seed}]" for test in ("test_default", "TestMarked::test_list") for seed in (7, 100, 101)],
        ),
        (["-k", "seed9"], ["TestMarked::test_list[seed9]"]),
    ],
)
def test_the_command_line_chooses_the_seeds(project: Project, options: list[str], ids: list[str]) -> None:
    project.add(SEEDED)

    assert project.ids(*options) == ids


def test_the_seed_of_the_id_is_the_seed_of_the_world_also_in_other_processes(project: Project) -> None:
    project.add(
        """
        async def test_it(zbus_world, request):
            assert request.node.name == f"test_it[seed{zbus_world.seed}]"
        """
    )
    ran = project.run("-n", "2", "--zbus-seed", "3:7")

    assert ran.outcomes == {"passed": 4}, ran.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--zbus-seed", "x"], "'x' must be a seed such as 7, or a range such as 100:200"),
        (["--zbus-seed", "5:5"], "'5:5' has no seed"),
        (["--zbus-seeds", "0"], "'0' must be a number above 0"),
    ],
)
def test_an_option_that_names_no_seeds_is_a_usage_error(project: Project, options: list[str], reason: str) -> None:
    ran = project.run(*options)

    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert reason in ran.text


# Marks.


def test_the_mark_sets_options_of_the_world(project: Project) -> None:
    project.add(
        """
        @pytest.mark.zbus(limit_s=50)
        class TestIt:
            @pytest.mark.zbus(seeds=1)
            async def test_limited(self, zbus_world):
                await asyncio.sleep(100)
        """
    )
    ran = project.run("-o", "asyncio_mode=auto")

    assert ran.outcomes == {"failed": 1}
    assert "WorldStuck: the scenario did not end within 50 virtual seconds" in ran.text


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        ("zbus(5)", "@pytest.mark.zbus takes only named options, such as seeds=5"),
        ("zbus(seeds='many')", "seeds='many' must be a number of seeds, or a list of seeds"),
        ("zbus(seed=5)", "@pytest.mark.zbus of test_it[seed0] has an option that zbus.sim.World does not take"),
        ("zbus(colour=5)", "unexpected keyword argument 'colour'"),
    ],
)
def test_a_wrong_mark_is_an_error_with_the_name_of_the_test(project: Project, mark: str, reason: str) -> None:
    project.add(f"@pytest.mark.{mark}\nasync def test_it(zbus_world): ...")

    ran = project.run()

    assert ran.code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert reason in ran.text
    assert "test_it" in ran.text


# Tests that cannot run in a world.


def test_a_test_that_cannot_run_in_a_world_says_why(project: Project) -> None:
    project.add(
        """
        def test_synchronous(zbus_world):
            assert False, "never runs"

        async def test_late(request):
            request.getfixturevalue("zbus_world")

        class TestCase(unittest.IsolatedAsyncioTestCase):
            @pytest.mark.usefixtures("zbus_world")
            async def test_method(self):
                assert False, "never runs"
        """
    )
    ran = project.run("-o", "asyncio_mode=auto", "--zbus-seeds", "1")

    assert "never runs" not in ran.found("^E.*$")
    assert "test_synchronous[seed0] cannot use `zbus_world`: a world runs under virtual time, so the test must be" in (
        ran.text
    )
    assert "test_late cannot use `zbus_world`: name it as an argument" in ran.text
    assert "test_method cannot use `zbus_world`: it is a method of a unittest.TestCase" in ran.text
    assert "passed" not in ran.outcomes


# Failures.

FAILING = """
    async def test_invariant(zbus_world):
        @zbus_world.invariant
        def no_sixth_order_is_delivered(world):
            delivered = sum(len(account.got) for account in world.ledger.accounts.values())
            return f"{delivered} were delivered" if delivered > 5 else None

        assert zbus_world.choose("size", 3, 3) == 3
        await sell(zbus_world)

    @pytest.mark.parametrize("text", ["a b", "c"])
    async def test_assert(zbus_world, text):
        await zbus_world.node("a", log=True)
        assert text == "c"
"""


def test_a_failure_is_reported_with_its_seed_its_faults_and_the_command_that_repeats_it(project: Project) -> None:
    project.add(FAILING)

    ran = project.run("-o", "asyncio_mode=auto", "--zbus-seed", "3", "-k", "invariant")

    assert ran.outcomes == {"failed": 1}
    assert len(ran.found(r"^-+ zbus world -+$")) == 1
    assert ran.found(r"^seed 3, \d+\.\d+ virtual seconds, trace \w{32}$")
    assert ran.found(r"^E +zbus\.sim\.errors\.InvariantBroken: seed 3 breaks 1 invariant:$")
    assert ran.found(r"^broken invariants:\n  no sixth order is delivered at \d+\.\d+ s: \d+ were delivered$")
    assert ran.found(r"^choices: size 3$")
    assert ran.found(r"^network: \d+% dropped, \d+% duplicated, delays up to \d+ ms$")
    assert ran.found(r"^faults of the plan:\n  \w+ at \d+\.\d s for \d+\.\d\d s$")
    assert ran.found(r"^faults that happened: \w+ \d")
    assert ran.found(r"^the last 40 steps before it, without frames on the network")
    assert ran.found(r"^ +0\.\d+ +billing +delivered ")
    assert ran.found(r"^ +1\.0+ +broken +no sixth order is delivered \d+ were delivered\n=")
    assert not ran.found(r"^ +\d+\.\d+ +\w+ +(sent|arrived)")
    assert not ran.found(r"world\.py:\d+")  # where the simulator noticed it helps nobody


@pytest.mark.parametrize("test", ["invariant", "assert"])
def test_the_printed_command_repeats_the_failure(project: Project, test: str) -> None:
    project.add(FAILING)
    first = project.run("-o", "asyncio_mode=auto", "--zbus-seed", "2:5", "-k", test)
    (command,) = first.found(r"^repeat it: pytest (.* --zbus-seed 4)$")

    again = project.run("-p", "no:asyncio", *shlex.split(command))

    assert first.outcomes["failed"] == 3
    assert again.outcomes == {"failed": 1}
    assert again.found(r"^(seed 4, .* trace \w+)$") == first.found(r"^(seed 4, .* trace \w+)$") != []
    assert again.found(r"^E  .*$") == first.found(r"^E  .*$")[-len(again.found(r"^E  .*$")) :] != []


def test_the_command_works_in_the_folder_in_which_pytest_was_started(project: Project) -> None:
    (project.path / "below").mkdir()
    project.add("async def test_it(zbus_world): assert 0", file="below/test_below.py")
    inside, outside = (
        subprocess.run(
            [sys.executable, "-m", "pytest", *LOADED, *LOOP_SCOPE, "--zbus-seeds", "1", file],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=100,
        ).stdout
        for folder, file in ((project.path / "below", "test_below.py"), (project.path, "below"))
    )

    assert "repeat it: pytest test_below.py::test_it --zbus-seed 0\n" in inside
    assert f"repeat it: pytest {Path('below', 'test_below.py')}::test_it --zbus-seed 0\n" in outside


def test_an_exception_of_the_test_itself_is_shown_at_its_line_with_the_seed(project: Project) -> None:
    project.add(
        """
        async def helper(world):
            await world.until(lambda: False, within_s=1)

        async def test_assert(zbus_world):
            await zbus_world.run(seconds=2)
            assert zbus_world.now == 3

        async def test_until(zbus_world):
            await helper(zbus_world)

        async def test_skipped(zbus_world):
            pytest.skip("not today")
        """
    )
    ran = project.run("--zbus-seed", "6", "-rs")

    assert ran.outcomes == {"failed": 2, "skipped": 1}
    assert ran.found(r"^>       assert zbus_world\.now == 3\nE       assert 2\.0 == 3\n")
    assert ran.found(r"^>       await helper\(zbus_world\)$")
    assert "WorldStuck: the condition was not true within 1 s" in ran.text
    assert len(ran.found(r"^E +seed 6$")) == 2
    assert len(ran.found(r"^seed 6, ")) == 2
    assert "testing/plugin.py" not in ran.text
    assert "not today" in ran.text


def test_a_test_that_waits_forever_is_reported_with_the_line_at_which_it_waits(project: Project) -> None:
    project.add(
        """
        async def wait():
            await asyncio.Event().wait()

        async def test_it(zbus_world):
            await wait()  # line 10
        """
    )
    ran = project.run("--zbus-seeds", "1")

    assert ran.found(r"^E +zbus\.sim\.errors\.WorldStuck: the scenario did not end within 3600 virtual seconds$")
    assert ran.found(r"^ +waits in wait, \S+/test_it\.py:7\n +called by test_it, \S+/test_it\.py:10\n")
    assert "_watch" not in ran.text


def test_the_number_of_steps_in_a_report_can_be_chosen(project: Project) -> None:
    project.add(FAILING)

    ran = project.run("--zbus-seed", "3", "-k", "invariant", "--zbus-trace", "100000")

    (shown,) = ran.found(r"^the last (\d+) steps")
    assert int(shown) > 40
    assert ran.found(r"^ +0\.000000 +shop +started +shop#1$")


def test_a_failure_in_another_process_is_reported_in_full(project: Project) -> None:
    project.add(FAILING)

    ran = project.run("-n", "1", "--zbus-seed", "3", "-k", "invariant")

    assert ran.found(r"^repeat it: pytest test_it\.py::test_invariant --zbus-seed 3$")


def test_an_interrupted_run_leaves_logging_and_clocks_as_they_were(project: Project) -> None:
    project.add(
        """
        import logging, random, time
        clock = time.time

        def interrupt():
            raise KeyboardInterrupt

        async def test_it(zbus_world):
            asyncio.get_running_loop().call_later(1, interrupt)
            await asyncio.sleep(5)
        """
    )
    project.add(
        """
        import logging, time

        def pytest_unconfigure():
            print("logging", not logging.getLogger("zbus").disabled, time.time is sys.modules["test_it"].clock)
        """,
        file="conftest.py",
    )
    ran = project.run("--zbus-seeds", "1")

    assert ran.code == pytest.ExitCode.INTERRUPTED
    assert "logging True True" in ran.text


def test_the_first_test_of_the_documentation_has_at_most_ten_lines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    first = next(block for block in blocks if "zbus_world" in block)

    assert len(first.splitlines()) <= 10
