"""Counters and gauges of the P/D connector's scheduler half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hisparse.pd.commands import PeerTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class PDStats:
    """Counters since start, and gauges (leases_held, imports_in_flight)."""

    leases_held: int = 0
    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    early_releases: int = 0
    imports_in_flight: int = 0
    imports_ok: int = 0
    imports_failed: Mapping[str, int] = field(default_factory=dict)
    """By ImportFailure value; "refused" includes parameters that add_remote did not accept."""
    landings: Mapping[str, int] = field(default_factory=dict)
    import_bytes: int = 0
    import_seconds: float = 0.0
    late_acks_ignored: int = 0
    bad_notices: int = 0
    imports_overdue: int = 0
    """Whose request was ended while a rank's transfer thread could not say that they are over."""
    stuck: Mapping[int, str] = field(default_factory=dict)
    """Rank -> why its transfer thread does not go on."""
    staging_slots: int = 0
    staging_slots_free: int = 0
    peers: Mapping[str, PeerTraffic] = field(default_factory=dict)
    """Prefill engine id -> what all ranks together read from it."""
