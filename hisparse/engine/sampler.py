"""Choosing a token from logits: greedy, or stateless sampling that a preempted request repeats exactly."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.types import SampledToken, SamplingParams

_GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """Whose token is chosen, and for which position.

    Attributes:
        position: of the token to be chosen (one past the last token whose logits these are).
        params: None = greedy.
    """

    request_id: str
    position: int
    params: SamplingParams | None

    @property
    def needs_logits(self) -> bool:
        """More is asked for than the likeliest token."""
        return self.params is not None and (self.params.temperature > 0 or self.params.logprobs is not None)


@dataclass(slots=True)
class Sampler:
    """Draws are a function of (seed, position) only, never of the batch, the step or what was drawn before.

    A request without a seed gets one from its id and `salt`, so that it too continues identically after a preemption.
    """

    salt: int = field(default_factory=lambda: secrets.randbits(64))

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Chooses one token per row.

        Args:
            logits: [n, vocab], any float dtype; row i belongs to rows[i].
        Returns:
            n tokens. `logprob` is set when the row's `logprobs` is not None: natural log of the model's own
            distribution (before temperature, top_k and top_p); `top_logprobs` holds the `logprobs` likeliest tokens,
            likeliest first, ties by smaller id.
        Raises:
            InvariantError: a row has a NaN or infinite logit: memory that nobody wrote reached the model.
        """
        if logits.shape[0] != len(rows):
            raise InvariantError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
        logits = logits.float()
        finite = logits.isfinite().all(dim=1)
        if not bool(finite.all()):
            bad = [f"{row.request_id}@{row.position}" for row, ok in zip(rows, finite.tolist()) if not ok]
            raise InvariantError(f"logits are not finite for {', '.join(bad)}; no token can be chosen")
        greedy = logits.argmax(dim=1).tolist()
        out = []
        for i, row in enumerate(rows):
            params = row.params or _GREEDY
            token = greedy[i] if params.temperature <= 0 else self._draw(logits[i], row, params)
            out.append(_describe(logits[i], token, params.logprobs))
        return out

    def _draw(self, logits: Tensor, row: SampleRow, params: SamplingParams) -> int:
        """Inverse of the cumulative distribution over tokens sorted by probability, ties by smaller id."""
        scaled = (logits - logits.max()) / params.temperature
        if 0 < params.top_k < logits.shape[0]:
            floor = scaled.topk(params.top_k).values[-1]
            candidates = (scaled >= floor).nonzero()[:, 0]
        else:
            candidates = torch.arange(logits.shape[0])
        values, order = scaled[candidates].sort(descending=True, stable=True)
        if 0 < params.top_k < values.shape[0]:
            values, order = values[: params.top_k], order[: params.top_k]
        mass = values.double().softmax(0).cumsum(0)
        keep = values.shape[0]
        if params.top_p < 1.0:
            keep = min(keep, int((mass < params.top_p).sum()) + 1)
        point = self.uniform(row) * float(mass[keep - 1])
        place = min(int((mass[:keep] <= point).sum()), keep - 1)
        return int(candidates[order[place]])

    def uniform(self, row: SampleRow) -> float:
        """A number in [0, 1) with 53 random bits, fixed by (seed, position); same in every process and version."""
        seed = row.params.seed if row.params is not None else None
        source = f"seed:{seed}" if seed is not None else f"id:{self.salt}:{row.request_id}"
        digest = hashlib.sha256(f"{source}@{row.position}".encode()).digest()
        return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def _describe(logits: Tensor, token: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token_id=token)
    logprobs = logits.log_softmax(0)
    count = min(num_logprobs, logits.shape[0])
    values, ids = logprobs.sort(descending=True, stable=True)
    top = tuple(zip(ids[:count].tolist(), values[:count].tolist()))
    return SampledToken(token_id=token, logprob=float(logprobs[token]), top_logprobs=top)
