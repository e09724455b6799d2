"""Tokens equal to unmodified transformers in every tier, rank count and mode. The outside oracle of the whole system."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.engine.tokenizer import Tokenizer
from hisparse.testing.reference_decode import ReferenceModel, ReferenceRun
from tests.parity.cells import NUM_TOKENS, Cell, Engines, chunk_tokens, compare, full_matrix, pairwise, run_cell


@functools.cache
def model(path: Path) -> ReferenceModel:
    return ReferenceModel(path)


@functools.cache
def prompt_ids(path: Path, length: int) -> tuple[int, ...]:
    import argparse

    text = Path(argparse.__file__).read_text()
    return tuple(Tokenizer(path).encode(text)[length : 2 * length])


@functools.cache
def reference(path: Path, length: int, chunk: int) -> ReferenceRun:
    return model(path).decode(prompt_ids(path, length), NUM_TOKENS, prefill_chunks=chunk)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    running = Engines()
    yield running
    running.close()


def check(engines: Engines, cell: Cell, path: Path) -> str | None:
    answer = run_cell(engines, cell, path, list(prompt_ids(path, cell.prompt)))
    assert len(answer.token_ids) == NUM_TOKENS
    return compare(cell, answer, reference(path, cell.prompt, chunk_tokens(cell)))


@pytest.mark.parametrize("cell", pairwise(), ids=str)
def test_tokens_equal_transformers(cell: Cell, engines: Engines, tiny_checkpoints: dict[str, Path]) -> None:
    excuse = check(engines, cell, tiny_checkpoints[cell.model])
    assert excuse is None, f"{excuse}: choose another prompt for the pairwise subset"


@pytest.mark.matrix
@pytest.mark.timeout(0)
def test_full_matrix(engines: Engines, tiny_checkpoints: dict[str, Path]) -> None:
    cells = full_matrix()
    excused = []
    for cell in cells:
        line = check(engines, cell, tiny_checkpoints[cell.model])
        print(cell, line or "equal", flush=True)
        if line:
            excused.append(line)
    assert len(excused) <= len(cells) * NUM_TOKENS / 1000, excused


def test_pairwise_covers_every_pair() -> None:
    subset, full = pairwise(), full_matrix()
    assert len(subset) < len(full) / 6
    for a, b in ((a, b) for a in Cell.__slots__ for b in Cell.__slots__ if a != b):
        assert {(getattr(c, a), getattr(c, b)) for c in subset} == {(getattr(c, a), getattr(c, b)) for c in full}
