"""The oracle: greedy decoding by unmodified `transformers`, eager attention, its own indexer and top-k mask.

Shares no code with the engine. It also reports how close each step was to another outcome, because two correct
implementations may differ where two numbers differ by less than fp32 rounding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One generated token and the gaps behind it.

    Attributes:
        logit_gap: largest minus second largest logit.
        index_gaps: per layer that owns an indexer: k-th minus (k+1)-th score of the last query row; inf when every
            position is selected.
    """

    token_id: int
    logit_gap: float
    index_gaps: tuple[float, ...]

    @property
    def is_near_tie(self) -> bool:
        """True when rounding alone may change the token: a difference here (or later) proves nothing."""
        return min(self.logit_gap, *self.index_gaps) < NEAR_TIE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """A greedy continuation.

    Attributes:
        prefill_index_gap: smallest index gap of any query row, layer and chunk of the prompt.
        logits: float32 [steps, vocab], what each step's token was chosen from; None unless asked for.
    """

    steps: tuple[ReferenceStep, ...]
    prefill_index_gap: float
    logits: Tensor | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(step.token_id for step in self.steps)

    def first_excusable(self) -> int:
        """Index of the first step that a near tie may have changed; len(steps) = none: all tokens must be equal.

        A near tie inside the prompt is no excuse: it swaps one of top_k positions of one earlier row.
        """
        return next((i for i, step in enumerate(self.steps) if step.is_near_tie), len(self.steps))


def chunk_lengths(num_tokens: int, chunk_tokens: int) -> list[int]:
    """Chunks of a prompt: full ones and the rest. Example: `chunk_lengths(10, 4) == [4, 4, 2]`."""
    return [min(chunk_tokens, num_tokens - start) for start in range(0, num_tokens, chunk_tokens)]


class ReferenceModel:
    """An unmodified model.

    Args:
        path: checkpoint directory. dtype: of weights and activations (index scores and softmax are fp32 always).
        device: where it computes; what it returns is on the CPU.
    """

    def __init__(self, path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        load: Any = AutoModelForCausalLM.from_pretrained
        self.model = load(str(path), dtype=dtype, attn_implementation="eager", local_files_only=True).eval().to(device)
        signature = inspect.signature(inspect.unwrap(type(self.model.model).forward)).parameters
        self._cache_argument = "cache" if "cache" in signature else "past_key_values"
        self._probe = _TopKProbe()
        for layer in self.model.model.layers:
            indexer = getattr(layer.self_attn, "indexer", None)
            if indexer is not None:
                indexer.register_forward_pre_hook(self._probe.enter)
                indexer.register_forward_hook(self._probe.leave)

    @torch.inference_mode()
    def decode(self, prompt_ids: Sequence[int], num_tokens: int, *, prefill_chunks: int | Sequence[int] = 512,
               eos_token_ids: Sequence[int] = (), forced: Sequence[int] = (),
               keep_logits: bool = False) -> ReferenceRun:
        """Prefills the prompt in the given chunks, then decodes greedily, one token a step.

        Args:
            num_tokens: at most this many; fewer if a token of `eos_token_ids` comes (it is included).
            prefill_chunks: chunk size in tokens, or the exact chunk lengths; use those of the engine under test,
                because another chunking rounds differently.
            forced: feed these tokens instead of the generated ones (teacher forcing), as far as they go.
        Raises:
            ValueError: empty prompt, or chunk lengths that do not add up to it.
        """
        if isinstance(prefill_chunks, int):
            chunks = chunk_lengths(len(prompt_ids), prefill_chunks)
        else:
            chunks = list(prefill_chunks)
        if not prompt_ids or sum(chunks) != len(prompt_ids) or min(chunks) < 1:
            raise ValueError(f"chunks {chunks} do not cover a prompt of {len(prompt_ids)} tokens")
        cache: Any = None
        start, prefill_gap = 0, math.inf
        logits = torch.empty(0)
        for length in chunks:
            logits, cache = self._forward(prompt_ids[start : start + length], cache)
            prefill_gap = min([prefill_gap, *(float(gaps.min()) for gaps in self._probe.gaps)])
            start += length
        steps: list[ReferenceStep] = []
        kept: list[Tensor] = []
        while len(steps) < num_tokens:
            best = logits.topk(2)
            step = ReferenceStep(
                token_id=int(logits.argmax()), logit_gap=float(best.values[0] - best.values[1]),
                index_gaps=tuple(float(gaps[-1]) for gaps in self._probe.gaps),
            )
            steps.append(step)
            if keep_logits:
                kept.append(logits)
            if step.token_id in eos_token_ids or len(steps) == num_tokens:
                break
            token = forced[len(steps) - 1] if len(steps) <= len(forced) else step.token_id
            logits, cache = self._forward([token], cache)
        return ReferenceRun(steps=tuple(steps), prefill_index_gap=prefill_gap,
                            logits=torch.stack(kept) if keep_logits else None)

    def _forward(self, token_ids: Sequence[int], cache: Any) -> tuple[Tensor, Any]:
        """Logits [vocab] of the last position, and the cache."""
        self._probe.gaps.clear()
        with self._probe:
            ids = torch.tensor([list(token_ids)], device=self.model.device)
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1,
                             **{self._cache_argument: cache})
        return out.logits[0, -1].float().cpu(), out[self._cache_argument]


class _TopKProbe(TorchFunctionMode):
    """Looks at the scores that an indexer hands to `topk`; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[Tensor] = []
        """One [S] tensor per indexer call since the last clear."""
        self._inside = False

    def enter(self, *_: Any) -> None:
        self._inside = True

    def leave(self, *_: Any) -> None:
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside and getattr(func, "__name__", "") == "topk":
            scores, count = args[0], args[1] if len(args) > 1 else kwargs["k"]
            self.gaps.append(_gap(scores[0], int(count)).cpu())
        return func(*args, **kwargs)


def _gap(scores: Tensor, count: int) -> Tensor:
    """[S, T] -> [S]: the count-th minus the next score; inf where no further position is allowed."""
    if count >= scores.shape[-1]:
        return torch.full(scores.shape[:-1], math.inf)
    best = scores.topk(count + 1, dim=-1).values
    last, following = best[..., -2], best[..., -1]
    masked = following <= torch.finfo(scores.dtype).min / 2  # an eager mask is the lowest finite number, or -inf
    return torch.where(masked, math.inf, last - following)
