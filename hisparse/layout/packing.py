"""Which index groups share a block."""

from __future__ import annotations

from collections.abc import Sequence


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def pack(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest-first into the least filled bin; members of a bin, and bins by first member, stay in layer order."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        target = min(range(num_bins), key=lambda b: (load[b], b))
        bins[target].append(i)
        load[target] += sizes[i]
    return sorted((sorted(members) for members in bins if members), key=lambda members: members[0])
