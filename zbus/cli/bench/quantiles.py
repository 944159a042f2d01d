"""Quantiles by rank, without interpolation: each result is one of the measured values."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[int], share: float) -> int:
    """Return the value that `share` of all values do not exceed.

    >>> quantile([40, 10, 20, 30], 0.5)
    20
    """
    ranked = sorted(values)
    return ranked[max(0, min(len(ranked) - 1, round(share * len(ranked)) - 1))]
