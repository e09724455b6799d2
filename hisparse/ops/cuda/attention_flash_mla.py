"""FlashMLA's sparse kernels for `attention.sparse_mla`, where the package is installed, fits the call, and is the faster one.

Optional: nothing here is imported by hisparse's dependencies, and every call has an answer without it. The package is
`flash_mla` (MIT licence; a build whose functions take `use_legacy` has the Hopper kernels in that namespace).
bfloat16 rows go to its prefill kernel (one query row per step of a request is as good as a chunk), fp8_ds_mla rows to its
decode kernel with pages of one row, so that its indices are our row ids.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.ops.cuda.attention_switch import mode

LATENT, ROPE, FP8_ROW_BYTES = 512, 64, 656
HEADS = (64, 128)
FASTER_BF16_FROM: dict[int, int] = {64: 128, 128: 64}
"""Heads -> query rows from which FlashMLA was measured to be faster for bfloat16 rows (`bench_attention` on an H200)."""
K_STEP = 128
"""Its Hopper kernels walk the entries in steps of this many."""


@dataclass(frozen=True, slots=True)
class Support:
    """Whether FlashMLA can be called here, and why not."""

    usable: bool
    reason: str
    version: str = ""


@functools.cache
def support(device_major: int) -> Support:
    """Of the package for a GPU of this compute capability. Imports it once; never raises."""
    if device_major != 9:
        return Support(False, f"only tried on compute capability 9.x, this is {device_major}.x")
    try:
        package = importlib.import_module("flash_mla")
    except Exception as error:  # a wheel of another torch fails with OSError, RuntimeError, ...
        return Support(False, f"flash_mla does not import: {type(error).__name__}: {error}".splitlines()[0])
    version = str(getattr(package, "__version__", "unknown"))
    for name in ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"):
        if not callable(getattr(package, name, None)):
            return Support(False, f"flash_mla {version} has no {name}", version)
    if _is_forked(package) and not package.has_legacy():
        return Support(False, f"flash_mla {version} is built without its Hopper kernels", version)
    return Support(True, "usable", version)


def misfit(q: Tensor, rows: Tensor, row_ids: Tensor, latent_dim: int, row_delta: int, host_ids: Tensor | None) -> str:
    """Why FlashMLA cannot answer this call of `sparse_mla` (whose checks have passed), or "" if it can."""
    num, heads, width = q.shape
    k = row_ids.shape[1]
    if host_ids is not None:
        return "entries on the host"
    if q.dtype != torch.bfloat16 or rows.dtype == torch.float32:
        return f"{q.dtype} queries, {rows.dtype} rows"
    if (latent_dim, width - latent_dim) != (LATENT, ROPE):
        return f"widths {latent_dim} + {width - latent_dim}"
    if heads not in HEADS:
        return f"{heads} heads"
    if num == 0 or k == 0 or k % K_STEP:
        return f"{num} query rows of {k} entries"
    if row_ids.dtype != torch.int32 or not row_ids.is_contiguous() or not q.is_contiguous() or q.data_ptr() % 16:
        return "strides or index type"
    if not 0 <= row_delta < rows.shape[0]:
        return f"row_delta {row_delta}"
    return ""


def chosen(q: Tensor, rows: Tensor, row_ids: Tensor, latent_dim: int, row_delta: int, host_ids: Tensor | None,
           device_major: int) -> bool:
    """Whether this call goes to FlashMLA."""
    wish = mode()
    if wish == "own" or not support(device_major).usable:
        return False
    if misfit(q, rows, row_ids, latent_dim, row_delta, host_ids):
        return False
    if rows.dtype == torch.uint8 and _is_capturing(q) and _plan_key(q, row_ids) not in _plans:
        return False
    return wish == "flash_mla" or faster(rows.dtype == torch.uint8, q.shape[0], q.shape[1])


def faster(is_fp8: bool, num: int, heads: int) -> bool:
    """Whether `auto` prefers FlashMLA: where it was measured to be faster than our kernels and is as exact.

    Never for fp8_ds_mla rows: its relative error there (4e-3 to 7e-3 on an H200) is beyond the tests' 4e-3; ours is 1.8e-3.
    """
    if is_fp8:
        return False
    return num >= FASTER_BF16_FROM.get(heads, num + 1)


def attend(q: Tensor, rows: Tensor, row_ids: Tensor, scaling: float, row_delta: int, out: Tensor | None) -> Tensor:
    """`sparse_mla` by FlashMLA. A call that is not a `misfit`.

    Stream: the current one; may be captured once the same shapes have run outside of a capture (`chosen` sees to it).
    """
    package = importlib.import_module("flash_mla")
    options = _options(package)
    rows = rows[row_delta:]
    if rows.dtype == torch.uint8:
        found, _ = package.flash_mla_with_kvcache(
            q[:, None], rows[:, None, None], None, None, LATENT, _plan(package, q, row_ids), None, scaling, False, True,
            row_ids[:, None], **options)
        found = found[:, 0]
    else:
        found = package.flash_mla_sparse_fwd(q, rows[:, None], row_ids[:, None], scaling, LATENT, **options)[0]
    if out is None:
        return found  # type: ignore[no-any-return]
    return out.copy_(found)


_plans: dict[tuple[int, int, int, int], Any] = {}
"""FlashMLA's split plans by (device, query rows, heads, entries): functions of these alone. Kept, so that captured graphs that
read them stay valid. Writer: `_plan`, outside of captures."""


def _is_capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _plan_key(q: Tensor, row_ids: Tensor) -> tuple[int, int, int, int]:
    return q.get_device(), q.shape[0], q.shape[1], row_ids.shape[1]


def _plan(package: Any, q: Tensor, row_ids: Tensor) -> Any:
    """Empty at first: FlashMLA fills it in the call that follows, on this stream. So the first call of a shape is made twice,
    with a wait between, and other streams read a finished plan."""
    key = _plan_key(q, row_ids)
    if key not in _plans:
        plan = package.get_mla_metadata()[0]
        one_row = torch.zeros(64, 1, 1, FP8_ROW_BYTES, dtype=torch.uint8, device=q.device)
        package.flash_mla_with_kvcache(
            q[:, None], one_row, None, None, LATENT, plan, None, 1.0, False, True, torch.full_like(row_ids[:, None], -1),
            **_options(package))
        if q.is_cuda:
            torch.cuda.current_stream(q.device).synchronize()
        _plans[key] = plan
    return _plans[key]


def _options(package: Any) -> dict[str, bool]:
    """Of every call: the Hopper kernels of a forked package."""
    return {"use_legacy": True} if _is_forked(package) else {}


@functools.cache
def _is_forked(package: Any) -> bool:
    """Whether its functions take `use_legacy`: the package of SGLang, with the Hopper kernels there."""
    return "use_legacy" in inspect.signature(package.flash_mla_sparse_fwd).parameters
