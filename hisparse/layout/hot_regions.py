"""Rows of hot regions: how many each hot group gets, and whether they are enough.

Index groups that are packed together share blocks, so rows are counted per hot group. Always whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hisparse.errors import ConfigError
from hisparse.layout.packing import round_up

MAX_HOT_ROWS = 32_768
"""Slots of one region are int16."""


def start_rows(given: int | Sequence[int] | None, *, total_rows: int | None = None, weights: Sequence[float] | None = None,
               num_groups: int, top_k: int, block_size: int) -> tuple[int, ...]:
    """Rows of a region at its start, per hot group, in whole pages; see `CacheConfig` for the options.

    Args:
        given: for every hot group, or one number each; None = 3 * top_k and a page, at most MAX_HOT_ROWS.
        total_rows: instead of `given`, split by `weights` (None = equal).
    Raises:
        ConfigError: a list of another length than num_groups, rows below top_k or above MAX_HOT_ROWS; see `split_rows`.
    """
    if total_rows is not None:
        shares = [1.0] * num_groups if weights is None else weights
        _check_length("cache.hot_rows_weights", shares, num_groups)
        return split_rows(total_rows, shares, top_k=top_k, block_size=block_size)
    _check_top_k(top_k)
    if given is None:
        given = min(3 * top_k + block_size, MAX_HOT_ROWS)
    for g, rows in enumerate(_per_group("cache.hot_rows", given, num_groups)):
        which = "cache.hot_rows" if isinstance(given, int) else f"cache.hot_rows[{g}]"
        if rows < top_k:
            raise ConfigError(f"{which} must be at least top_k = {top_k} rows of this model, got {rows}")
        if rows > MAX_HOT_ROWS:
            raise ConfigError(f"{which} must be at most {MAX_HOT_ROWS} rows, got {rows}; lower it")
    return tuple(round_up(rows, block_size) for rows in _per_group("cache.hot_rows", given, num_groups))


def limit_rows(given: int | Sequence[int] | None, *, start: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Rows a region may grow to, per hot group, in whole pages (rounded down).

    Args:
        given: for every hot group, or one number each; None = 4 times the start, at most MAX_HOT_ROWS.
        start: rows at the start, per hot group.
    Raises:
        ConfigError: a list of another length than `start`, or a limit outside start..MAX_HOT_ROWS.
    """
    if given is None:
        return tuple(min(4 * rows, MAX_HOT_ROWS) for rows in start)
    limits = tuple(rows // block_size * block_size for rows in _per_group("cache.hot_rows_max", given, len(start)))
    for g, (low, limit) in enumerate(zip(start, limits, strict=True)):
        if not low <= limit <= MAX_HOT_ROWS:
            raise ConfigError(f"cache.hot_rows_max of hot group {g} must be in {low}..{MAX_HOT_ROWS} (its hot_rows..limit), "
                              f"got {limit}; a list sets each group apart")
    return limits


def split_rows(total_rows: int, weights: Sequence[float], *, top_k: int, block_size: int) -> tuple[int, ...]:
    """Splits a budget of rows over hot groups: top_k for each, the rest by weight, in whole pages.

    The rest goes out by largest remainder (ties: the lower group), at most MAX_HOT_ROWS for one group; what a full group
    leaves goes to the others. A group of weight 0 gets no more than top_k. The sum never exceeds the budget.

    Args:
        total_rows: budget of one request over all hot groups. weights: finite, >= 0, one per hot group.
    Raises:
        ConfigError: the budget does not give every group top_k rows.

    Example: 1,000 rows, weights (1, 3), top_k 128, pages of 64: of 15 pages 2 each, the other 11 as 2.75 and 8.25, i.e.
    3 and 8: (320, 640).
    """
    _check_top_k(top_k)
    least, most = -(-top_k // block_size), MAX_HOT_ROWS // block_size
    rest = total_rows // block_size - least * len(weights)
    if rest < 0:
        raise ConfigError(
            f"cache.hot_rows_total = {total_rows} rows cannot give each of {len(weights)} hot groups top_k = {top_k} rows "
            f"({least} pages of {block_size}); it must be at least {least * block_size * len(weights)}"
        )
    pages = [least] * len(weights)
    shares = {g: Fraction(weight) for g, weight in enumerate(weights) if weight > 0}
    while rest and shares:
        whole = sum(shares.values())
        ideal = {g: rest * share / whole for g, share in shares.items()}
        full = [g for g in shares if pages[g] + ideal[g] > most]
        for g in full:
            rest -= most - pages[g]
            pages[g] = most
            del shares[g]
        if not full:
            by_remainder = sorted(ideal, key=lambda g: (int(ideal[g]) - ideal[g], g))
            left = rest - sum(int(value) for value in ideal.values())
            for place, g in enumerate(by_remainder):
                pages[g] += int(ideal[g]) + (place < left)
            rest = 0
    return tuple(count * block_size for count in pages)


def hot_state_bytes(slots: int, positions: int, *, hashed: bool = False) -> int:
    """Device bytes of the replacement state of one seat and index group: `hisparse.ops.HotState` on CUDA.

    A position of 4 bytes and a use counter of 1 byte for each slot, the hand, and 2 bytes for each position unless hashed.

    Args:
        slots: rows a region may grow to, in whole pages of 64. positions: longest sequence, in whole pages.
    Example: 4,096 slots and 131,072 positions: 20,480 + 4 + 262,144 bytes.
    """
    return 5 * slots + 4 + (0 if hashed else 2 * positions)


def check_query_rows(rows: Sequence[int], top_k: int, lookahead_tokens: int) -> None:
    """A request's verification rows must fit its hot regions: there are no overflow rows.

    Args:
        rows: of a region at its starting size, per hot group. lookahead_tokens: drafts verified beside the next token.
    Raises:
        ConfigError: a group has fewer than (1 + lookahead_tokens) * top_k rows.

    Example: rows (6208, 4096), top_k 2048, lookahead 2 needs 6,144 rows: group 1 is too small.
    """
    if lookahead_tokens < 0:
        raise ConfigError(f"lookahead_tokens must be at least 0, got {lookahead_tokens}")
    need = (1 + lookahead_tokens) * top_k
    small = {g: count for g, count in enumerate(rows) if count < need}
    if small:
        raise ConfigError(
            f"{1 + lookahead_tokens} query rows of a request (lookahead_tokens = {lookahead_tokens}) may select "
            f"{need} different rows (top_k = {top_k}), but {_groups_text(small)}; raise cache.hot_rows to at least {need} "
            f"for every hot group (with cache.hot_rows_total: raise it, or the weights of these groups), or lower "
            "lookahead_tokens"
        )


def rows_text(rows: Sequence[int]) -> str:
    """For people. Examples: (64, 64) -> "64 rows"; (2112, 8256) -> "2,112..8,256 rows"; () -> "no rows"."""
    if not rows:
        return "no rows"
    low, high = min(rows), max(rows)
    return f"{low:,} rows" if low == high else f"{low:,}..{high:,} rows"


def _check_top_k(top_k: int) -> None:
    if top_k > MAX_HOT_ROWS:
        raise ConfigError(f"this model selects top_k = {top_k} rows, more than the {MAX_HOT_ROWS} that a hot region can hold; "
                          "set cache.enabled to false")


def _per_group(name: str, given: int | Sequence[int], num_groups: int) -> Sequence[int]:
    if isinstance(given, int):
        return (given,) * num_groups
    _check_length(name, given, num_groups)
    return given


def _check_length(name: str, given: Sequence[float], num_groups: int) -> None:
    if len(given) != num_groups:
        raise ConfigError(
            f"{name} has {len(given)} entries, but the layout of this model has {num_groups} hot groups; give one for each. "
            f"'hisparse serve ... --dry-run --set {name}=null' shows the groups and their layers"
        )


def _groups_text(rows: dict[int, int]) -> str:
    named = [f"group {g} has {count}" for g, count in list(rows.items())[:4]]
    more = f" and {len(rows) - len(named)} more are too small" if len(rows) > len(named) else ""
    return "hot " + ", ".join(named) + more
