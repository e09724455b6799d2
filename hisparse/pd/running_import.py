"""One import under way on one rank, and the READs that it consists of. The importer is the only writer."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hisparse.pd.commands import ImportFailure, ImportPlan
from hisparse.pd.copies import CopyEvent
from hisparse.pd.descriptors import ReadPlanner
from hisparse.pd.endpoint import RankEndpoint
from hisparse.pd.generations import GenerationRun
from hisparse.pd.pages import Ids
from hisparse.pd.repaging import RepagingPlanner
from hisparse.pd.staging import SlotPool
from hisparse.pd.transport import Descriptors, FarMemory


class Phase(enum.Enum):
    """What its READs (or copies) are for."""

    DATA = "data"
    VERIFY = "verify"
    MIRROR = "mirror"


@dataclass(slots=True, eq=False)
class Read:
    """A piece that is planned, then posted, then (staged) copied."""

    descriptors: Descriptors | None = None  # None: staged or generations, made when it has a slot
    pages: Ids | None = None  # staged
    memory: FarMemory = FarMemory.CPU  # of staged pages
    runs: list[GenerationRun] | None = None  # generations
    pool: SlotPool | None = None
    slot: int = -1
    handle: Any = None
    event: CopyEvent | None = None


@dataclass(slots=True, eq=False)
class RunningImport:
    """From `submit` to its acknowledgement.

    Attributes:
        reads: None until its peer was reached. rows_of: pages (indices) whose rows this rank reads.
        waiting, posted, copying: each Read is in one of them. ready: its pages may be written.
        straight: pages went to the host without a slot, so that their mirrors are still to be filled.
        checks: generation READs, planned while the last data READs move and posted behind them.
    """

    plan: ImportPlan
    source: RankEndpoint
    reads: ReadPlanner | RepagingPlanner | None
    started_at_s: float
    deadline_s: float
    rows_of: Ids
    waiting: deque[Read] = field(default_factory=deque)
    posted: list[Read] = field(default_factory=list)
    copying: list[Read] = field(default_factory=list)
    checks: list[list[GenerationRun]] | None = None
    phase: Phase = Phase.DATA
    ready: bool = False
    straight: bool = False
    failure: ImportFailure | None = None
    reason: str = ""
    num_bytes: int = 0
