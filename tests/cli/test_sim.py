"""`zbus sim run`: exit codes, summaries, repeating a failure, resuming, timelines."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zbus.cli.app import run
from zbus.util.process import is_alive

SCENARIO = """
import asyncio
import zbus.sim

async def publish(bus):
    publisher = await bus.publisher("shop/a")
    for number in range(20):
        await publisher.publish(b"x")
        await asyncio.sleep(0.1)

async def read(bus):
    async with bus.subscribe("shop/**", durable="billing") as subscription:
        async for _ in subscription:
            pass

@zbus.sim.scenario()
async def sound(world):
    await world.node("b", log=True, program=read)
    await world.node("a", log=True, program=publish)
    await world.play(zbus.sim.ORDINARY, 5.0)

@zbus.sim.scenario()
async def fails_when_killed(world):
    await world.node("b", log=True, program=read)
    await world.node("a", log=True, program=publish)
    @world.invariant
    def nobody_is_killed(world):
        return "somebody was" if world.faults_injected.get("kill") else None
    await world.play(zbus.sim.Faults(kill=(0, 2), freeze=(0, 2)), 5.0)

@zbus.sim.scenario(known_failure="it always fails", known_seeds=[3, 4])
async def known(world):
    world.invariant(lambda world: "as known")
    await world.run(2.0)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.py"
    path.write_text(SCENARIO)
    return path


def test_a_sound_scenario_ends_with_0_and_a_summary(file: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["sim", "run", str(file), "--only", "sound", "--seeds", "12"]) == 0

    out = capfdbinary.readouterr().out.decode()
    assert out.startswith("12 seeds, 0 failed")
    assert "node-hours" in out
    assert "faults: " in out


def test_the_summary_as_json_counts_faults_and_frames(file: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["sim", "run", str(file), "--only", "sound", "--seeds", "5", "--json"]) == 0

    summary = json.loads(capfdbinary.readouterr().out)
    assert (summary["seeds"], summary["failed"]) == (5, 0)
    assert summary["frames"]["sent"] > 100
    assert summary["faults"]
    assert summary["node_seconds_per_second"] > 0


def test_a_failure_ends_with_1_and_the_printed_command_repeats_it(
    file: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["sim", "run", str(file), "--only", "fails_when_killed", "--seeds", "10", "--jobs", "2"]) == 1
    text = capfdbinary.readouterr().err.decode()
    assert "nobody is killed" in text
    assert re.search(r"shrunk in \d+ runs from \d faults to 1", text)
    assert "fault        kill" in text
    command = re.search(r"repeat it: +(zbus .*)", text)
    assert command is not None
    _, *arguments = shlex.split(command[1])

    assert run([*arguments, "--no-shrink"]) == 1

    again = capfdbinary.readouterr().err.decode()
    assert "nobody is killed" in again
    seed = re.search(r"seed (\d+)", text)
    assert seed is not None
    assert f"FAILED fails_when_killed, seed {seed[1]}" in again


def test_a_known_failure_is_run_with_its_seeds_only_and_must_fail(
    file: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["sim", "run", str(file), "--only", "known", "--seeds", "50"]) == 0
    assert b"2 seeds, 0 failed, 1 known failures" in capfdbinary.readouterr().out

    file.write_text(SCENARIO.replace('"as known"', '"as known" if world.seed == 4 else None'))
    assert run(["sim", "run", str(file), "--only", "known", "--seeds", "50"]) == 0
    file.write_text(SCENARIO.replace('"as known"', "None"))
    assert run(["sim", "run", str(file), "--only", "known", "--seeds", "50"]) == 1
    assert b"known is marked as a known failure, and no seed failed" in capfdbinary.readouterr().err


def test_a_run_can_be_resumed(file: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    state = tmp_path / "state.json"
    command = ["sim", "run", str(file), "--only", "sound", "--resume", str(state), "--json"]
    assert run([*command, "--seeds", "4"]) == 0
    assert run([*command, "--seeds", "2:7"]) == 0

    first, second = (json.loads(line)["seeds"] for line in capfdbinary.readouterr().out.splitlines())
    assert (first, second) == (4, 3)
    assert json.loads(state.read_text())["done"] == {"sound": [0, 1, 2, 3, 4, 5, 6]}

    file.write_text(SCENARIO + "# changed")
    assert run([*command, "--seeds", "2"]) == 0
    captured = capfdbinary.readouterr()
    assert json.loads(captured.out)["seeds"] == 2
    assert b"the code has changed" in captured.err
    state.write_text("{}")
    assert run([*command, "--seeds", "2"]) == 2


def test_the_timeline_has_a_column_for_each_node(file: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["sim", "run", str(file), "--only", "sound", "--show", "2"]) == 0
    short = capfdbinary.readouterr().out.decode()
    assert run(["sim", "run", str(file), "--only", "sound", "--show", "2", "--frames"]) == 0
    long = capfdbinary.readouterr().out.decode()

    lines = short.splitlines()
    assert lines[0].startswith("sound, seed 2, trace ")
    assert lines[1].split() == ["seconds", "a", "b"]
    published = next(line for line in lines if "published shop/a" in line)
    delivered = next(line for line in lines if "delivered billing shop/a" in line)
    assert delivered.index("delivered") > published.index("published")
    assert "arrived" not in short
    assert "arrived" in long


def test_seeds_may_be_a_range_and_wrong_arguments_are_usage_errors(
    file: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["sim", "run", str(file), "--only", "sound", "--seeds", "5:7", "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["seeds"] == 2
    for wrong, text in (
        (["--seeds", "x"], "seeds"),
        (["--seeds", "7:5"], "seeds"),
        (["--only", "other"], "it has: sound, fails_when_killed, known"),
        (["--shrunk", "{}"], "give --seed"),
        (["--shrunk", "{", "--seed", "1"], "shrunk"),
    ):
        assert run(["sim", "run", str(file), *wrong]) == 2, wrong
        assert text in capfdbinary.readouterr().err.decode()
    empty = tmp_path / "empty.py"
    empty.write_text("")
    for path in (empty, tmp_path / "missing.py", tmp_path):
        assert run(["sim", "run", str(path)]) == 2
    assert "scenario" in capfdbinary.readouterr().err.decode()


def test_the_processes_of_a_run_end_with_it_even_if_it_is_killed(file: Path) -> None:
    command = [sys.executable, "-m", "zbus", "sim", "run", str(file), "--only", "sound", "--seeds", "100000"]
    started = subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    deadline = time.monotonic() + 30.0
    while len(found := children.read_text().split()) < 2:
        assert time.monotonic() < deadline, "it started no processes"
        time.sleep(0.02)
    started.kill()
    started.wait()

    while any(is_alive(int(pid)) for pid in found):
        assert time.monotonic() < deadline, "its processes still run"
        time.sleep(0.02)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_run_prints_what_it_has(file: Path, tmp_path: Path, jobs: str) -> None:
    state = tmp_path / "state.json"
    command = [sys.executable, "-m", "zbus", "sim", "run", str(file), "--only", "sound", "--seeds", "100000"]
    started = subprocess.Popen(
        [*command, "--jobs", jobs, "--resume", str(state)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30.0
    while not state.exists():
        assert time.monotonic() < deadline, "it did not begin"
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=30.0)

    assert started.returncode == 1
    assert re.match(rb"\d+ seeds, 0 failed", out)
    assert b"interrupted" in err
    assert b"Traceback" not in err
