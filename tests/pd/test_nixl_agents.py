"""What NixlTransport makes of agents that end, cannot be made or do not take a peer back. The agent is played here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hisparse.errors import TransferError
from hisparse.pd import nixl
from hisparse.pd.nixl import NixlTransport
from hisparse.pd.registered import RegisteredRanges
from hisparse.pd.transport import PeerLost

SIZE = 4096
NEAR, FAR = 1 << 20, 1 << 30
READ = np.array([[FAR, NEAR, SIZE]])


class Agent:
    """READs from peers of `at_once` are over when they are posted; others hang until `done` says otherwise."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.peers: set[str] = set()

    def create_backend(self, kind: str, options: dict[str, str]) -> None:
        if self._world.refuses:
            raise RuntimeError("no memory for an agent")

    def get_agent_metadata(self) -> bytes:
        return b""

    def register_memory(self, ranges: Any, kind: str) -> Any:
        return ranges

    def deregister_memory(self, registration: Any) -> None: ...

    def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name in self._world.unreachable:
            raise RuntimeError("no route")
        self.peers.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, table: Any, kind: str) -> Any:
        return table

    def initialize_xfer(self, kind: str, near: Any, far: Any, peer: str) -> str:
        if peer not in self.peers:
            raise RuntimeError("nixlNotFoundError")
        return peer

    def transfer(self, xfer: str) -> str:
        self._world.posted.append(xfer)
        return "DONE" if xfer in self._world.at_once else "PROC"

    def check_xfer_state(self, xfer: str) -> str:
        return "DONE" if xfer in self._world.done else "PROC"

    def release_xfer_handle(self, xfer: str) -> None: ...

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


class World:
    """`log`: agents that are made, and waits for a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.refuses = False
        self.unreachable: set[str] = set()
        self.at_once: set[str] = set()
        self.done: set[str] = set()
        self.posted: list[str] = []
        monkeypatch.setattr(nixl, "FINISH_S", 0.0)
        monkeypatch.setattr(nixl, "_make_agent", self._make)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: self.log.append(f"wait {gpu}"))
        self.transport = NixlTransport("d")

    def _make(self, name: str, wait_us: int) -> Agent:
        self.log.append(name)
        return Agent(self)

    def connect(self, *peers: str, device: int | None = None) -> None:
        self.transport.register(NEAR, SIZE, device)
        far = RegisteredRanges()
        far.add(FAR, SIZE, device)
        for peer in peers:
            self.transport.connect(peer, far.wrap(peer.encode()))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_read_whose_agent_has_no_successor_yet_is_not_over(world: World) -> None:
    """It is posted on the next agent: whoever was told that it is over would have given its pages to somebody else."""
    world.connect("hung", "well")
    transport = world.transport
    transport.read("hung", READ)
    read = transport.read("well", READ)
    world.refuses = True
    with pytest.raises(TransferError, match="cannot make"):
        transport.disconnect("hung")
    assert not transport.poll(read)
    world.refuses = False
    transport.disconnect("hung")
    assert world.posted == ["hung", "well", "well"] and not transport.poll(read)
    world.done = {"well"}
    assert transport.poll(read)


def test_a_peer_that_the_next_agent_does_not_take_is_lost_and_can_come_back(world: World) -> None:
    world.connect("hung", "idle", "busy")
    transport = world.transport
    transport.read("hung", READ)
    read = transport.read("busy", READ)
    world.unreachable = {"idle", "busy"}
    transport.disconnect("hung")
    with pytest.raises(PeerLost, match="no route"):
        transport.poll(read)
    with pytest.raises(PeerLost, match="no route"):
        transport.read("idle", READ)
    for peer in ("idle", "busy"):
        transport.disconnect(peer)
    assert transport.replaced == 1, "nothing of them can be on its way"
    world.unreachable = set()
    world.connect("idle", "busy")
    world.done = {"idle"}
    assert transport.poll(transport.read("idle", READ))


@pytest.mark.parametrize("end", ["disconnect", "close"])
@pytest.mark.parametrize("going", [True, False])
def test_copies_that_a_gpu_has_begun_are_over_when_their_agent_has_ended(world: World, end: str, going: bool) -> None:
    """Another peer's READ is posted anew, too: an old copy behind it would write to a slot that is free by then."""
    world.connect("p", device=3)
    transport = world.transport
    read = transport.read("p", READ)
    if not going:
        world.done = {"p"}
        assert transport.poll(read)
    transport.disconnect("p") if end == "disconnect" else transport.close()
    assert world.log == ["d", *(["wait 3"] if going else []), *(["d~1"] if going and end == "disconnect" else [])]


@pytest.mark.parametrize("other", [True, False])
def test_a_read_that_was_over_unseen_when_its_endpoint_was_closed_is_released(world: World, other: bool) -> None:
    """A notice for a peer's successor closes its old endpoint between two polls."""
    world.connect("p")
    world.at_once = {"p"}
    read = world.transport.read("p", READ)
    if other:
        world.at_once = set()
        world.transport.read("p", READ)
    world.transport.disconnect("p")
    with pytest.raises(TransferError, match="released"):
        world.transport.poll(read)
