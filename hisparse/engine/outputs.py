"""Tokens to increments of answers: text, ends of an answer, log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hisparse.engine.detokenizer import Detokenizer
from hisparse.engine.protocols import Tokenizer
from hisparse.engine.request import Request
from hisparse.types import FinishReason, RequestOutput, SampledToken


class Outputs:
    """Increments that wait to be taken, and the text of every open request. By `Request.name`, which callers know.

    Args:
        tokenizer: None = token ids only: no text, no stop strings, no end of sequence.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._detokenizers: dict[str, Detokenizer] = {}
        self._waiting: list[RequestOutput] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def open(self, request: Request) -> None:
        """Before its first token."""
        if self._tokenizer is not None:
            self._detokenizers[request.name] = Detokenizer(
                self._tokenizer, stop=request.sampling.stop, prompt_ids=request.token_ids[:request.num_prompt_tokens])

    def close(self, request: Request) -> None:
        """After its last increment. Idempotent."""
        self._detokenizers.pop(request.name, None)

    def accept(self, request: Request, token: SampledToken) -> tuple[str, FinishReason | None]:
        """The text that this token, the request's last one, releases, and why the answer ends with it, if it does."""
        sampling, reason, text = request.sampling, None, ""
        eos = self._tokenizer.eos_token_ids if self._tokenizer is not None else ()
        if token.token_id in sampling.stop_token_ids or (token.token_id in eos and not sampling.ignore_eos):
            reason = FinishReason.STOP
        detokenizer = self._detokenizers.get(request.name)
        if detokenizer is not None and reason is None:
            text = detokenizer.push([token.token_id])
            if detokenizer.stopped is not None:
                reason = FinishReason.STOP
        if reason is None and request.num_output_tokens >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        if detokenizer is not None and reason is not None:
            text += detokenizer.finish()
        return text, reason

    def emit(self, request: Request, text: str, *, finish: FinishReason | None = None,
              params: Mapping[str, Any] | None = None, with_timeline: bool = False, retry: bool = False) -> None:
        """Adds an increment with the tokens since the last one; the last one has `finish`."""
        new, request.new_tokens = request.new_tokens, []
        self._waiting.append(RequestOutput(
            request_id=request.name, new_token_ids=tuple(token.token_id for token in new), new_text=text,
            logprobs=self._scored(request, new), finish_reason=finish,
            error=request.error, stats=request.stats() if finish is not None else None, kv_transfer_params=params,
            retry=retry, timeline=request.timeline() if with_timeline or finish is not None else None,
        ))

    def ask_for_prefill(self, request: Request, problem: str) -> None:
        """No increment: whoever asked prefill is to ask again."""
        self._waiting.append(RequestOutput(request_id=request.name, retry_prefill=problem))

    def take(self) -> list[RequestOutput]:
        """Increments since the last call."""
        outputs, self._waiting = self._waiting, []
        return outputs

    def _scored(self, request: Request, new: Sequence[SampledToken]) -> tuple[SampledToken, ...]:
        """Tokens with their log probabilities, as their text leaves: so they tell nothing of a stop string either."""
        if request.sampling.logprobs is None:
            return ()
        request.unscored.extend(new)
        detokenizer = self._detokenizers.get(request.name)
        count = len(request.unscored) if detokenizer is None else detokenizer.take_released()
        scored, request.unscored = request.unscored[:count], request.unscored[count:]
        return tuple(scored)
