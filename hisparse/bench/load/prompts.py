"""Prompts of a wanted length in tokens, of which a wanted share begins alike. Knows no tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass

WORDS = (
    "amber", "anchor", "autumn", "basket", "bridge", "candle", "carpet", "cedar", "circle", "copper", "corner",
    "cotton", "desert", "engine", "falcon", "forest", "garden", "harbor", "hollow", "island", "jacket", "kettle",
    "ladder", "lantern", "marble", "meadow", "mirror", "needle", "orchard", "paper", "pebble", "pepper", "planet",
    "pocket", "rabbit", "ribbon", "river", "saddle", "salmon", "shadow", "silver", "spring", "stable", "summer",
    "temple", "timber", "tunnel", "valley", "velvet", "violet", "walnut", "window", "winter", "yellow",
)
PROBE_WORDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Random words. The same seed gives the same prompts, and another one prompts that begin differently.

    Attributes:
        num_tokens: wanted length. shared: of it, the share that all prompts have in common, at their beginning; in [0, 1].
        tokens_per_word: as the service counts; see `probe`.
    """

    num_tokens: int
    shared: float
    tokens_per_word: float
    seed: int

    def text(self, index: int) -> str:
        """Prompt number `index`; any two differ behind what they share."""
        words = max(1, round(self.num_tokens / self.tokens_per_word))
        common = min(round(self.shared * words), words - 1)  # the last word stays a prompt's own
        return " ".join([*_words(f"{self.seed} shared", common), *_words(f"{self.seed} own {index}", words - common)])


def probe(seed: int) -> str:
    """A text of `PROBE_WORDS` words, to learn how many tokens the service makes of a word."""
    return " ".join(_words(f"{seed} probe", PROBE_WORDS))


def _words(seed: str, count: int) -> list[str]:
    draw = random.Random(seed)
    return [draw.choice(WORDS) for _ in range(count)]
