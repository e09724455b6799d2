"""The thread that owns a rank's transport: every call to it is made here, from its construction to its end.

A call may block for as long as the transport likes, and nothing can interrupt it. So the step's thread watches: `stuck`
and `overdue` say, without waiting, that the thread does not go on and which imports should have been over.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from hisparse.errors import InvariantError, TransferError
from hisparse.pd.commands import ImportAck, PDCommand, TransferReport
from hisparse.pd.endpoint import RankEndpoint, agent_name
from hisparse.pd.importer import Importer
from hisparse.pd.memory import LocalMemory
from hisparse.pd.metered import MeteredTransport
from hisparse.pd.overdue import ImportDeadlines
from hisparse.pd.transport import Transport

BUSY_POLL_S = 0.0001
IDLE_POLL_S = 0.01
"""Notices of peers are seen after at most this long when nothing is imported."""
REPORT_S = 0.1
"""Between two reports while an import runs; its end is reported at once."""
LINGER_S = 0.1
"""A notice sent just before the end gets this long to leave the process."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class TransferThread:
    """Runs an Importer and sends and receives notices.

    Args:
        drain_s: what a READ gets beyond its import's deadline before its endpoint is closed. close_s: what closing may take.
        stall_s: a thread that makes no round for so long is stuck.
        make_transport, make_importer: called on the thread.
    Attributes:
        report: the latest; replaced by the thread before the acknowledgements that it covers.
    """

    def __init__(self, memory: LocalMemory, *, engine_id: str, incarnation: int, rank: int, drain_s: float,
                 close_s: float, stall_s: float, make_transport: Callable[[str], Transport],
                 make_importer: Callable[[Transport], Importer]) -> None:
        self._memory, self._rank, self._drain_s, self._stall_s = memory, rank, drain_s, stall_s
        self._quarantine_s = drain_s + close_s
        self._agent = agent_name(engine_id, incarnation, rank)
        self._make_transport, self._make_importer = make_transport, make_importer
        self._commands: queue.SimpleQueue[PDCommand | None] = queue.SimpleQueue()
        self._acks: queue.SimpleQueue[ImportAck] = queue.SimpleQueue()
        self._notices: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._endpoint: Future[RankEndpoint] = Future()
        self._error: BaseException | None = None
        self.report = TransferReport()
        self._metered: MeteredTransport | None = None
        self._beat_s = time.monotonic()  # of the last round; the thread writes it
        self._deadlines = ImportDeadlines(self._quarantine_s)  # the step's thread
        self._last_notice_s = self._reported_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"hisparse-pd-{rank}", daemon=True)
        self._thread.start()

    def endpoint(self, timeout_s: float) -> RankEndpoint:
        """Waits until the transport is up. Raises TransferError when it cannot be, or not in time."""
        try:
            return self._endpoint.result(timeout_s)
        except TimeoutError as error:
            raise TransferError(f"transport agent {self._agent} did not start within {timeout_s:g} s") from error

    def submit(self, command: PDCommand) -> None:
        """Never waits. Raises InvariantError when the thread has ended."""
        self.raise_error()
        if not self._thread.is_alive():
            raise InvariantError(f"the transfer thread of rank {self._rank} has ended")
        for plan in command.imports:
            self._deadlines.begin(plan)
        self._commands.put(command)

    def raise_error(self) -> None:
        """Raises what ended the thread, if anything did."""
        if self._error is not None:
            raise TransferError(f"the transfer thread of rank {self._rank} died: {self._error}") from self._error

    def take(self) -> tuple[list[ImportAck], list[bytes]]:
        """Acknowledgements and notices since the last call."""
        acks = _drain(self._acks)
        for ack in acks:
            self._deadlines.end(ack.job_id)
        return acks, _drain(self._notices)

    def overdue(self) -> dict[int, str]:
        """Imports that are not acknowledged although even their quarantine should be over, and what keeps them.

        Their acknowledgement may still come. Call after `take`.
        """
        late = self._deadlines.late()
        why = (self._doing() if late else "") or "the transport cannot close the endpoint"
        return dict.fromkeys(late, why)

    def stuck(self) -> str:
        """Why the thread does not go on; "" = it does."""
        return self._doing() if self._endpoint.done() and time.monotonic() - self._beat_s >= self._stall_s else ""

    def _doing(self) -> str:
        """What the round under way is in; "" = it began just now."""
        age_s = time.monotonic() - self._beat_s
        if age_s < self._quarantine_s / 4:
            return ""
        call = self._metered.call if self._metered is not None else None
        where = f"transport call {call[0]}({call[1]})" if call is not None else "copy or command"
        return f"the transfer thread of rank {self._rank} has been inside one {where} for {age_s:.1f} s"

    def stop(self, timeout_s: float) -> None:
        """Cancels imports, closes every endpoint, deregisters, ends the thread. Idempotent.

        Raises:
            TransferError: the thread did not end in time; the pools must not be freed.
        """
        self._commands.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransferError(f"the transfer thread of rank {self._rank} did not end within {timeout_s:g} s; "
                                "its memory must stay mapped")

    def _run(self) -> None:
        with contextlib.ExitStack() as cleanup:  # the pool is released when the transport has deregistered it
            self._serve(cleanup)

    def _serve(self, cleanup: contextlib.ExitStack) -> None:
        transport: MeteredTransport | None = None
        try:
            cleanup.enter_context(self._memory.held(self._agent))
            transport = self._metered = MeteredTransport(self._make_transport(self._agent))
            for address, num_bytes in self._memory.slabs:
                transport.register(address, num_bytes)
            importer = self._make_importer(transport)
            self._beat_s = time.monotonic()
            self._endpoint.set_result(self._memory.endpoint(self._rank, self._agent, transport.metadata()))
            self._loop(transport, importer)
        except BaseException as error:
            self._error = error
            if not self._endpoint.done():
                self._endpoint.set_exception(error)
            else:
                _log.exception("transfer thread of rank %d died", self._rank)
        finally:
            if transport is not None:
                transport.close()

    def _loop(self, transport: MeteredTransport, importer: Importer) -> None:
        wait_s = 0.0
        while True:
            try:
                command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            except queue.Empty:
                pass
            else:
                if command is None:
                    break
                self._obey(command, transport, importer)
            moved = self._round(transport, importer)
            wait_s = 0.0 if moved else BUSY_POLL_S if importer.busy() else IDLE_POLL_S
        importer.cancel_all()
        give_up_s = time.monotonic() + self._drain_s
        while importer.busy() and time.monotonic() < give_up_s:
            self._round(transport, importer)
            time.sleep(BUSY_POLL_S)
        time.sleep(max(0.0, self._last_notice_s + LINGER_S - time.monotonic()))

    def _obey(self, command: PDCommand, transport: Transport, importer: Importer) -> None:
        for plan in command.imports:
            importer.submit(plan)
        for job_id in command.cancels:
            importer.cancel(job_id)
        for notice in command.notices:
            try:
                importer.peers.connect(notice.peer_id, notice.endpoint)
                transport.notify(notice.endpoint.agent, notice.payload)
                self._last_notice_s = time.monotonic()
            except TransferError as error:  # the lease runs out by itself
                _log.debug("notice to %s not sent: %s", notice.endpoint.agent, error)

    def _round(self, transport: MeteredTransport, importer: Importer) -> bool:
        self._beat_s = time.monotonic()
        moved = importer.pump()
        acks = importer.take_acks()
        if acks or (transport.changed and self._beat_s >= self._reported_s + REPORT_S):
            self._reported_s = self._beat_s
            self.report = TransferReport(peers=transport.take_traffic(), staging_slots=importer.slots.num_staging,
                                         staging_slots_free=importer.slots.num_staging_free)
        for ack in acks:
            self._acks.put(ack)
        for message in transport.notices():
            self._notices.put(message)
            moved = True
        return moved


def _drain(source: queue.SimpleQueue[T]) -> list[T]:
    items: list[T] = []
    while True:
        try:
            items.append(source.get_nowait())
        except queue.Empty:
            return items
