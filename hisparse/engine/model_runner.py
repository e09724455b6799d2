"""Runs the chunks of one step through the model: each prefill chunk by itself, all single tokens as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.engine.decode_graphs import DecodeGraphs, batch_sizes
from hisparse.engine.models.hf import DSAModel
from hisparse.engine.packed_rows import FIELDS, Rows, pack, unpack, upload
from hisparse.engine.sampler import SampleRow
from hisparse.engine.step_output import StepOutput, greedy
from hisparse.errors import InvariantError
from hisparse.ops.status import STATUS_WORDS
from hisparse.types import ScheduledChunk
from hisparse.worker.batch import RowBatch

_NOTHING = torch.zeros(STATUS_WORDS, dtype=torch.int32)


class ModelRunner:
    """One rank's model over its pages. Every rank runs the same forwards in the same order (collectives inside).

    On CUDA a batch of single tokens is padded to one of a few sizes and replayed as a graph. Nothing waits for the device:
    the step's outcome is a `StepOutput`.

    Args:
        samples: False on ranks that do not sample: the same forwards, no vocabulary projection.
        use_graphs: capture and replay decode steps; without effect on the CPU.
        has_host: pages may be on the host only; False = every context is resident always.
    """

    def __init__(self, model: DSAModel, *, max_seats: int, max_model_len: int, samples: bool = True,
                 use_graphs: bool = True, has_host: bool = True) -> None:
        self._model = model
        self._device = model.device
        self._max_seats = max_seats
        self._max_model_len = max_model_len
        self._samples = samples
        self._has_host = has_host
        on_cuda = self._device.type == "cuda"
        self._sizes = batch_sizes(max_seats) if on_cuda else None
        # status word, tokens of the batch of single tokens, tokens of prefill chunks
        self._result = torch.zeros(STATUS_WORDS + 2 * max_seats, dtype=torch.int32, device=self._device)
        self._status = self._result[:STATUS_WORDS] if on_cuda else None
        self._inputs = torch.zeros(FIELDS * max_seats, dtype=torch.int64, device=self._device)
        self._graphs: DecodeGraphs | None = None
        if on_cuda and use_graphs:
            self._graphs = DecodeGraphs(self._decode_rows, inputs=self._inputs, sizes=batch_sizes(max_seats),
                                        kinds=(True, False) if has_host else (True,))

    def warm_up(self, prefill_tokens: int) -> None:
        """On CUDA: compiles what prefill chunks of up to `prefill_tokens` tokens need, and captures every graph.

        Runs padding rows only, which touch no page. Call it once, before the first step and while no copy is in flight.
        Stream: waits for the device.
        """
        if self._status is None:
            return
        for size in {min(prefill_tokens, self._max_model_len), 2}:
            rows = unpack(upload(pack((), size), self._device))
            for plain in (True, False):
                self._run_prefill(rows, self._batch(rows, max_len=size, prefill_seat=0, plain_tables=plain))
        if self._graphs is not None:
            self._graphs.capture_all()

    def close(self) -> None:
        """Destroys the graphs. Call it when the device has done everything; decode steps are not possible any more."""
        if self._graphs is not None:
            self._graphs.close()

    def run(self, chunks: Sequence[ScheduledChunk]) -> StepOutput:
        """Runs every chunk: prefills in the order given, then the batch of single tokens.

        A chunk of one token (decode, a replayed last token, or the end of a prompt) is a row of the batch; rows of unequal
        length stand side by side, and a row's tokens do not depend on its neighbours.
        Stream: the current one; does not wait for it.
        Raises:
            InvariantError: a chunk is empty, a seat occurs twice, or positions lie outside the model.
        """
        self._check(chunks)
        if not chunks:
            return StepOutput((), _NOTHING, (), ())
        self._result.zero_()
        rows: list[SampleRow] = []
        columns: list[int] = []
        logits: list[Tensor] = []
        hidden = []
        for chunk in chunks:
            if len(chunk.token_ids) > 1:
                last = self._prefill(chunk)
                if chunk.sample and self._samples:
                    hidden.append(last)
                    rows.append(_row(chunk))
        if hidden:
            prefilled = self._model.logits(torch.cat(hidden))
            first = STATUS_WORDS + self._max_seats
            self._result[first : first + len(hidden)] = greedy(prefilled)
            columns += range(first, first + len(hidden))
            logits += [prefilled[i] for i, row in enumerate(rows) if row.needs_logits]
        singles = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
        if singles:
            decoded = self._decode(singles)
            for i, chunk in enumerate(singles):
                if chunk.sample and self._samples:
                    row = _row(chunk)
                    rows.append(row)
                    columns.append(STATUS_WORDS + i)
                    if row.needs_logits:
                        logits.append(decoded[0][i])
        return StepOutput(rows, self._result, columns, logits)

    def _prefill(self, chunk: ScheduledChunk) -> Tensor:
        """[1, S] over the context so far; returns the last position's hidden state [1, hidden]."""
        rows = unpack(upload(pack([chunk]), self._device))
        end = chunk.first_position + len(chunk.token_ids)
        return self._run_prefill(rows, self._batch(rows, max_len=end, prefill_seat=chunk.seat, plain_tables=chunk.plain_tables))

    def _run_prefill(self, rows: Rows, batch: RowBatch) -> Tensor:
        return self._model.forward(rows.token_ids[None], rows.positions[None], batch)[:, -1]

    def _decode(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, ...]:
        """[B, 1]; leaves each row's token in `result` and returns the logits [>= B, vocab] (nothing on other ranks)."""
        size, plain = len(chunks), not self._has_host or all(chunk.plain_tables for chunk in chunks)
        if self._sizes is not None:
            size = next(wide for wide in self._sizes if wide >= size)
        packed = upload(pack(chunks, size), self._device, self._inputs)
        if self._graphs is not None:
            return self._graphs.replay(size, plain)
        longest = max(chunk.first_position for chunk in chunks) + 1
        return self._decode_rows(packed, plain, longest if self._status is None else self._max_model_len)

    def _decode_rows(self, packed: Tensor, plain: bool, max_len: int | None = None) -> tuple[Tensor, ...]:
        """The part of a decode step that is captured."""
        rows = unpack(packed)
        batch = self._batch(rows, max_len=max_len or self._max_model_len, plain_tables=plain)
        hidden = self._model.forward(rows.token_ids[:, None], rows.positions[:, None], batch)[:, 0]
        if not self._samples:
            return ()
        logits = self._model.logits(hidden)
        self._result[STATUS_WORDS : STATUS_WORDS + logits.shape[0]] = greedy(logits)
        return (logits,)

    def _batch(self, rows: Rows, *, max_len: int, plain_tables: bool, prefill_seat: int | None = None) -> RowBatch:
        return RowBatch(seats=rows.seats, positions=rows.positions, writes=rows.writes, max_len=max_len,
                        prefill_seat=prefill_seat, plain_tables=plain_tables, status=self._status)

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
