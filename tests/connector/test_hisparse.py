"""Both halves of HiSparseConnector: the command goes out once, acknowledgements come back."""

from __future__ import annotations

import pickle

import pytest

from hisparse.connector.base import LoadEvents, SchedulerConnector, WorkerConnector
from hisparse.connector.hisparse import NAME, HiSparseConnectorScheduler, HiSparseConnectorWorker
from hisparse.errors import InvariantError
from hisparse.types import AckKind, PageRestore, SparseKVOffloadCommand
from tests.worker.rig import Rig


class Manager:
    """A planner that records what it is told."""

    def __init__(self):
        self.last_command = None
        self.outputs = []
        self.pending = False
        self.checked = 0

    def on_worker_output(self, outputs):
        self.outputs += outputs

    def has_pending_work(self):
        return self.pending

    def check(self):
        self.checked += 1


def test_both_halves_are_connectors_of_one_name():
    rig = Rig()
    scheduler, worker = HiSparseConnectorScheduler(Manager()), HiSparseConnectorWorker(rig.worker)
    assert isinstance(scheduler, SchedulerConnector) and isinstance(worker, WorkerConnector)
    assert scheduler.name == worker.name == NAME == "hisparse"
    worker.shutdown()
    worker.shutdown()


def test_the_command_of_the_last_plan_is_handed_out_once():
    manager = Manager()
    connector = HiSparseConnectorScheduler(manager)
    assert connector.build_metadata(1) is None  # HiSparse is off
    manager.last_command = SparseKVOffloadCommand(step=2)
    assert connector.build_metadata(2) is manager.last_command
    with pytest.raises(
        InvariantError, match="asked for step 2: the last planned command is of step 2, the last one sent of step 2"
    ):
        connector.build_metadata(2)
    with pytest.raises(InvariantError, match="asked for step 4: the last planned command is of step 2"):
        connector.build_metadata(4)


def test_scheduler_half_passes_everything_else_on():
    manager = Manager()
    connector = HiSparseConnectorScheduler(manager)
    assert connector.update(["a", "b"]) == LoadEvents() and manager.outputs == ["a", "b"]
    assert not connector.has_pending_work()
    manager.pending = True
    assert connector.has_pending_work()
    connector.request_closed("r")
    connector.check()
    assert manager.checked == 1


def test_a_command_travels_and_its_acknowledgements_return():
    """Across a pickle each way, as between processes."""
    rig, manager = Rig(), Manager()
    scheduler, worker = HiSparseConnectorScheduler(manager), HiSparseConnectorWorker(rig.worker)
    restore = PageRestore(id=4, host_block=3, device_blocks=(1, 2), num_rows=2)
    manager.last_command = rig.command(restores=(restore,))
    worker.start_step(pickle.loads(pickle.dumps(scheduler.build_metadata(1))))
    worker.end_step()
    output = worker.output()
    scheduler.update([pickle.loads(pickle.dumps(output))])
    assert [(a.transfer_id, a.kind, a.incarnation, a.rank) for a in manager.outputs[0].acks] == [(4, AckKind.COMPLETED, 77, 0)]
    worker.start_step(None)
    worker.end_step()
    assert worker.output() is None
    worker.shutdown()
