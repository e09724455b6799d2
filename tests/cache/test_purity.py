"""Queries change nothing, an engine without HiSparse does nothing of it, and equal calls give equal commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from hisparse.cache.coordinator import HiSparseCoordinator
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.config import CacheConfig
from hisparse.types import Landing, SparseKVOffloadCommand
from tests.cache.fake_worker import flat
from tests.cache.harness import Harness, Store, small_layout
from tests.cache.lives import live
from tests.cache.snapshot import snapshot

# ------------------------------------------------------------------------------------------- queries


def full_pool() -> Harness:
    """Every device block is taken or promised; copies are under way, pages are loose, an import is pending."""
    h = Harness(device_blocks=1 + 16 + 4 + 8 + 20, host_blocks=40, max_model_len=64, groups=2, seats=4, store=Store(6),
                hot_rows_max=24)
    h.add("old", list(range(30)), 1)
    h.run()
    for i in range(2):
        h.add(f"r{i}", [i * 100 + k for k in range(40)], 20)
    h.complete_each_step = False
    for _ in range(6):
        h.step()
    late = h.add("import", list(range(300, 308)), 4)
    h.admit(late, Landing.HOST, 8)
    h.add("hit", [*range(30), 7, 8], 4)
    h.add("big", list(range(400, 460)), 4)
    h.dispatch([])
    return h


def test_queries_on_a_full_pool_change_nothing() -> None:
    h = full_pool()
    m = h.manager
    answers = set()

    def ask() -> None:
        for name in ("hit", "big"):
            prefix = m.prefix(name)
            for landing in (None, *Landing):
                fit = m.fits(name, prefix, landing=landing, import_tokens=30 if landing else 0, chunk_tokens=8)
                answers.add((name, landing, fit))
        m.has_pending_work(), m.has_pending_reclamation(), m.overdue_transfers(), m.published_host_blocks()
        m.all_context_pages_resident(["r0"]), m.computed_tokens("r0"), m.seat("r0"), m.page_views("r0")

    ask()  # the last answer may be remembered
    before, stats = snapshot(m), m.stats()
    assert len(before) > 200, "the snapshot sees the whole state"
    for _ in range(1000):
        ask()
    assert len(answers) == 6 and any(not fit.now for *_, fit in answers)
    m.check()
    assert m.stats() == stats
    assert snapshot(m) == before


def test_the_snapshot_sees_every_change() -> None:
    h = full_pool()
    before = snapshot(h.manager)
    h.manager.core.counters.preemptions += 1
    assert snapshot(h.manager) != before
    h.manager.core.counters.preemptions -= 1
    assert snapshot(h.manager) == before
    h.manager.close("big")
    assert snapshot(h.manager) != before


@pytest.mark.parametrize("refused", ["admit", "allocate", "fork"])
def test_what_is_refused_changes_nothing(refused: str) -> None:
    h = full_pool()
    m = h.manager
    ballast = m.core.pool.allocate(m.core.pool.num_free)
    assert m.admit("big", m.prefix("big"), chunk_tokens=8) is None  # its prefix may be remembered
    before = snapshot(m)
    if refused == "admit":
        assert m.admit("big", m.prefix("big"), chunk_tokens=8) is None
    elif refused == "allocate":
        m.check()
        views = m.page_views("r1")
        assert not m.allocate("r1", 60 - len(h.reqs["r1"].tokens))
        assert m.page_views("r1") == views, "others may have been asked to go hot, it got nothing"
        return
    else:
        assert m.fork("r0", "child", max_tokens=4) is None
    assert snapshot(m) == before
    assert ballast is not None


# ------------------------------------------------------------------------------------------- off means off


def calls_during(action: Callable[[], None]) -> Counter[str]:
    """Functions of hisparse that were called, as module.function."""
    seen: Counter[str] = Counter()
    root = os.sep + "hisparse" + os.sep

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and root in frame.f_code.co_filename:
            seen[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return seen


def test_hisparse_off_makes_no_coordinator_no_command_and_no_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **more: object) -> None:
        raise AssertionError("made although HiSparse is off")

    for cls in (HiSparseCoordinator, SparseKVOffloadCommand):
        monkeypatch.setattr(cls, "__init__", forbidden)
    layout = small_layout(groups=2)
    manager = KVCacheManager(layout, CacheConfig(enabled=False, block_size=4, device_blocks=61), num_host_blocks=0,
                             max_model_len=40, max_seats=3, max_query_tokens=8, num_ranks=1)
    assert manager.coordinator is None and manager.published_host_blocks() == ()
    groups: set[int] = set()

    def run() -> None:
        for i in range(2):
            manager.open(f"r{i}", list(range(10)), max_tokens=20)
            assert manager.prefix(f"r{i}").tokens == 0
            assert manager.admit(f"r{i}", manager.prefix(f"r{i}"), chunk_tokens=8) is not None
        computed = 0
        for step, num in enumerate((8, 2, 1, 1, 1, 1, 1), 1):
            for i in range(2):
                assert manager.allocate(f"r{i}", num)
            assert manager.plan_step(step, [(f"r{i}", computed, num) for i in range(2)]) is None
            assert manager.last_command is None
            groups.update(update.group_id for update in flat(manager.take_table_updates(), manager.layout))
            computed += num
            manager.on_worker_output([])
            manager.retire(step, {f"r{i}": computed for i in range(2)})
            if computed >= 10:
                for i in range(2):
                    manager.extend(f"r{i}", [step])
            assert not manager.has_pending_work() and not manager.has_pending_reclamation()
            assert manager.overdue_transfers() == ()
        manager.preempt("r0")
        manager.free("r1")
        groups.update(update.group_id for update in flat(manager.take_table_updates(), manager.layout))

    called = calls_during(run)
    assert called, "the profiler saw something"
    modules = {name.split(".")[0] for name in called}
    assert not modules & {"coordinator", "spills", "publication", "mirrors", "fork"}
    assert groups == {layout.indexer.group_id, *(group.group_id for group in layout.residents)}
    manager.check()
    stats = manager.stats()
    assert stats.device_blocks_free == 60 and stats.host_blocks_total == stats.hot_blocks == stats.spills_planned == 0


def test_hisparse_off_the_connector_has_nothing_to_carry() -> None:
    from hisparse.connector.hisparse import HiSparseConnectorScheduler

    manager = KVCacheManager(small_layout(), CacheConfig(enabled=False, block_size=4, device_blocks=61), num_host_blocks=0,
                             max_model_len=40, max_seats=3, max_query_tokens=8, num_ranks=1)
    connector = HiSparseConnectorScheduler(manager)
    for step in range(1, 4):
        manager.plan_step(step, [])
        assert connector.build_metadata(step) is None
        manager.retire(step, {})
    assert not connector.has_pending_work()


# ------------------------------------------------------------------------------------------- determinism


def test_equal_calls_give_equal_commands() -> None:
    for seed in range(6):
        first, second = live(seed, 150, trace=True), live(seed, 150, trace=True)
        assert first.trace is not None and second.trace is not None
        assert first.trace.hexdigest() == second.trace.hexdigest()
        assert first.m.stats() == second.m.stats() and first.h.step_number > 0
    assert live(0, 150, trace=True).trace.hexdigest() != live(1, 150, trace=True).trace.hexdigest()  # type: ignore[union-attr]


def test_commands_do_not_depend_on_the_process() -> None:
    """Different hash seeds, different addresses of objects."""
    code = ("from tests.cache.lives import live\n"
            "print([live(seed, 150, trace=True).trace.hexdigest() for seed in range(4)], hash('x'))")
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root,
                         env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}) for seed in ("1", "2")]
    printed = [process.communicate(timeout=120)[0].rsplit(" ", 1) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert printed[0][0] == printed[1][0] and printed[0][1] != printed[1][1]


def test_an_id_that_comes_back_with_another_prompt_hits_its_own_pages() -> None:
    """The same id, the same number of pages, nothing published in between: only the tokens differ."""
    h = Harness(device_blocks=120, host_blocks=60)
    h.add("a", list(range(20)), 1)
    h.run()
    h.manager.open("r", list(range(20)), max_tokens=4)
    assert h.manager.prefix("r").host_pages == 5
    h.manager.close("r")
    h.manager.open("r", list(range(50, 70)), max_tokens=4)
    assert h.manager.prefix("r").host_pages == 0
    admission = h.manager.admit("r", h.manager.prefix("r"), chunk_tokens=8)
    assert admission is not None and admission.cached_tokens == 0
