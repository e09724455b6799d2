"""Reported failures of other systems that are about who may touch a block until when. Labels as in the list of scenarios."""

from __future__ import annotations

import pytest

from hisparse.errors import InvariantError
from hisparse.types import Landing
from tests.cache.harness import Harness, Store, page_keys


def free_blocks(h: Harness) -> tuple[int, int]:
    stats = h.manager.stats()
    return stats.device_blocks_free, stats.host_blocks_free


# ----------------------------------------------------------------------------------------------------------- B17


@pytest.mark.parametrize("order", ["recv-send", "send-recv", "together", "recv-before-abort"])
def test_b17_blocks_come_back_after_the_last_of_two_pending_transfers_exactly_once(order: str) -> None:
    """A host pool of 8 blocks, R holds 4: an import of two pages is pending, and spills of two pages of its earlier
    admission. Each transfer pins what it touches until it ends; the last one brings the pool back to 8, once."""
    h = Harness(groups=1, device_blocks=60, host_blocks=9, max_model_len=28)
    total = free_blocks(h)
    assert total[1] == 8
    h.complete_each_step = False
    req = h.add("r", list(range(8)), 8)
    h.step()
    assert h.manager.stats().transfers_in_flight == 2
    h.preempt(req)
    assert free_blocks(h)[1] == 6, "the copies hold two pages"
    assert h.admit(req, Landing.RESIDENT, 8) is not None
    assert free_blocks(h)[1] == 4
    h.dispatch([])
    h.manager.retire(h.step_number, {})

    def recv() -> None:
        h.imports.pop("r", None)
        assert h.manager.finish_load("r", failed=False) == 0

    def send() -> None:
        h.worker.complete_all()
        h.manager.on_worker_output([h.worker.output()])

    if order == "recv-before-abort":
        h.finish_load("r")
    h.finish(req, finished=False)
    assert free_blocks(h)[1] == (6 if order == "recv-before-abort" else 4)
    actions = {"recv-send": (recv, send), "send-recv": (send, recv), "together": (recv, send),
               "recv-before-abort": (send,)}[order]
    for i, action in enumerate(actions):
        assert free_blocks(h)[1] == 8 - 2 * (len(actions) - i)
        action()
        h.manager.check()
    assert free_blocks(h) == total
    late = h.manager.stats().late_completions
    assert h.manager.finish_load("r", failed=False) == 0
    assert h.manager.stats().late_completions == late + 1 and free_blocks(h) == total, "ignored and counted"
    assert h.manager.stats().host_pages_published == 0 and not h.manager.has_pending_work()


# ----------------------------------------------------------------------------------------------------------- B18


@pytest.mark.parametrize("landing", Landing)
def test_b18_a_hundred_aborted_imports_leak_nothing(landing: Landing) -> None:
    """A host pool of 64, imports of 4 blocks aborted half-way, whose completions come 3 steps later: nothing is retained,
    and the 17th request (16 leaks of 4 would block it) is admitted like every other."""
    h = Harness(groups=1, device_blocks=400, host_blocks=65, max_model_len=64, seats=4)
    total = free_blocks(h)
    assert total[1] == 64
    due: dict[int, list[str]] = {}
    for i in range(100):
        req = h.add(f"r{i}", [i * 16 + k for k in range(16)], 1)
        assert h.admit(req, landing, 16) is not None, f"request {i} is not admitted"
        h.dispatch([])
        h.manager.retire(h.step_number, {})
        h.worker.land(h.imports[req.request_id], 8)
        h.finish(req, finished=False)
        h.worker.land(h.imports.pop(req.request_id), 12)
        due.setdefault(i + 3, []).append(req.request_id)
        for name in due.pop(i, []):
            assert h.manager.finish_load(name, failed=i % 2 == 0) == 0
        assert free_blocks(h)[1] >= 64 - 4 * 4
    assert h.manager.has_pending_work()
    for names in due.values():
        for name in names:
            h.manager.finish_load(name, failed=False)
    h.manager.check()
    stats = h.manager.stats()
    assert free_blocks(h) == total and not h.manager.has_pending_work()
    assert (stats.late_completions, stats.requests_open, stats.requests_admitted, stats.loads_in_flight) == (100, 0, 0, 0)


# ----------------------------------------------------------------------------------------------------------- B19


def test_b19_a_block_of_a_dispatched_step_goes_to_no_import_before_that_step_retires() -> None:
    """Step N + 1 is dispatched, the output of N finishes A, and B's import could only land in A's blocks."""
    h = Harness(groups=1, device_blocks=1 + 16 + 10, host_blocks=40, max_model_len=40, seats=4, hot_rows=4)
    a = h.add("a", list(range(30)), 8)
    for _ in range(4):
        h.step()
    chosen = h.schedule()
    h.dispatch(chosen)  # step N + 1, still running on the device
    blocks = {block for view in h.manager.page_views("a") for block in (view.indexer, *view.resident)}
    h.manager.free("a")
    a.state = "gone"
    b = h.add("b", list(range(100, 136)), 2)
    prefix = h.manager.prefix("b")
    assert h.manager.fits("b", prefix, landing=Landing.HOST, import_tokens=36, chunk_tokens=1).now
    assert h.admit(b, Landing.HOST, 36) is None, "the only free blocks are those the dispatched step may touch"
    h.manager.on_worker_output([h.worker.output()])
    h.worker.complete_all()
    h.manager.on_worker_output([h.worker.output()])
    assert h.admit(b, Landing.HOST, 36) is None, "it has not retired yet"
    h.manager.retire(h.step_number, {"a": a.computed + 1})
    admission = h.admit(b, Landing.HOST, 36)
    assert admission is not None and admission.import_target is not None
    target = admission.import_target.pages
    assert blocks & {*target.indexer_blocks, *(block for group in target.resident_blocks for block in group)}
    del h.reqs["a"]
    while b.computed < 37:
        h.step()  # compares every row that B reads with the imported one
    h.drain()


def test_b19_step_n_finishes_a_request_whose_step_n_plus_1_is_on_its_way() -> None:
    """Both steps are A's. B's import gets A's blocks once N + 1 has retired, and its rows are the imported ones."""
    h = Harness(groups=1, device_blocks=1 + 16 + 10, host_blocks=40, max_model_len=40, seats=4, hot_rows=4)
    a = h.add("a", list(range(30)), 8)
    for _ in range(4):
        h.step()
    first = a.computed
    h.dispatch(h.schedule())  # step N
    n = h.step_number
    assert h.manager.allocate("a", 1)
    later = h.manager.plan_step(n + 1, [("a", first + 1, 1)])
    assert later is not None
    h.worker.receive(later)  # step N + 1 runs later
    h.step_number = n + 1
    h.manager.on_worker_output(h.outputs())
    h.manager.retire(n, {"a": first + 1})
    a.tokens.append(77)
    h.manager.extend("a", [77])
    blocks = {block for view in h.manager.page_views("a") for block in (view.indexer, *view.resident)}
    seat = a.seat
    h.finish(a)
    b = h.add("b", list(range(100, 136)), 2)
    assert h.admit(b, Landing.HOST, 36) is None, "N + 1 may still write A's blocks"
    h.worker.start(later)
    h.worker.write(seat, first + 1, a.rows(first + 2)[first + 1 :])
    h.worker.end()
    h.worker.complete_all()
    h.manager.on_worker_output(h.outputs())
    assert h.admit(b, Landing.HOST, 36) is None, "it ran, but its output is not back"
    h.manager.retire(n + 1, {})
    admission = h.admit(b, Landing.HOST, 36)
    assert admission is not None and admission.import_target is not None
    target = admission.import_target.pages
    assert blocks & {*target.indexer_blocks, *(block for group in target.resident_blocks for block in group)}
    h.manager.check()
    while b.computed < 37:
        h.step()
    h.drain()


def test_b19_host_blocks_of_an_aborted_request_wait_for_its_dispatched_step() -> None:
    h = Harness(groups=1, device_blocks=100, host_blocks=20, max_model_len=40)
    req = h.add("a", list(range(10)), 8)
    total = h.manager.stats().host_blocks_total
    chosen = h.schedule()
    h.dispatch(chosen)
    h.finish(req, finished=False)
    assert h.manager.stats().host_blocks_free == total - 2, "step 1 mirrors rows into them"
    assert h.manager.has_pending_work()
    h.worker.complete_all()
    h.manager.on_worker_output([h.worker.output()])
    assert h.manager.stats().host_blocks_free < total
    h.manager.retire(h.step_number, {})
    assert h.manager.stats().host_blocks_free == total


def test_b19_readmission_with_a_pending_spill_does_not_inherit_it() -> None:
    h = Harness(groups=1, device_blocks=100, host_blocks=40, max_model_len=40)
    req = h.add("a", list(range(16)), 8)
    h.complete_each_step = False
    h.step()
    assert h.manager.stats().transfers_in_flight == 2
    old = {view.host for view in h.manager.page_views("a")[:2]}
    h.preempt(req)
    h.step()
    assert req.state == "running" and h.manager.stats().prefix_hit_tokens == 0
    assert not old & {view.host for view in h.manager.page_views("a")}
    h.worker.complete_all(h.rng)
    h.manager.on_worker_output([h.worker.output()])
    h.manager.check()
    assert h.manager.stats().spills_completed >= 2
    assert not old & set(h.manager.published_host_blocks()), "the earlier admission's copies publish nothing"
    h.complete_each_step = True
    h.drain()


# ------------------------------------------------------------------------------------------- further reports


def test_vllm_50297_a_request_preempted_in_its_last_step_cannot_be_handed_over() -> None:
    """P must not lease an empty block list: there is nothing to hold, which is an error and no empty prefix."""
    h = Harness(groups=1, device_blocks=100)
    req = h.add("p", list(range(10)), 1)
    h.step()
    chosen = h.schedule()
    h.dispatch(chosen)
    h.preempt(req)
    h.worker.complete_all()
    h.manager.on_worker_output([h.worker.output()])
    h.manager.retire(h.step_number, {})
    with pytest.raises(InvariantError, match="holds nothing: it was not admitted, or was freed"):
        h.manager.hold("p")
    h.drain()


@pytest.mark.parametrize("landing", Landing)
def test_vllm_53250_a_preempted_import_resumes_from_the_host_and_asks_no_peer_again(landing: Landing) -> None:
    h = Harness(groups=1, device_blocks=100, host_blocks=40)
    req = h.add("d", list(range(18)), 8)
    h.admit(req, landing, 18)
    for _ in range(4):
        h.step()
    h.preempt(req)
    hit = h.manager.prefix("d")
    assert hit.tokens == 20, "every sealed page, imported or written here, is on the host"
    admission = h.manager.admit("d", hit, landing=landing, import_tokens=18, chunk_tokens=8)
    assert admission is not None and admission.import_target is None, "nothing is left to import"
    assert h.manager.stats().imports_started == 1 and h.manager.computed_tokens("d") == 20
    h.manager.preempt("d")
    h.drain()


def test_vllm_36052_pages_written_while_decoding_are_offered_to_the_store_each_once() -> None:
    """The cursor of what was offered never passes a page whose tokens are not known yet."""
    offered: list[bytes] = []

    class Recorder(Store):
        def plan_store(self, key: bytes, device_block: int) -> bool:
            offered.append(key)
            return super().plan_store(key, device_block)

    h = Harness(groups=1, device_blocks=100, host_blocks=40, store=Recorder())
    req = h.add("r", list(range(6)), 20)
    keys: list[bytes] = []
    while "r" in h.reqs:
        h.step()
        keys = page_keys(h.manager, "r") if "r" in h.reqs else keys
        assert len(offered) == (req.computed if "r" in h.reqs else 25) // 4
    assert offered == keys[:6] and len(set(offered)) == 6
    h.drain()
