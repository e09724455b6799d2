"""Token ids to text while they arrive: never half a character, never a piece of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"
_CONTEXT_TOKENS = 6
_WINDOW_TOKENS = 32
"""A character spans at most 4 bytes, hence 4 tokens: a longer unfinished run is broken output and is let go."""


class Decoder(Protocol):
    """What is used of a tokenizer."""

    def decode(self, token_ids: Sequence[int], /) -> str: ...


class Detokenizer:
    """One request's text. Does not decide anything but stop strings: token limits and EOS are the scheduler's.

    Args:
        tokenizer: decodes lists of ids.
        stop: strings that end the text; the text before the earliest match is kept, the match is not.
        prompt_ids: the tail of the prompt is context for the first tokens (some tokenizers drop a leading blank).
    Attributes:
        stopped: the stop string that was found, or None.
    Example: with stop=("\\n\\n",) and tokens "a", "\\n", "\\n", "b": push -> "a", "", "" and `stopped == "\\n\\n"`;
        `take_released()` -> 1: of the four tokens only "a" lies in the text.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = (), *, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._context: list[int] = list(prompt_ids[-_CONTEXT_TOKENS:])
        if self._decode(self._context).endswith(UNFINISHED):
            self._context = []
        self._window: list[int] = []
        self._window_chars = 0
        self._held = ""
        self._num_chars = self._released_chars = self._num_released = 0
        self._ends: deque[int] = deque()
        """Where in the text each token ends that is not released yet; those of an unfinished character are missing."""
        self.stopped: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is now certain: whole characters that can not become part of a stop string. "" once stopped."""
        if self.stopped is not None:
            return ""
        fresh = ""
        for token in token_ids:
            fresh += self._append(token)
        return self._release(fresh)

    def finish(self) -> str:
        """The request ended without a stop string: everything that was held back, half characters as U+FFFD."""
        if self.stopped is not None:
            return ""
        rest = self._window_text()[self._window_chars :]
        self._complete(rest, len(self._window))
        text = self._release(rest)
        if self.stopped is None:
            text += self._let_go(self._held)
        self._context, self._window, self._window_chars, self._held = [], [], 0, ""
        return text

    def take_released(self) -> int:
        """How many more tokens have their whole text in what was returned since the last call. A token of a stop string,
        even one that begins before it, never counts."""
        count, self._num_released = self._num_released, 0
        return count

    def _append(self, token: int) -> str:
        """Adds a token; returns the characters of the window that are final now."""
        self._window.append(token)
        text = self._window_text()
        whole = not text.endswith(UNFINISHED) or len(self._window) >= _WINDOW_TOKENS
        certain = text if whole else text[:-1]
        fresh = certain[self._window_chars :]
        self._window_chars = max(self._window_chars, len(certain))
        self._complete(fresh, len(self._window) if whole else 0)
        if whole:
            if text:
                self._context = (self._context + self._window)[-_CONTEXT_TOKENS:]
                if self._decode(self._context).endswith(UNFINISHED):
                    self._context = []
            self._window, self._window_chars = [], 0
        return fresh

    def _complete(self, fresh: str, tokens: int) -> None:
        """Counts text that became certain, and the tokens that end with it."""
        self._num_chars += len(fresh)
        self._ends.extend([self._num_chars] * tokens)

    def _let_go(self, text: str) -> str:
        self._released_chars += len(text)
        while self._ends and self._ends[0] <= self._released_chars:
            self._ends.popleft()
            self._num_released += 1
        return text

    def _window_text(self) -> str:
        if not self._window:
            return ""
        return self._decode(self._context + self._window)[len(self._decode(self._context)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""

    def _release(self, fresh: str) -> str:
        text = self._held + fresh
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda item: (item[0], -len(item[1])))
            self._held = ""
            return self._let_go(text[:at])
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return self._let_go(text[: len(text) - keep])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
