"""Paged indexer keys for tests, in a strided view of a packed allocation whose every other byte is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.ops.reference.indexer import dequantize_keys, quantize_keys


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Printed as the repro of a case. `spread`: values are small integers, exact in every dtype and order of summation, so
    that scores tie often; 0 = normal random values. dtype: of the pages; uint8 = fp8 keys, with bfloat16 queries."""

    heads: int = 32
    dim: int = 128
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    spread: int = 0
    seed: int = 0


class Case:
    """Rows of queries over keys of their seats, which lie in pages in no order.

    Attributes:
        keys: list of [tokens, dim], of every seat in position order. q, weights, pages, table, seats, lengths: the arguments.
    """

    def __init__(self, shape: Shape, tokens: list[int], seats: list[int], lengths: list[int], device: str = "cpu") -> None:
        self.shape = shape
        g = torch.Generator(device).manual_seed(shape.seed)
        size, dim = shape.block_size, shape.dim

        dtype = torch.bfloat16 if shape.dtype == torch.uint8 else shape.dtype

        def values(*sizes: int) -> Tensor:
            if shape.spread:
                return torch.randint(-shape.spread, shape.spread + 1, sizes, generator=g, device=device).to(dtype)
            return torch.randn(sizes, generator=g, device=device).to(dtype)

        width, fp8 = (dim + 4, True) if shape.dtype == torch.uint8 else (dim, False)
        self.keys = [values(count, dim) for count in tokens]
        stored = self.keys
        if fp8:
            if shape.spread:  # the largest value is 448 / 4, so that every scale is 1 / 4 and every value exact
                for keys in self.keys:
                    keys[:, :1] = 112
            stored = [quantize_keys(keys) for keys in self.keys]
            self.keys = [dequantize_keys(rows).bfloat16() if shape.spread else dequantize_keys(rows) for rows in stored]
        counts = [-(-count // size) for count in tokens]
        num_blocks = 1 + sum(counts)
        poison = 0xFF if fp8 else float("nan")
        packed = torch.full((num_blocks, size * width + 48), poison, dtype=shape.dtype, device=device)
        self.pages = packed.as_strided((num_blocks, size, width), (packed.stride(0), width, 1), 16)
        self.table = torch.zeros(len(tokens), max(counts) + 3, dtype=torch.int32, device=device)
        order = torch.randperm(num_blocks - 1, generator=g, device=device).to(torch.int32) + 1
        for seat, (keys, count) in enumerate(zip(stored, counts)):
            blocks, order = order[:count], order[count:]
            self.table[seat, :count] = blocks
            position = torch.arange(keys.shape[0], device=device)
            self.pages[blocks.long()[position // size], position % size] = keys
        self.q = values(len(seats), shape.heads, dim)
        self.weights = values(len(seats), shape.heads).float()
        self.scale = 0.5 if shape.spread else dim**-0.5
        self.seats = torch.tensor(seats, dtype=torch.int32, device=device)
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=device)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.q, self.weights, self.pages, self.table, self.seats, self.lengths

    @property
    def max_len(self) -> int:
        return self.table.shape[1] * self.shape.block_size

    def scores64(self, row: int) -> Tensor:
        """Float64 [length] of one row."""
        keys = self.keys[int(self.seats[row])][: int(self.lengths[row])].double()
        dots = (self.q[row].double() @ keys.T) * self.scale
        return self.weights[row].double() @ dots.relu()

    def check(self, out: Tensor, top_k: int) -> None:
        """Positions are ascending, unique and inside, and none left out is better than one chosen, by more than rounding."""
        seats, lengths = self.seats.tolist(), self.lengths.tolist()
        for row, (seat, length) in enumerate(zip(seats, lengths)):
            length = length if seat >= 0 else 0
            count = min(length, top_k)
            chosen = out[row, :count].long()
            assert bool((out[row, count:] == -1).all()), f"{self.shape}: row {row} is not padded with -1 behind {count}"
            if length <= top_k:
                assert torch.equal(chosen, torch.arange(count, device=out.device)), f"{self.shape}: row {row}"
                continue
            assert bool((chosen[1:] > chosen[:-1]).all()) and int(chosen[0]) >= 0 and int(chosen[-1]) < length, \
                f"{self.shape}: row {row} of {length} is not ascending inside [0, {length})"
            scores = self.scores64(row)
            least = scores[chosen].min()
            scores[chosen] = float("-inf")
            slack = 1e-5 * float(self.weights[row].abs().double() @ (self.q[row].double().norm(dim=1) * self.scale)) * \
                self.shape.dim**0.5
            assert float(scores.max() - least) <= slack, f"{self.shape}: row {row} of {length} left out a better position"
