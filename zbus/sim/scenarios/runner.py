"""Runs scenarios with many seeds, on several processes, and shrinks what fails.

A process imports everything once and then runs one seed after the other. Between two seeds it collects garbage, so its
memory does not grow.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from zbus.sim import run as run_world
from zbus.sim.errors import InvariantBroken, Violation, place_of
from zbus.sim.trace import Trace
from zbus.sim.world import Logs, Overrides, World

from .scenario import Scenario, load_scenarios

COLLECT_EVERY = 20  # seeds
CHUNK_SEEDS = 10
PARENT_S = 1.0
ENDED = "the scenario ends"


class Result(NamedTuple):
    """The outcome of one seed."""

    scenario: str
    seed: int
    hash: str
    violations: tuple[Violation, ...]
    virtual_s: float
    node_s: float  # virtual seconds, summed over the nodes
    real_s: float
    steps: int  # of the event loop
    events: int  # delivered
    faults: dict[str, int]
    frames: dict[str, int]  # what happened to them
    choices: dict[str, int]
    planned: int  # faults in the plan

    @property
    def failed(self) -> bool:
        """Whether an invariant was broken."""
        return bool(self.violations)

    @property
    def symptom(self) -> str:
        """The first broken invariant: shrinking keeps it."""
        return self.violations[0].invariant if self.violations else ""


def run_seed(
    scenario: Scenario,
    seed: int,
    overrides: Overrides | None = None,
    keep_trace: bool = False,
    logs: Logs = "simulated",
) -> tuple[Result, Trace]:
    """Run a scenario with one seed."""
    world = World(
        seed,
        overrides=overrides,
        keep_trace=keep_trace,
        converge_s=scenario.converge_s,
        limit_s=scenario.limit_s,
        logs=logs,
    )
    violations: tuple[Violation, ...] = ()

    async def main() -> None:
        async with world:
            await scenario.play(world)

    began = perf_counter()
    try:
        run_world(main())
    except InvariantBroken as error:
        violations = error.violations
    except Exception as error:
        what = f"{type(error).__name__}: {error}{place_of(error)}"
        violations = (*world.ledger.violations, Violation(ENDED, world.loop.time(), "", what))
    took = perf_counter() - began
    loop, trace = world.loop, world.trace
    frames: dict[str, int] = {}
    for net in world.nets.values():
        for outcome, number in net.counts.items():
            frames[outcome] = frames.get(outcome, 0) + number
    result = Result(
        scenario.name,
        seed,
        trace.hash,
        violations,
        loop.time(),
        loop.time() * len(world.nodes),
        took,
        loop.steps,
        trace.counts.get("delivered", 0),
        world.faults_injected,
        frames,
        world.choices,
        len(world.plan.faults) if world.plan is not None else 0,
    )
    return result, trace


def run_seeds(scenario: Scenario, seeds: Iterable[int], logs: Logs = "simulated") -> Iterator[Result]:
    """Run a scenario with some seeds, one after the other, in this process."""
    gc.collect()
    gc.freeze()  # what is imported need not be looked at again
    collects = gc.isenabled()
    gc.disable()
    try:
        for number, seed in enumerate(seeds, 1):
            yield run_seed(scenario, seed, logs=logs)[0]
            if number % COLLECT_EVERY == 0:
                gc.collect()
    finally:
        gc.unfreeze()
        if collects:
            gc.enable()
        gc.collect()


def run_file(
    path: str | Path,
    work: Sequence[tuple[str, Sequence[int]]],
    jobs: int,
    finished: Callable[[list[Result]], None],
    stop: Callable[[], bool] = lambda: False,
    logs: Logs = "simulated",
) -> None:
    """Run scenarios of a file, by name, each with its seeds, on `jobs` processes.

    `finished` is called with some results at a time. Once `stop` returns True, no more seeds are begun.
    """
    _loaded[str(path)] = load_scenarios(path)  # forked processes have it too
    chunks = [
        (str(path), name, tuple(seeds[at : at + CHUNK_SEEDS]), logs)
        for name, seeds in work
        for at in range(0, len(seeds), CHUNK_SEEDS)
    ]
    if jobs == 1:
        for chunk in chunks:
            if stop():
                return
            finished(_run_chunk(*chunk))
        return
    # Forked, so that nothing is imported again.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, fork, _end_with, (os.getpid(),)) as pool:
        waiting: set[Future[list[Result]]] = set()
        queued = iter(chunks)
        while True:
            with suppress(StopIteration):
                while len(waiting) < jobs * 2 and not stop():
                    waiting.add(pool.submit(_run_chunk, *next(queued)))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in done:
                finished(each.result())


def _end_with(parent: int) -> None:
    """Let this process end when its parent does, however that ends: nothing waits for its results any more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        os._exit(1)

    threading.Thread(target=watch, name="zbus-sim-parent", daemon=True).start()


_loaded: dict[str, list[Scenario]] = {}


def _run_chunk(path: str, name: str, seeds: Sequence[int], logs: Logs) -> list[Result]:
    (scenario,) = [each for each in _loaded[path] if each.name == name]
    return list(run_seeds(scenario, seeds, logs))
