"""Throughput of the spill transaction: planned, enqueued, completed."""

from __future__ import annotations

from hisparse.bench.control_plane.context import Context, Stopwatch
from hisparse.bench.control_plane.rig import (
    BLOCK,
    FULL_MASK,
    INCARNATION,
    WATERMARK,
    make_manager,
    no_gc,
    prompt,
    region_blocks,
)
from hisparse.bench.report import Row
from hisparse.types import AckKind, HiSparseWorkerOutput, Landing, SparseKVOffloadCommand, TransferAck


def spills(context: Context) -> list[Row]:
    """100,000 pages, imported into the device pool, go through plan, enqueued, completed and publication.

    Counted: 2 transitions a page (planned, completed). Timed: `plan_step` and both `on_worker_output`; nothing else
    happens in these steps.
    """
    layout, num_requests = context.layout, 8
    total = 128 if context.quick else 100_000
    pages = total // num_requests
    device = total * (1 + layout.num_resident_groups) + region_blocks(layout) * 2
    manager = make_manager(layout, device_blocks=int(device / (1 - WATERMARK)) + 1000,
                           host_blocks=total + num_requests * 32 + layout.pages(context.max_model_len),
                           max_seats=num_requests, max_model_len=context.max_model_len)
    with no_gc():
        for i in range(num_requests):
            manager.open(f"request-{i}", prompt(pages * BLOCK, i), max_tokens=16)
            assert manager.admit(f"request-{i}", manager.prefix(f"request-{i}"), landing=Landing.RESIDENT,
                                 import_tokens=pages * BLOCK, chunk_tokens=1)
        manager.plan_step(1, [])
        manager.retire(1, {})
        for i in range(num_requests):
            manager.finish_load(f"request-{i}", failed=False)

    watch, step = Stopwatch(), 1
    while manager.stats().spills_completed < total:
        step += 1
        command = watch.time("plan", manager.plan_step, step, [])
        assert command is not None and command.spills and not command.table_updates
        manager.retire(step, {})
        for name, kind in (("enqueued", AckKind.ENQUEUED), ("completed", AckKind.COMPLETED)):
            watch.time(name, manager.on_worker_output, [_acknowledge(command, kind)])
    stats = manager.stats()
    assert stats.spills_planned == stats.spills_completed == stats.pages_published == total and not stats.transfers_in_flight
    manager.check()
    elapsed_s = sum(map(watch.total_s, watch.ms))
    detail = {f"{name}_us_per_page": watch.total_s(name) / total * 1e6 for name in watch.ms}
    detail |= {"collector_share": sum(map(sum, watch.collector_ms.values())) / 1e3 / elapsed_s, "commands": step - 1}
    lookups_per_s = 1e9 / context.yardsticks.lookup_ns
    return [context.row(f"spills {total:,}", 2 * total / elapsed_s, "transitions/s", bar=200_000.0, more_is_better=True,
                        yardstick=(lookups_per_s, "x lookups/s"), detail=detail)]


def _acknowledge(command: SparseKVOffloadCommand, kind: AckKind) -> HiSparseWorkerOutput:
    mask = FULL_MASK if kind is AckKind.COMPLETED else 0
    return HiSparseWorkerOutput(rank=0, incarnation=INCARNATION, acks=tuple(
        TransferAck(incarnation=INCARNATION, rank=0, transfer_id=spill.id, kind=kind, row_mask=mask)
        for spill in command.spills))
