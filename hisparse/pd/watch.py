"""What the ranks' transfer threads say of themselves: progress, counters, staging."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hisparse.pd.commands import PDOutput, PeerTraffic, TransferReport

_log = logging.getLogger(__name__)


class TransferWatch:
    """The latest word of each rank. Engine-loop thread only.

    Attributes:
        stuck: rank -> why its transfer thread does not go on. overdue: imports whose request was ended because of it.
    """

    def __init__(self) -> None:
        self.stuck: dict[int, str] = {}
        self.overdue = 0
        self._reports: dict[int, TransferReport] = {}

    def hear(self, output: PDOutput) -> None:
        if output.report is not None:
            self._reports[output.rank] = output.report
        if output.stuck:
            _log.error("%s", output.stuck)
            self.stuck[output.rank] = output.stuck
        else:
            self.stuck.pop(output.rank, None)

    def forget(self) -> None:
        """The ranks were replaced."""
        self.stuck, self._reports = {}, {}

    def problem(self) -> str:
        """Why the engine should be replaced; "" = every thread goes on."""
        return "; ".join(self.stuck[rank] for rank in sorted(self.stuck))

    def peers(self) -> Mapping[str, PeerTraffic]:
        """Prefill engine id -> what all ranks together read from it."""
        peers: dict[str, PeerTraffic] = {}
        for report in self._reports.values():
            for name, traffic in report.peers.items():
                peers[name] = peers.get(name, PeerTraffic()) + traffic
        return peers

    def staging_slots(self) -> tuple[int, int]:
        """(all, free), of all ranks."""
        reports = self._reports.values()
        return sum(report.staging_slots for report in reports), sum(report.staging_slots_free for report in reports)
