"""Engines on the GPU: the configurations of CPU tests with `model.device: cuda`, and the oracle on the same device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.config import HiSparseConfig, load_config
from hisparse.testing.reference_decode import ReferenceModel


def on_cuda(load: Callable[..., HiSparseConfig], *, graphs: bool) -> Callable[..., HiSparseConfig]:
    """`load_config` whose every configuration computes on CUDA."""

    def loaded(source: Any, overrides: Any = None, environ: Any = None) -> HiSparseConfig:
        config = load(source, overrides, environ)
        if config.model.device == "cuda":
            return config
        return load_config(config.model_dump(), {"model": {"device": "cuda"}, "engine": {"cuda_graphs": graphs}}, environ={})

    return loaded


def move_to_cuda(monkeypatch: pytest.MonkeyPatch, *, graphs: bool, modules: tuple[Any, ...]) -> None:
    """Test modules that load configurations or make the oracle do both on CUDA from now on."""
    for module in modules:
        if hasattr(module, "load_config"):
            monkeypatch.setattr(module, "load_config", on_cuda(load_config, graphs=graphs))
        if hasattr(module, "ReferenceModel"):
            monkeypatch.setattr(module, "ReferenceModel", cuda_reference)


@functools.cache
def cuda_reference(path: Path, **options: Any) -> ReferenceModel:
    """Unmodified transformers on the GPU."""
    return ReferenceModel(path, device="cuda", **options)


def modes() -> Iterator[Any]:
    yield pytest.param(False, id="eager")
    yield pytest.param(True, id="graphs")
