"""Faults as data: a plan is drawn from the seed before the world runs, so that a run can be repeated without some.

Each fault names its nodes by a number between 0 and 1, not by their names: a plan is the same for a world with fewer
nodes, and leaving out one fault does not change the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from .machine.fabric import Conditions

# The effect of each kind, for `zbus sim run --help` and the documentation.
KINDS: Mapping[str, str] = {
    "partition": "two nodes cannot reach each other",
    "one_way": "one node does not receive what another one sends",
    "isolate": "a node reaches no other node",
    "kill": "kill -9, and a start after a while",
    "restart": "an orderly stop, and a start after a while",
    "power_cut": "what was not synced is gone; the node starts after a while",
    "freeze": "the process is suspended, as with SIGSTOP",
    "disconnect": "the transport of a node is down: sending raises, and part of the frames is gone",
    "slow_link": "a link carries few bytes per second",
    "slow_disk": "a sync takes long",
    "disk_full": "commits are refused",
    "disk_errors": "commits fail; some of them were stored anyway",
    "clock": "the wall clock of a node is moved",
    "aimed_kill": "kill -9 at a named step, such as between a commit and its acknowledgement",
    "restore": "the log is replaced by an older copy while the node is down",
    "clone": "a second node starts with a copy of the log",
    "corrupt": "a bit of a stored event flips",
    "malformed": "a stranger sends malformed frames",
    "forge": "a stranger sends beacons that claim positions which logs have not reached",
}

# Steps at which a fault may be aimed, and what they mean.
STEPS: Mapping[str, str] = {
    "received": "events of another node arrived and are not committed",
    "committed": "events are durable, and their publisher does not know yet",
    "position stored": "the position in another log was stored",
    "acknowledged": "a cursor was stored",
}


class Fault(NamedTuple):
    """One fault of a plan."""

    at_s: float
    kind: str
    node: float  # which node, from 0 to 1
    other: float  # which other node
    for_s: float
    strength: float  # from 0 to 1; what it means depends on the kind

    def __str__(self) -> str:
        return f"{self.kind} at {self.at_s:.1f} s for {self.for_s:.2f} s"


class Plan(NamedTuple):
    """The faults of one run, and the conditions of the network."""

    conditions: Conditions
    faults: tuple[Fault, ...]

    def without(self, number: int) -> Plan:
        """Return the plan without one fault."""
        return self._replace(faults=self.faults[:number] + self.faults[number + 1 :])


@dataclass(frozen=True)
class Faults:
    """Which faults a scenario may have: for each kind, the smallest and the largest number of them.

    >>> Faults(kill=(0, 2), partition=(1, 1)).numbers
    {'kill': (0, 2), 'partition': (1, 1)}
    """

    numbers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    drop: Sequence[float] = (0.0, 0.02, 0.1)  # one of them is drawn
    duplicate: Sequence[float] = (0.0, 0.05)
    delay_s: Sequence[float] = (0.004, 0.05)  # the longest delay
    for_s: tuple[float, float] = (0.05, 6.0)  # how long a fault lasts

    def __init__(self, **given: Any) -> None:
        known = {name: given.pop(name) for name in ("drop", "duplicate", "delay_s", "for_s") if name in given}
        numbers = given.pop("numbers", None) or {
            kind: (number, number) if isinstance(number, (int, float, str)) else tuple(number)
            for kind, number in given.items()
        }
        for kind in numbers:
            if kind not in KINDS:
                raise ValueError(f"there is no fault {kind!r}; known are: {', '.join(KINDS)}")
        for kind, number in numbers.items():
            if len(number) != 2 or not all(isinstance(each, int) for each in number) or not 0 <= number[0] <= number[1]:
                raise ValueError(f"{kind} must be a number, or the smallest and the largest, such as (0, 2)")
        object.__setattr__(self, "numbers", numbers)
        for name, value in known.items():
            if isinstance(value, (int, float, str)) or not value or any(each < 0 for each in value):
                raise ValueError(f"{name} must be a sequence of numbers that are not negative, not {value!r}")
            if name in ("drop", "duplicate") and max(value) > 1:
                raise ValueError(f"{name} is a probability: {max(value):g} is more than 1")
            if name == "for_s" and (len(value) != 2 or not 0 < value[0] <= value[1]):
                raise ValueError(f"for_s must be the shortest and the longest duration, not {value!r}")
            object.__setattr__(self, name, value)

    def plan(self, chance: Random, seconds: float) -> Plan:
        """Draw the faults of one run of `seconds` seconds."""
        conditions = Conditions(
            drop=chance.choice(self.drop),
            duplicate=chance.choice(self.duplicate),
            delay_s=(0.0002, chance.choice(self.delay_s)),
        )
        found: list[Fault] = []
        for kind, (least, most) in self.numbers.items():
            for _ in range(chance.randint(least, most)):
                low, high = self.for_s
                for_s = low * (high / low) ** chance.random()  # short ones are as likely as long ones
                at_s = chance.random() * seconds * 0.9
                found.append(Fault(at_s, kind, chance.random(), chance.random(), for_s, chance.random()))
        return Plan(conditions, tuple(sorted(found)))


# Every fault after which no event may be lost, with exact clocks and honest peers.
ORDINARY = Faults(
    partition=(0, 1), one_way=(0, 1), kill=(0, 2), restart=(0, 1), power_cut=(0, 1), freeze=(0, 1), disconnect=(0, 2)
)
NONE = Faults(drop=(0.0,), duplicate=(0.0,), delay_s=(0.002,))
