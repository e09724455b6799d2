"""One import under way on one rank. The importer is the only writer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hisparse.pd.commands import ImportFailure, ImportPlan
from hisparse.pd.descriptors import ReadPlanner
from hisparse.pd.endpoint import RankEndpoint
from hisparse.pd.generations import GenerationRun
from hisparse.pd.pages import Ids
from hisparse.pd.reads import Read, WaitingReads
from hisparse.pd.repaging import RepagingPlanner


class Phase(enum.Enum):
    """What its READs (or copies) are for."""

    DATA = "data"
    VERIFY = "verify"
    MIRROR = "mirror"


@dataclass(slots=True, eq=False)
class RunningImport:
    """From `submit` to its acknowledgement.

    Attributes:
        reads: None until its peer was reached. rows_of: pages (indices) whose rows this rank reads.
        waiting, posted, landed, copying: each Read is in one of them. landed: in a slot, and no copy out of it was started.
        ready: its pages may be written.
        straight: pages went to the host without a slot, so that their mirrors are still to be filled.
        checks: generation READs, planned while the last data READs move and posted behind them.
    """

    plan: ImportPlan
    source: RankEndpoint
    reads: ReadPlanner | RepagingPlanner | None
    started_at_s: float
    deadline_s: float
    rows_of: Ids
    waiting: WaitingReads = field(default_factory=WaitingReads)
    posted: list[Read] = field(default_factory=list)
    landed: list[Read] = field(default_factory=list)
    copying: list[Read] = field(default_factory=list)
    checks: list[list[GenerationRun]] | None = None
    phase: Phase = Phase.DATA
    ready: bool = False
    straight: bool = False
    failure: ImportFailure | None = None
    reason: str = ""
    num_bytes: int = 0
