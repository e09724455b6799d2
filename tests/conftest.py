"""Fixtures and options of every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported anywhere, and inherited by spawned ranks: tests share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# xdist exports its terminal's width, and a console made meanwhile keeps it; tests of narrow terminals set their own.
os.environ.pop("COLUMNS", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-matrix", action="store_true", help="also run the full token-parity matrix (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-matrix"):
        skip = pytest.mark.skip(reason="the full token-parity matrix takes minutes; run with --run-matrix")
        for item in items:
            if "matrix" in item.keywords:
                item.add_marker(skip)
    on_gpu = [item for item in items if "gpu" in item.keywords]
    reason = _why_no_gpu() if on_gpu else None
    if reason is not None:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"needs a CUDA device: torch does not import ({error})"
    if not torch.cuda.is_available():
        return f"needs a CUDA device: torch {torch.__version__} sees none"
    return None


@pytest.fixture(scope="session")
def tiny_checkpoints() -> dict[str, Path]:
    """Directories of the tiny checkpoints "glm5", "glm52" and "ds32"."""
    from hisparse.testing.tiny_checkpoints import tiny_checkpoints as make

    return make()
