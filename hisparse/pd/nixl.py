"""The NIXL Transport: one agent, UCX, CPU and GPU memory. The only module that imports nixl.

Error mode `peer` is the default although it costs ~10 ms a notice on busy cores: it is what makes a dead peer an error
within ~0.1 s instead of a transfer that never completes. `none` is faster for notices where every peer shares our fate.
The progress thread sleeps on UCX's events: an idle agent costs 0.3 % of a core instead of a whole one (measured).
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import nixl._api as nixl_api
import numpy as np

from hisparse.errors import TransferError
from hisparse.pd.registered import CPU, RegisteredRanges
from hisparse.pd.transport import Descriptors, PeerLost

_BINDING_LOCK = threading.Lock()


@dataclass(slots=True, eq=False)
class NixlRead:
    """A posted READ; `xfer` is None once it is released."""

    peer: str
    xfer: Any
    done: bool


class NixlTransport:
    """See Transport. NIXL does no locking here: construction and every call come from one thread.

    Args:
        name: agent name, distinct per process start.
        error_mode: UCX endpoint error handling, "peer" or "none".
        progress_wait_us: longest sleep of the progress thread, which events cut short; 0 = it spins on a core.
    Raises:
        TransferError: the agent or its UCX backend cannot be made.
    """

    def __init__(self, name: str, *, error_mode: str = "peer", progress_wait_us: int = 10_000) -> None:
        self.name = name
        try:
            self._agent = _make_agent(name, progress_wait_us)
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": error_mode})
        except Exception as error:
            raise TransferError(f"cannot make the NIXL agent {name}: {_words(error)}") from error
        self._registrations: list[Any] = []
        self._own = RegisteredRanges()
        self._far: dict[str, RegisteredRanges] = {}
        self._peers: dict[str, set[NixlRead]] = {}
        self._closed = False

    def register(self, address: int, num_bytes: int, device: int | None = None) -> None:
        try:
            self._registrations.append(self._agent.register_memory([(address, num_bytes, device or 0, "")], _kind(device)))
        except Exception as error:
            fix = ("check `ulimit -l` (memlock)" if device is None else
                   "UCX must have its CUDA modules (cuda_copy, cuda_ipc) and find libcuda.so.1")
            where = "of CPU memory" if device is None else f"of GPU {device}"
            raise TransferError(f"NIXL cannot register {num_bytes} bytes {where} at {address:#x}: {_words(error)}; {fix}"
                                ) from error
        self._own.add(address, num_bytes, device)

    def metadata(self) -> bytes:
        return self._own.wrap(bytes(self._agent.get_agent_metadata()))

    def connect(self, peer: str, metadata: bytes) -> None:
        if peer in self._peers:
            raise TransferError(f"agent {peer} is connected already; disconnect it first")
        ranges, metadata = RegisteredRanges.unwrap(metadata)
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"cannot add NIXL agent {peer}: {_words(error)}") from error
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != peer:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)
            raise TransferError(f"the metadata of agent {peer} belongs to agent {name}")
        self._peers[peer], self._far[peer] = set(), ranges

    def read(self, peer: str, descriptors: Descriptors) -> NixlRead:
        if peer not in self._peers:
            raise TransferError(f"agent {peer} is not connected")
        far, near = np.zeros(descriptors.shape, np.uint64), np.zeros(descriptors.shape, np.uint64)
        far[:, 0], near[:, 0] = descriptors[:, 0], descriptors[:, 1]
        far[:, 1] = near[:, 1] = descriptors[:, 2]
        far_gpu = self._far[peer].device_of(descriptors[:, 0], descriptors[:, 2])
        near_gpu = self._own.device_of(descriptors[:, 1], descriptors[:, 2])
        far[:, 2], near[:, 2] = max(far_gpu, 0), max(near_gpu, 0)
        agent = self._agent
        try:
            local, remote = agent.get_xfer_descs(near, _kind(near_gpu)), agent.get_xfer_descs(far, _kind(far_gpu))
            read = NixlRead(peer=peer, xfer=agent.initialize_xfer("READ", local, remote, peer), done=False)
        except Exception as error:  # out of range, unregistered, unknown: nothing was posted
            raise TransferError(f"READ from {peer} was refused: {_words(error)}") from error
        self._peers[peer].add(read)
        try:
            state = agent.transfer(read.xfer)
        except Exception as error:
            self._release(read)
            raise PeerLost(f"READ from {peer}: {_words(error)}") from error
        if state == "ERR":
            self._release(read)
            raise PeerLost(f"READ from {peer} failed when posted")
        read.done = state == "DONE"
        return read

    def poll(self, handle: NixlRead) -> bool:
        if handle.xfer is None:
            raise TransferError(f"this READ from {handle.peer} was released")
        if not handle.done:
            try:
                state = self._agent.check_xfer_state(handle.xfer)
            except Exception as error:
                self._release(handle)
                raise PeerLost(f"READ from {handle.peer}: {_words(error)}") from error
            if state == "ERR":
                self._release(handle)
                raise PeerLost(f"READ from {handle.peer} failed")
            handle.done = state == "DONE"
        if handle.done:
            self._release(handle)
        return handle.done

    def notify(self, peer: str, message: bytes) -> None:
        if peer not in self._peers:
            raise TransferError(f"agent {peer} is not connected")
        try:
            self._agent.send_notif(peer, message)
        except Exception as error:
            raise TransferError(f"notice to {peer}: {_words(error)}") from error

    def notices(self) -> list[bytes]:
        try:
            news = self._agent.get_new_notifs()
        except Exception as error:
            raise TransferError(f"cannot poll notices: {_words(error)}") from error
        return [bytes(message) for messages in news.values() for message in messages]

    def disconnect(self, peer: str) -> None:
        reads = self._peers.get(peer)
        if reads is None:
            return
        for read in list(reads):
            self._release(read)
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            raise TransferError(f"cannot remove NIXL agent {peer}: {_words(error)}") from error
        del self._peers[peer], self._far[peer]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            with contextlib.suppress(TransferError):
                self.disconnect(peer)
        for registration in self._registrations:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registration)
        self._registrations = []
        self._peers = {}
        del self._agent  # destroys the agent, its endpoints and its progress thread

    def _release(self, read: NixlRead) -> None:
        # A READ in progress may refuse its release; the removal of the agent that follows ends it then.
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(read.xfer)
        read.xfer = None
        self._peers[read.peer].discard(read)


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


def _kind(device: int | None) -> str:
    """NIXL's name of the memory of a GPU, or of CPU memory (None, CPU)."""
    return "DRAM" if device is None or device == CPU else "VRAM"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
