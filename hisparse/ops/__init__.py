"""Data-plane operations behind one interface per device.

`backend(device)` gives the module that implements them; `hisparse.ops.reference` (plain torch) is the CPU backend and
fixes the semantics of every other one.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from hisparse.errors import ConfigError
from hisparse.ops.sources import kernel_sources
from hisparse.ops.values import DeviceMissPlan, HotState, MissPlan, Resolution

__all__ = ["DeviceMissPlan", "HotState", "MissPlan", "Resolution", "backend", "kernel_sources"]

_BACKENDS = {"cpu": "hisparse.ops.reference", "cuda": "hisparse.ops.cuda"}


def backend(device: str | torch.device) -> ModuleType:
    """The module with `resolve`, `replay`, `append_rows`, `PageCopier`, `sparse_mla`, `reset_seats` for tensors on `device`.

    Raises:
        ConfigError: no backend for this device type in this build.
    """
    kind = torch.device(device).type
    if kind not in _BACKENDS:
        raise ConfigError(
            f"no operations for device {str(device)!r}; this build has {sorted(_BACKENDS)}: set model.device to one"
        )
    try:
        return importlib.import_module(_BACKENDS[kind])
    except ImportError as error:
        raise ConfigError(
            f"model.device = {kind} needs a package that does not load: {error}; pip install hisparse[{kind}]"
        ) from error
