"""The demo's oracle, in a process of its own so that the service and the check do not share a line of state."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Greedy tokens of unmodified transformers. `first_excusable`: index of the first token that a tie below 1e-6 in the
    reference's own scores may change; `num_tokens` = none."""

    token_ids: tuple[int, ...]
    first_excusable: int
    seconds: float


class ReferencePool:
    """Decodes prompts one after the other in one spawned process."""

    def __init__(self, checkpoint: Path, *, prefill_chunk_tokens: int, threads: int) -> None:
        self._pool = ProcessPoolExecutor(
            max_workers=1, mp_context=multiprocessing.get_context("spawn"), initializer=_load,
            initargs=(str(checkpoint), prefill_chunk_tokens, threads),
        )

    def submit(self, prompt_ids: Sequence[int], num_tokens: int) -> Future[Reference]:
        return self._pool.submit(_decode, tuple(prompt_ids), num_tokens)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


_model = None
_chunk = 0


def _load(checkpoint: str, prefill_chunk_tokens: int, threads: int) -> None:
    global _model, _chunk
    import torch
    from transformers.utils import logging

    from hisparse.testing.reference_decode import ReferenceModel

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)
    _model, _chunk = ReferenceModel(checkpoint), prefill_chunk_tokens


def _decode(prompt_ids: tuple[int, ...], num_tokens: int) -> Reference:
    assert _model is not None
    began = time.perf_counter()
    run = _model.decode(prompt_ids, num_tokens, prefill_chunks=_chunk)
    return Reference(token_ids=run.token_ids, first_excusable=run.first_excusable(), seconds=time.perf_counter() - began)
