"""What a request must be like to be taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.errors import RequestError
from hisparse.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Of one engine. max_model_len: most tokens of prompt and output together. max_waiting: requests in its queue."""

    max_model_len: int
    vocab_size: int
    max_waiting: int

    def check(self, prompt: Sequence[int], sampling: SamplingParams, *, num_waiting: int) -> None:
        """Raises RequestError, with the number to change: empty or too long prompt, impossible limits, full queue."""
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token", field="prompt")
        if sampling.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {sampling.max_tokens}", field="max_tokens")
        if len(prompt) + sampling.max_tokens > self.max_model_len:
            raise RequestError(
                f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} exceeds max_model_len "
                f"{self.max_model_len}; shorten the prompt or lower max_tokens", field="prompt", status=413)
        bad = next((token for token in prompt if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary 0..{self.vocab_size - 1}", field="prompt")
        if num_waiting >= self.max_waiting:
            raise RequestError(f"{num_waiting} requests wait already (scheduler.max_waiting); retry later", status=429)
