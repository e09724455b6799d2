"""Which index groups share a block: the packing with the fewest bytes per page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.errors import ConfigError

MAX_SEARCH_STATES = 20_000
"""Partial packings that one exact search looks at before it counts as failed. Real models need a few dozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """`bins[g]`: index groups whose layers share a block of group g, ascending. `block_bytes`: of every device block."""

    block_bytes: int
    bins: tuple[tuple[int, ...], ...]


def best_packing(sizes: Sequence[int], *, layer_bytes: int, indexer_bytes: int, unit_bytes: int,
                 num_groups: int | None = None) -> Packing:
    """Packs index groups of `sizes` layers so that a page, one indexer block and one block per group, is smallest.

    A block holds `indexer_bytes`, or the layers of the fullest group at `layer_bytes` each, rounded up to `unit_bytes`.
    Of equal packings the one with the fewest groups is taken; neighbours share a block where that costs nothing.

    Args:
        num_groups: this many groups; None = the best number.
    Raises:
        ConfigError: `num_groups` is not in 1..len(sizes).

    Example: sizes [1, 1, 4], 10-byte layers, 25-byte indexer: two groups of 2 and 4 layers, blocks of 40 bytes.
    """
    if num_groups is not None and not 1 <= num_groups <= len(sizes):
        raise ConfigError(f"num_groups must be in 1..{len(sizes)} (index groups of the model), got {num_groups}")

    def block_bytes(num_layers: int) -> int:
        return round_up(max(num_layers * layer_bytes, indexer_bytes), unit_bytes)

    best: Packing | None = None
    for n in [num_groups] if num_groups is not None else range(1, len(sizes) + 1):
        if best is not None and (n + 1) * block_bytes(_lower_bound(sizes, n)) >= (len(best.bins) + 1) * best.block_bytes:
            continue
        bins = pack(sizes, n, free=block_bytes(0) // layer_bytes)
        packed = Packing(block_bytes=block_bytes(_fullest(sizes, bins)), bins=tuple(tuple(members) for members in bins))
        if best is None or (n + 1) * packed.block_bytes < (len(best.bins) + 1) * best.block_bytes:
            best = packed
    assert best is not None
    return best


def pack(sizes: Sequence[int], num_bins: int, *, free: int = 0) -> list[list[int]]:
    """Exactly `num_bins` bins of indices, none empty, the fullest as small as possible, but `free` costs nothing.

    Runs of neighbours if any reach that size, else longest-first or an exact search. The same for the same arguments.
    """
    greedy = _longest_first(sizes, num_bins)
    lowest, enough = max(_lower_bound(sizes, num_bins), free), _fullest(sizes, greedy)
    for limit in range(lowest, enough):
        bins = _neighbours(sizes, num_bins, limit) or _search(sizes, num_bins, limit)
        if bins is not None:
            return bins
    return _neighbours(sizes, num_bins, max(lowest, enough)) or greedy


def round_up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def _lower_bound(sizes: Sequence[int], num_bins: int) -> int:
    return max(max(sizes), math.ceil(sum(sizes) / num_bins))


def _fullest(sizes: Sequence[int], bins: Sequence[Sequence[int]]) -> int:
    return max(sum(sizes[i] for i in members) for members in bins)


def _in_layer_order(bins: list[list[int]]) -> list[list[int]]:
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def _neighbours(sizes: Sequence[int], num_bins: int, limit: int) -> list[list[int]] | None:
    """Runs of neighbours within `limit`; None if that takes more bins."""
    bins: list[list[int]] = [[]]
    load = 0
    for i, size in enumerate(sizes):
        must_open = len(sizes) - i == num_bins - len(bins)
        if bins[-1] and (load + size > limit or must_open):
            bins.append([])
            load = 0
        bins[-1].append(i)
        load += size
    return bins if len(bins) == num_bins else None


def _longest_first(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest first into the least filled bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for i in _descending(sizes):
        target = min(range(num_bins), key=lambda b: (load[b], b))
        bins[target].append(i)
        load[target] += sizes[i]
    return _in_layer_order(bins)


def _search(sizes: Sequence[int], num_bins: int, limit: int) -> list[list[int]] | None:
    """Exact: longest first, backtracking over bins of different load. None if impossible, or after too many states."""
    order = _descending(sizes)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    failed: set[tuple[int, ...]] = set()

    def place(depth: int) -> bool:
        if depth == len(order):
            return True
        state = (depth, *sorted(load))
        if state in failed or len(failed) >= MAX_SEARCH_STATES:
            return False
        item, tried = order[depth], set()
        for b in sorted(range(num_bins), key=lambda b: (load[b], b)):
            if load[b] + sizes[item] > limit:
                break
            if load[b] in tried:
                continue
            tried.add(load[b])
            bins[b].append(item)
            load[b] += sizes[item]
            if place(depth + 1):
                return True
            bins[b].pop()
            load[b] -= sizes[item]
        failed.add(state)
        return False

    return _in_layer_order(bins) if place(0) else None


def _descending(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
