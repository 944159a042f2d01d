"""Scenarios: coroutine functions that get a world. `zbus sim run FILE` runs those of a file with many seeds."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from zbus.errors import ConfigInvalid
from zbus.sim.errors import place_of
from zbus.sim.world import CONVERGE_S, LIMIT_S, World


class Scenario(NamedTuple):
    """A program for a whole world. `name` is unique in its file."""

    name: str
    play: Callable[[World], Awaitable[object]]
    known_failure: str = ""  # why it fails today
    known_seeds: tuple[int, ...] = ()  # it fails with some of these; only these are run until it is fixed
    share: float = 1.0  # of the seeds, when several scenarios of a file are run
    converge_s: float = CONVERGE_S
    limit_s: float = LIMIT_S

    def seeds(self, first: int, end: int) -> Sequence[int]:
        """Return the seeds to run of a range, according to its share."""
        if self.known_failure:
            return self.known_seeds
        return range(round(first * self.share), round(end * self.share))


def scenario(
    *,
    known_failure: str = "",
    known_seeds: Sequence[int] = (),
    share: float = 1.0,
    converge_s: float = CONVERGE_S,
    limit_s: float = LIMIT_S,
) -> Callable[[Callable[[World], Awaitable[object]]], Scenario]:
    """Make a scenario of a coroutine function.

        @zbus.sim.scenario()
        async def orders_survive(world):
            shop = await world.node("shop", log=True, program=publish_orders)
            await world.node("billing", log=True, program=bill)
            await world.play(zbus.sim.ORDINARY, seconds=30)

    `known_failure`: why it fails today, with some of the `known_seeds`; only these are run, and one must fail.
    `share`: the part of the seeds that this scenario gets. `converge_s`: how long everything may take to converge after
    the faults. `limit_s`: how many virtual seconds it may take in all.
    """

    def make(play: Callable[[World], Awaitable[object]]) -> Scenario:
        return Scenario(play.__name__, play, known_failure, tuple(known_seeds), share, converge_s, limit_s)

    return make


def load_scenarios(path: str | Path) -> list[Scenario]:
    """Return the scenarios of a Python or TOML file, in the order of their definition. Raises `ConfigInvalid`."""
    file = Path(path)
    if not file.is_file():
        raise ConfigInvalid("scenario", f"there is no file {str(file)!r}")
    if file.suffix == ".toml":
        from .declared import load_declared

        declared = load_declared(file)
        declared.check_publishers()
        return [Scenario(declared.name, declared.play, converge_s=declared.converge_s, limit_s=declared.limit_s)]
    if file.suffix != ".py":
        raise ConfigInvalid("scenario", f"{str(file)!r} must be a .py or .toml file")
    folder = str(file.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for `python FILE`: it may import the service that it tests
    try:
        names = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        where = place_of(error) if not isinstance(error, SyntaxError) else ""
        what = f"{type(error).__name__}: {error}{where}"
        raise ConfigInvalid("scenario", f"{file} cannot be imported: {what}") from error
    found = [each for each in names.values() if isinstance(each, Scenario)]
    if not found:
        raise ConfigInvalid("scenario", f"{file} has no function that is decorated with @zbus.sim.scenario()")
    return found
