"""Frozen values that cross a boundary: scheduler to worker and back, engine to connector, decode to prefill.

Every class here is importable, picklable and small; arrays are tuples of ints so that a command can be printed as a repro.
"""

from hisparse.types.answers import AckKind, HiSparseWorkerOutput, ResolveStats, TierRows, TransferAck
from hisparse.types.commands import (
    BlockTableUpdate,
    Fence,
    HotRows,
    MirrorSpan,
    NewBlocks,
    PageCopy,
    PageRestore,
    ResidentPagesUpdate,
    SeatReset,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    TableUpdate,
)
from hisparse.types.outputs import FinishReason, RequestOutput, RequestStats, RequestTimeline
from hisparse.types.pages import ImportTarget, Landing, PageGenerations, RequestPages
from hisparse.types.steps import SampledToken, SamplingParams, ScheduledChunk, StepCommand, StepResult

__all__ = [
    "AckKind",
    "BlockTableUpdate",
    "Fence",
    "FinishReason",
    "HiSparseWorkerOutput",
    "HotRows",
    "ImportTarget",
    "Landing",
    "MirrorSpan",
    "NewBlocks",
    "PageCopy",
    "PageGenerations",
    "PageRestore",
    "RequestOutput",
    "RequestPages",
    "RequestStats",
    "RequestTimeline",
    "ResidentPagesUpdate",
    "ResolveStats",
    "SampledToken",
    "SamplingParams",
    "ScheduledChunk",
    "SeatReset",
    "SparseKVOffloadCommand",
    "SparseKVPageTransfer",
    "StepCommand",
    "StepResult",
    "TableUpdate",
    "TierRows",
    "TransferAck",
]
