"""Which prefixes of a request are worth finding again."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Publishes a prefix only as far as a boundary: a multiple of the interval, or one of the replay boundaries.

    Pages between two boundaries become findable together, once all of them are durable; pages behind the last one
    never. Without a retention every full page is published as soon as it is durable.

    Args:
        interval_tokens: distance of regular boundaries; None = none.
        replay_boundaries: further ones, in tokens from the start (e.g. where a conversation's turns end). Any boundary
            inside a page counts as the start of that page.
    Raises:
        ConfigError: an interval or boundary below 1.
    """

    interval_tokens: int | None = None
    replay_boundaries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.interval_tokens is not None and self.interval_tokens < 1:
            raise ConfigError(f"a retention interval must be at least 1 token, got {self.interval_tokens}")
        if any(boundary < 1 for boundary in self.replay_boundaries):
            raise ConfigError(f"replay boundaries must be at least 1 token, got {self.replay_boundaries}")

    def pages(self, limit: int, block_size: int) -> int:
        """The most of the first `limit` pages that end at a boundary."""
        ends = [boundary // block_size for boundary in self.replay_boundaries]
        best = max((end for end in ends if end <= limit), default=0)
        if self.interval_tokens is not None:
            # The last multiple of the interval that lies within the first `limit` whole pages, rounded down to its page.
            tokens = (limit * block_size + block_size - 1) // self.interval_tokens * self.interval_tokens
            best = max(best, min(limit, tokens // block_size))
        return best
