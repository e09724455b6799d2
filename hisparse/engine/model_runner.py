"""Runs the chunks of one step through the model: each prefill chunk by itself, all single tokens as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.engine.models.hf import DSAModel
from hisparse.engine.sampler import SampleRow
from hisparse.errors import InvariantError
from hisparse.types import ScheduledChunk
from hisparse.worker.batch import RowBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogits:
    """What is to be sampled: `logits` float32 [len(rows), vocab], row i for rows[i]. Both empty if nothing is."""

    rows: tuple[SampleRow, ...]
    logits: Tensor


class ModelRunner:
    """One rank's model over its pages. Every rank runs the same forwards in the same order (collectives inside)."""

    def __init__(self, model: DSAModel, *, max_seats: int, max_model_len: int) -> None:
        self._model = model
        self._max_seats = max_seats
        self._max_model_len = max_model_len

    def run(self, chunks: Sequence[ScheduledChunk], *, want_logits: bool = True) -> StepLogits:
        """Runs every chunk: prefills in the order given, then the batch of single tokens.

        A chunk of one token (decode, a replayed last token, or the end of a prompt) is a row of the batch; rows of
        unequal length are padded and the padding is masked, so that a row's tokens do not depend on its neighbours.
        Args:
            want_logits: False on ranks that do not sample: the same forwards, no vocabulary projection.
        Raises:
            InvariantError: a chunk is empty, a seat occurs twice, or positions lie outside the model.
        """
        self._check(chunks)
        hidden: list[Tensor] = []
        rows: list[SampleRow] = []
        singles = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
        for chunk in chunks:
            if len(chunk.token_ids) > 1:
                last = self._prefill(chunk)
                if chunk.sample:
                    hidden.append(last)
                    rows.append(_row(chunk))
        if singles:
            out = self._decode(singles)
            sampled = [i for i, chunk in enumerate(singles) if chunk.sample]
            if sampled:
                hidden.append(out[sampled])
                rows.extend(_row(singles[i]) for i in sampled)
        if not rows or not want_logits:
            return StepLogits(rows=(), logits=torch.empty(0, self._model.shape.vocab_size))
        return StepLogits(rows=tuple(rows), logits=self._model.logits(torch.cat(hidden)))

    def _prefill(self, chunk: ScheduledChunk) -> Tensor:
        """[1, S] over the context so far; returns the last position's hidden state [1, hidden]."""
        size = len(chunk.token_ids)
        positions = range(chunk.first_position, chunk.first_position + size)
        batch = RowBatch.build([chunk.seat] * size, positions, writes=chunk.writes, is_prefill=True,
                               plain_tables=chunk.plain_tables)
        out = self._model.forward(torch.tensor([chunk.token_ids]), batch.positions[None], batch.seats[:1], batch)
        return out[:, -1]

    def _decode(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """[B, 1]; returns hidden states [B, hidden]."""
        batch = RowBatch.build(
            [chunk.seat for chunk in chunks], [chunk.first_position for chunk in chunks],
            writes=[chunk.writes for chunk in chunks], plain_tables=all(chunk.plain_tables for chunk in chunks),
        )
        token_ids = torch.tensor([chunk.token_ids for chunk in chunks])
        return self._model.forward(token_ids, batch.positions[:, None], batch.seats, batch)[:, 0]

    def _check(self, chunks: Sequence[ScheduledChunk]) -> None:
        seen: set[int] = set()
        for chunk in chunks:
            end = chunk.first_position + len(chunk.token_ids)
            if not chunk.token_ids or chunk.first_position < 0 or end > self._max_model_len:
                raise InvariantError(
                    f"chunk of {chunk.request_id} covers positions {chunk.first_position}..{end}; it must not be empty "
                    f"and end by max_model_len = {self._max_model_len}"
                )
            if not 0 <= chunk.seat < self._max_seats or chunk.seat in seen:
                raise InvariantError(f"chunk of {chunk.request_id}: seat {chunk.seat} is taken or out of range")
            seen.add(chunk.seat)


def _row(chunk: ScheduledChunk) -> SampleRow:
    return SampleRow(request_id=chunk.request_id, position=chunk.first_position + len(chunk.token_ids),
                     params=chunk.sampling)
