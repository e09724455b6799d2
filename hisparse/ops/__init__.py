"""Data-plane operations behind one interface per device.

`backend(device)` gives the module that implements them; `hisparse.ops.reference` (plain torch) is the CPU backend and
fixes the semantics of every other one.
"""

from __future__ import annotations

import importlib
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from hisparse.errors import ConfigError
from hisparse.ops.values import HotState, MissPlan, Resolution

__all__ = ["HotState", "MissPlan", "Resolution", "backend", "kernel_sources"]

_BACKENDS = {"cpu": "hisparse.ops.reference"}


def backend(device: str | torch.device) -> ModuleType:
    """The module with `resolve`, `replay`, `append`, `copy_pages`, `sparse_mla`, `reset_seat` for tensors on `device`.

    Raises:
        ConfigError: no backend for this device type in this build.
    """
    kind = torch.device(device).type
    if kind not in _BACKENDS:
        raise ConfigError(
            f"no operations for device {str(device)!r}; this build has {sorted(_BACKENDS)}: set model.device to one"
        )
    return importlib.import_module(_BACKENDS[kind])


def kernel_sources() -> Path:
    """Directory of the CUDA C++ sources: `kernels/` of a checkout (or editable install), else the wheel's data files.

    Raises:
        ConfigError: neither exists; names both places.
    """
    root = Path(__file__).resolve().parents[2]
    checkout = root / "kernels"
    if (root / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    tried = [checkout]
    for scheme in (None, sysconfig.get_preferred_scheme("user")):
        data = sysconfig.get_path("data") if scheme is None else sysconfig.get_path("data", scheme)
        shipped = Path(data) / "share" / "hisparse" / "kernels"
        if shipped.is_dir():
            return shipped
        tried.append(shipped)
    raise ConfigError(
        f"kernel sources not found in {' or '.join(map(str, tried))}; reinstall hisparse from a wheel or a checkout"
    )
