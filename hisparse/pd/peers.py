"""Which prefill agents this rank is connected to. A restarted peer is a new agent: the old one goes first."""

from __future__ import annotations

import time
from collections.abc import Callable

from hisparse.errors import TransferError
from hisparse.pd.endpoint import RETIRED_S, RankEndpoint
from hisparse.pd.transport import Transport

MAX_RETIRED = 4096
RETIRED_HERE_S = RETIRED_S / 2
"""Less than in the scheduler half, which retires first: what it lets through again is not refused here."""


class PeerTable:
    """Connections by (peer, rank). Owned by the transfer thread.

    Args:
        on_replaced: told (old agent, new agent) when an agent of an earlier incarnation was disconnected for a new one, whoever
            asked for that and whether or not the new one can be reached. The old one's READs are over.
    Attributes:
        handshakes: connections made so far.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic, *,
                 on_replaced: Callable[[str, str], None] = lambda old, new: None) -> None:
        self._transport, self._clock, self._on_replaced = transport, clock, on_replaced
        self._agents: dict[tuple[str, int], str] = {}
        self._retired: dict[str, float] = {}  # agent -> refused until
        self.handshakes = 0

    def connect(self, peer_id: str, endpoint: RankEndpoint) -> None:
        """Makes the endpoint reachable; a second call is free.

        Raises:
            TransferError: the peer is not reachable, or it belongs to an incarnation that was replaced lately.
        """
        key = (peer_id, endpoint.rank)
        current = self._agents.get(key)
        if current == endpoint.agent:
            return
        if self._retired.get(endpoint.agent, 0.0) > self._clock():
            raise TransferError(f"agent {endpoint.agent} was replaced by a newer incarnation of {peer_id}")
        if current is not None:
            self._transport.disconnect(current)
            self._retire(current)
            del self._agents[key]
            self._on_replaced(current, endpoint.agent)
        self._transport.connect(endpoint.agent, endpoint.metadata)
        self._agents[key] = endpoint.agent
        self.handshakes += 1

    def disconnect(self, agent: str) -> bool:
        """Closes an endpoint; a later import may connect it again. False = the transport could not; it is open."""
        try:
            self._transport.disconnect(agent)
        except TransferError:
            return False
        for key, name in list(self._agents.items()):
            if name == agent:
                del self._agents[key]
        return True

    def _retire(self, agent: str) -> None:
        self._retired.pop(agent, None)
        self._retired[agent] = self._clock() + RETIRED_HERE_S
        while len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]
