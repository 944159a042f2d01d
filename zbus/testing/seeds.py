"""Seeds of a test: from the command line, from its mark, or the first few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SEEDS = 3  # how many, if neither the command line nor a mark says so


def parse_seeds(text: str) -> range:
    """Return the seeds of `7` or `100:200`. Raises `ValueError`.

    >>> list(parse_seeds("7")), len(parse_seeds("100:200"))
    ([7], 100)
    """
    first, colon, end = text.partition(":")
    if not first.isdecimal() or (colon and not end.isdecimal()):
        raise ValueError(f"{text!r} must be a seed such as 7, or a range such as 100:200")
    found = range(int(first), int(end) if colon else int(first) + 1)
    if not found:
        raise ValueError(f"{text!r} has no seed: 100:200 means the seeds from 100 to 199")
    return found


def choose_seeds(given: Iterable[str], number: int | None, marked: object) -> Sequence[int]:
    """Return the seeds of one test. Seeds of the command line come before a number, and both before the mark.

    The first seed is always 0, so that a run without options can be repeated. Raises `ValueError`.

    >>> choose_seeds([], None, 2), choose_seeds([], 1, 2), choose_seeds(["7", "8:10"], 1, 2)
    ([0, 1], [0], [7, 8, 9])
    """
    seeds = [seed for text in given for seed in parse_seeds(text)]
    if seeds:
        return list(dict.fromkeys(seeds))
    wanted = number if number is not None else SEEDS if marked is None else marked
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1:
        return list(range(wanted))
    if isinstance(wanted, (list, tuple, range)) and wanted and all(type(seed) is int and seed >= 0 for seed in wanted):
        return list(dict.fromkeys(wanted))
    raise ValueError(f"seeds={wanted!r} must be a number of seeds, or a list of seeds")
