"""A client request of a schedule, and its states on the decode side."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hisparse.types import Landing, RequestPages
from tests.pd.pools import Content
from tests.pd.prefill import Prefill


class State(enum.Enum):
    """Of a request on the decode side. The last four are ends."""

    ASKED = "asked"
    OFFERED = "offered"
    IMPORTING = "importing"
    LOADED = "loaded"
    RECOMPUTING = "recomputing"
    DONE = "done"
    RECOMPUTED = "recomputed"
    ERROR = "error"
    CLOSED = "closed"


LIVE = (State.ASKED, State.OFFERED, State.IMPORTING, State.LOADED, State.RECOMPUTING)


@dataclass
class Request:
    """One client request. `client`: its name outside of decode, for good. `lease_id`: of the answer it uses."""

    request_id: str
    content: Content
    prefill: Prefill
    state: State = State.ASKED
    attempts: int = 0
    prefill_id: str = ""
    asked_at_s: float = 0.0
    lease_id: str = ""
    first_page: int = 0
    """Of the import: decode holds what lies before."""
    landing: Landing | None = None
    pages: RequestPages | None = None
    error: str = ""
    client: str = ""

    def __post_init__(self) -> None:
        self.client = self.client or self.request_id
