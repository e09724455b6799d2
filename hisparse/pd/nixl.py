"""The NIXL Transport: one agent, UCX, CPU and GPU memory. The only module that imports nixl.

Error mode `peer` is the default although it costs ~10 ms a notice on busy cores: it is what makes a dead peer an error
within ~0.1 s instead of a transfer that never completes. `none` is faster for notices where every peer shares our fate.
The progress thread sleeps on UCX's events: an idle agent costs 0.3 % of a core instead of a whole one (measured).

NIXL cannot abort a READ: after `release_xfer_handle` and `remove_remote_agent` have returned, a peer that was stopped and
goes on still has its late answer written to our memory (seen over TCP). Only the end of the agent ends its READs. So a peer
with a READ that did not complete is disconnected by replacing the agent. READs from other peers get a moment to complete
before it: over TCP UCX may abort a process that is answering when its connection goes. The rest start anew on the next agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import nixl._api as nixl_api
import numpy as np
import torch

from hisparse.errors import TransferError
from hisparse.pd.descriptors import cut
from hisparse.pd.registered import CPU, RegisteredRanges
from hisparse.pd.transport import Descriptors, PeerLost

_BINDING_LOCK = threading.Lock()


@dataclass(slots=True, eq=False)
class NixlRead:
    """A posted READ. `xfer` is None once it is released; `error`: why it could not start anew."""

    peer: str
    descriptors: Descriptors
    xfer: Any = None
    done: bool = False
    error: str = ""


READ_THREADS = 4 if (os.cpu_count() or 1) >= 8 else 2
"""Between CPUs UCX copies with the thread that asks: one alone reaches half of a memcpy, two 0.8, four on 16 cores 1.4."""
SPLIT_DESCRIPTORS, PIECE_BYTES, MIN_CUT_BYTES = 16, 128 << 10, 4 << 20
"""A thread's share of a READ between CPUs is at least so many descriptors. A READ of MIN_CUT_BYTES is cut into pieces, so that
shares are equal, and that those of a slot, few and long, are shared at all."""

FINISH_S = 1.0
"""What the READs of other peers get to complete before the agent ends. Within the time that closing an endpoint may take."""


@dataclass(slots=True, eq=False)
class _Peer:
    """`ranges`: what it has registered. `loud`: a READ ended otherwise than complete, so parts of it may still arrive.
    `unknown`: why the present agent does not know it; "" = it does."""

    metadata: bytes
    ranges: RegisteredRanges
    reads: set[NixlRead] = field(default_factory=set)
    loud: bool = False
    unknown: str = ""


class NixlTransport:
    """See Transport. NIXL does no locking here: construction and every call come from one thread.

    Replacing the agent makes `metadata()` of before useless, so an engine that reads from peers must not serve others too.

    Args:
        name: agent name, distinct per process start.
        error_mode: UCX endpoint error handling, "peer" or "none".
        progress_wait_us: longest sleep of the progress thread, which events cut short; 0 = it spins on a core.
        threads: of UCX, which share the descriptors of a READ; 0 = one thread reads them all. They sleep while there is none.
    Attributes:
        replaced: agents that were ended to silence a peer.
    Raises:
        TransferError: the agent or its UCX backend cannot be made.
    """

    def __init__(self, name: str, *, error_mode: str = "peer", progress_wait_us: int = 10_000,
                 threads: int = READ_THREADS) -> None:
        self.name, self.replaced = name, 0
        self._progress_wait_us = progress_wait_us
        self._threads = threads
        self._options = {"ucx_error_handling_mode": error_mode}
        if threads:
            self._options |= {"num_threads": str(threads), "split_batch_size": str(SPLIT_DESCRIPTORS)}
        self._own = RegisteredRanges()
        self._registrations: list[Any] = []
        self._peers: dict[str, _Peer] = {}
        self._inbox: list[bytes] = []
        self._closed = False
        self._agent: Any = self._make()

    def register(self, address: int, num_bytes: int, device: int | None = None) -> None:
        gpu = CPU if device is None else device
        self._register(address, num_bytes, gpu)
        self._own.add(address, num_bytes, device)

    def metadata(self) -> bytes:
        return self._own.wrap(bytes(self._agent.get_agent_metadata()))

    def connect(self, peer: str, metadata: bytes) -> None:
        if peer in self._peers:
            raise TransferError(f"agent {peer} is connected already; disconnect it first")
        ranges, metadata = RegisteredRanges.unwrap(metadata)
        self._add(peer, metadata)
        self._peers[peer] = _Peer(metadata=metadata, ranges=ranges)

    def read(self, peer: str, descriptors: Descriptors) -> NixlRead:
        if peer not in self._peers:
            raise TransferError(f"agent {peer} is not connected")
        read = NixlRead(peer=peer, descriptors=descriptors)
        self._post(read)
        return read

    def poll(self, handle: NixlRead) -> bool:
        if handle.error:
            self._end(handle, loud=False)
            raise PeerLost(f"READ from {handle.peer}: {handle.error}")
        if handle.xfer is None and not handle.done:
            state = self._peers.get(handle.peer)
            if state is not None and handle in state.reads:
                return False  # there is no agent at present, and the next one starts it anew
            raise TransferError(f"this READ from {handle.peer} was released")
        if not handle.done:
            answer, why = _ask(lambda: self._agent.check_xfer_state(handle.xfer))
            if why or answer == "ERR":
                self._end(handle, loud=True)
                raise PeerLost(f"READ from {handle.peer}: {why or 'failed'}")
            handle.done = answer == "DONE"
        if handle.done:
            self._end(handle, loud=False)
        return handle.done

    def notify(self, peer: str, message: bytes) -> None:
        if peer not in self._peers:
            raise TransferError(f"agent {peer} is not connected")
        _, why = _ask(lambda: self._agent.send_notif(peer, message))
        if why:
            raise TransferError(f"notice to {peer}: {why}")

    def notices(self) -> list[bytes]:
        if self._agent is not None:
            self._receive()
        inbox, self._inbox = self._inbox, []
        return inbox

    def disconnect(self, peer: str) -> None:
        state = self._peers.get(peer)
        if state is None:
            return
        reads = list(state.reads)
        if state.unknown:
            pass  # the agent that read from it has ended, and the present one has no endpoint of it
        elif state.loud or any(not read.done for read in state.reads):
            state.loud = True  # also if the replacement fails half way and is tried again
            self._replace(without=peer)
        else:
            for read in reads:
                self._end(read, loud=False)
            _, why = _ask(lambda: self._agent.remove_remote_agent(peer))
            if why:
                raise TransferError(f"cannot remove NIXL agent {peer}: {why}")
        for read in reads:
            read.xfer, read.done, read.error = None, False, ""  # released, whatever it was
        del self._peers[peer]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._destroy()
            self._peers = {}

    # ---- one agent
    def _make(self) -> Any:
        name = f"{self.name}~{self.replaced}" if self.replaced else self.name
        try:
            agent = _make_agent(name, self._progress_wait_us)
            agent.create_backend("UCX", self._options)
        except Exception as error:
            raise TransferError(f"cannot make the NIXL agent {name}: {_words(error)}") from error
        return agent

    def _register(self, address: int, num_bytes: int, gpu: int) -> None:
        registration, why = _ask(lambda: self._agent.register_memory([(address, num_bytes, max(gpu, 0), "")], _kind(gpu)))
        if why:
            fix = ("check `ulimit -l` (memlock)" if gpu == CPU else
                   "UCX must have its CUDA modules (cuda_copy, cuda_ipc) and find libcuda.so.1")
            where = "of CPU memory" if gpu == CPU else f"of GPU {gpu}"
            raise TransferError(f"NIXL cannot register {num_bytes} bytes {where} at {address:#x}: {why}; {fix}")
        self._registrations.append(registration)

    def _add(self, peer: str, metadata: bytes) -> None:
        name, why = _ask(lambda: self._agent.add_remote_agent(metadata))
        if why:
            raise TransferError(f"cannot add NIXL agent {peer}: {why}")
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != peer:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)
            raise TransferError(f"the metadata of agent {peer} belongs to agent {name}")

    def _destroy(self) -> None:
        """Ends the agent, its endpoints and its progress thread: nothing of it reads or writes any more."""
        if self._agent is None:
            return
        going = any(state.loud or any(not read.done for read in state.reads) for state in self._peers.values())
        for state in self._peers.values():
            for read in state.reads:
                with contextlib.suppress(Exception):
                    self._agent.release_xfer_handle(read.xfer)
                read.xfer = None
        for registration in self._registrations:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registration)
        self._registrations = []
        self._agent = None
        for gpu in {gpu for _, _, gpu in self._own if gpu != CPU} if going else ():
            torch.cuda.synchronize(gpu)  # ending the agent does not stop copies between GPUs that the device has begun

    def _replace(self, *, without: str) -> None:
        """A new agent with the same memory and the other peers, whose READs start anew. Raises TransferError when there is
        no new agent; then there is none at all, and the next `disconnect` tries again.
        """
        if self._agent is not None:
            self._finish(without=without)
            with contextlib.suppress(TransferError):
                self._receive()
            self._destroy()
            self.replaced += 1
        self._agent = self._make()
        try:
            for address, num_bytes, gpu in self._own:
                self._register(address, num_bytes, gpu)
        except TransferError:
            self._destroy()
            raise
        for peer, state in self._peers.items():
            if peer == without:
                continue
            state.unknown = ""
            try:
                self._add(peer, state.metadata)
            except TransferError as error:
                state.unknown = str(error)
            for read in list(state.reads):
                if not read.done:
                    self._restart(read)

    def _finish(self, *, without: str) -> None:
        """Waits for the READs of other peers, for FINISH_S at most. One that fails is left to `poll`, or starts anew."""
        going = [read for peer, state in self._peers.items() if peer != without for read in state.reads if not read.done]
        give_up_s = time.monotonic() + FINISH_S
        while going and time.monotonic() < give_up_s:
            for read in going:
                with contextlib.suppress(Exception):
                    read.done = self._agent.check_xfer_state(read.xfer) == "DONE"
            going = [read for read in going if not read.done]
            time.sleep(0.0005)

    def _restart(self, read: NixlRead) -> None:
        try:
            self._post(read)
        except TransferError as error:
            read.error = f"the agent was replaced, and {error}"
            self._peers[read.peer].reads.add(read)  # `poll` says so

    # ---- one READ
    def _post(self, read: NixlRead) -> None:
        peer, descriptors = read.peer, read.descriptors
        if self._agent is None:
            raise PeerLost(f"READ from {peer}: there is no agent at present")
        if self._peers[peer].unknown:
            raise PeerLost(f"READ from {peer}: {self._peers[peer].unknown}")
        far_gpu = self._peers[peer].ranges.device_of(descriptors[:, 0], descriptors[:, 2])
        near_gpu = self._own.device_of(descriptors[:, 1], descriptors[:, 2])
        if self._threads and near_gpu == CPU and int(descriptors[:, 2].sum()) >= MIN_CUT_BYTES:
            descriptors = cut(descriptors, PIECE_BYTES)
        far, near = np.zeros(descriptors.shape, np.uint64), np.zeros(descriptors.shape, np.uint64)
        far[:, 0], near[:, 0] = descriptors[:, 0], descriptors[:, 1]
        far[:, 1] = near[:, 1] = descriptors[:, 2]
        far[:, 2], near[:, 2] = max(far_gpu, 0), max(near_gpu, 0)
        read.xfer, why = _ask(lambda: self._agent.initialize_xfer(
            "READ", self._agent.get_xfer_descs(near, _kind(near_gpu)), self._agent.get_xfer_descs(far, _kind(far_gpu)), peer))
        if why:  # out of range, unregistered, unknown: nothing was posted
            raise TransferError(f"READ from {peer} was refused: {why}")
        self._peers[peer].reads.add(read)
        state, why = _ask(lambda: self._agent.transfer(read.xfer))
        if why or state == "ERR":
            self._end(read, loud=True)
            raise PeerLost(f"READ from {peer}: {why or 'failed when posted'}")
        read.done = state == "DONE"

    def _end(self, read: NixlRead, *, loud: bool) -> None:
        if read.xfer is not None:
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(read.xfer)
        read.xfer = None
        state = self._peers[read.peer]
        state.reads.discard(read)
        state.loud |= loud

    def _receive(self) -> None:
        news, why = _ask(lambda: self._agent.get_new_notifs())
        if why:
            raise TransferError(f"cannot poll notices: {why}")
        self._inbox += [bytes(message) for messages in news.values() for message in messages]


def _make_agent(name: str, progress_wait_us: int) -> Any:
    """The binding's configuration has the progress thread's wait; `nixl_agent` sets it to 0 and offers no argument."""
    with _BINDING_LOCK:
        binding = nixl_api.nixlBind
        plain = binding.nixlAgentConfig

        class Waiting(plain):  # type: ignore[misc,valid-type]
            def __setattr__(self, field: str, value: Any) -> None:
                super().__setattr__(field, progress_wait_us if field == "pthrDelay" else value)

        binding.nixlAgentConfig = Waiting
        try:
            return nixl_api.nixl_agent(name, nixl_api.nixl_agent_config(enable_prog_thread=True, backends=[]))
        finally:
            binding.nixlAgentConfig = plain


def _kind(gpu: int) -> str:
    """NIXL's name of the memory of a GPU, or of CPU memory (CPU)."""
    return "DRAM" if gpu == CPU else "VRAM"


def _ask(call: Callable[[], Any]) -> tuple[Any, str]:
    """What the agent answers, and "" or why it does not. No exception of the agent goes any further: its traceback would keep
    the agent, with its threads and READs, alive behind the call that ends it."""
    try:
        return call(), ""
    except Exception as error:
        return None, _words(error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
