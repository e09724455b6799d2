"""Triton kernels on the CPU: import this module before anything that imports triton. For use in a process of its own."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes int() of one-element arrays as loop bounds, which NumPy 2.4 refuses."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch
