"""Where the CUDA C++ sources are."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from hisparse.errors import ConfigError


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
