"""HISPARSE_ATTENTION in the environment: which kernels `attention.sparse_mla` may choose from.

auto (default): ours, and FlashMLA where `attention_flash_mla.faster` says so. own: never FlashMLA. flash_mla: FlashMLA wherever
it fits the call.
"""

from __future__ import annotations

import os

from hisparse.errors import ConfigError

SWITCH = "HISPARSE_ATTENTION"
MODES = ("auto", "own", "flash_mla")


def mode() -> str:
    """The wish of the environment.

    Raises:
        ConfigError: none of `MODES`.
    """
    wish = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if wish not in MODES:
        raise ConfigError(f"{SWITCH} must be one of {', '.join(MODES)}, got {wish!r}")
    return wish
