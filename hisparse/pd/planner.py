"""The landing planner: where an imported prefix lands, decided once per request from the admission arithmetic alone."""

from __future__ import annotations

from collections import Counter

from hisparse.types import Landing


def plan_landing(fits_resident: bool, fits_host: bool) -> Landing | None:
    """RESIDENT if the whole prefix fits the device pools now, else HOST if the host-backed footprint fits, else wait.

    Pure. No length threshold and no preference but this order: with free GPU memory HiSparse must cost nothing.
    Args:
        fits_resident: indexer, resident pages and first decode step fit the device, and the host reservation fits.
        fits_host: hot region, tail page and indexer fit the device, and the host reservation fits.
    """
    if fits_resident:
        return Landing.RESIDENT
    return Landing.HOST if fits_host else None


class LandingPlanner:
    """Remembers each request's choice from the pass where one first fits, through failures and retries.

    Attributes:
        counts: choices made so far, by landing.
    """

    def __init__(self) -> None:
        self._chosen: dict[str, Landing] = {}
        self.counts: Counter[Landing] = Counter()

    def recorded(self, request_id: str) -> Landing | None:
        """The choice on record. Pure."""
        return self._chosen.get(request_id)

    def choose(self, request_id: str, fits_resident: bool, fits_host: bool) -> Landing | None:
        """The recorded choice, whatever fits now; else records the one that fits; else None and nothing is recorded."""
        chosen = self._chosen.get(request_id)
        if chosen is None:
            chosen = plan_landing(fits_resident, fits_host)
            if chosen is not None:
                self._chosen[request_id] = chosen
                self.counts[chosen] += 1
        return chosen

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._chosen.pop(request_id, None)
