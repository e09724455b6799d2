"""Reported failures of other systems that are about page keys, and about tables that must grow together. Labels as in the
list of scenarios."""

from __future__ import annotations

import os
import subprocess
import sys

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.prefix import ExtraKeys
from hisparse.config import CacheConfig
from hisparse.types import Landing
from tests.cache.harness import Harness, hot_region, page_keys, small_layout

# ----------------------------------------------------------------------------------------------------------- B23


def test_b23_another_tenant_never_hits() -> None:
    """Adapter "X" without salt, then no adapter with salt "X", same 64 tokens: different keys, 0 hits."""
    tokens = list(range(64))
    h = Harness(device_blocks=100, host_blocks=40, block_size=64, hot_rows=64, max_model_len=128, chunk=64)
    h.add("x", tokens, 1, ExtraKeys(lora_id="X"))
    keys = {page_keys(h.manager, "x")[0]}
    h.run()
    for i, extra in enumerate([ExtraKeys(cache_salt="X"), ExtraKeys(), ExtraKeys(multimodal_hash="X"), ExtraKeys(lora_id="")]):
        h.manager.open(f"q{i}", tokens, extra_keys=extra, max_tokens=1)
        assert h.manager.prefix(f"q{i}").tokens == 0
        keys.add(page_keys(h.manager, f"q{i}")[0])
    h.manager.open("same", tokens, extra_keys=ExtraKeys(lora_id="X"), max_tokens=1)
    assert h.manager.prefix("same").tokens == 64 and len(keys) == 5
    assert h.manager.stats().prefix_hit_tokens == 0


def test_b23_keys_of_four_processes_started_separately_are_equal() -> None:
    """Without extra keys, each process with a hash seed of its own (one random): every rank hits what another stored."""
    code = ("from hisparse.cache.prefix import ExtraKeys, PageKeys, root_key\n"
            "keys = PageKeys(64, root_key('layout', ExtraKeys()))\n"
            "keys.extend(range(0, 640, 2)); print(b''.join(keys.keys).hex(), hash('x'))")
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                         env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("0", "1", "77", "random")]
    printed = [process.communicate(timeout=60)[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({keys for keys, _ in printed}) == 1 and len(printed[0][0]) == 5 * 64
    assert len({seed for _, seed in printed}) >= 3, "they do hash strings differently"


def test_b23_a_hit_after_a_restart_of_the_workers() -> None:
    h = Harness(device_blocks=100)
    h.add("a", list(range(16)), 1)
    h.drain()
    hosts = [worker.host for worker in h.writers]
    h.manager.worker_lost(77)
    h.workers = h.new_workers(77, hosts)
    h.add("b", [*range(16), 5], 3)
    assert h.manager.prefix("b").tokens == 0, "without a store, indexer pages went with the device"
    h.drain()
    h.add("c", [*range(16), 5], 3)
    assert h.manager.prefix("c").tokens == 16
    h.drain()


def test_b23_managers_of_one_layout_have_equal_keys_and_of_another_layout_none() -> None:
    """Also vllm #55904: keys cover the layout, so that no page of another stride or row type is ever loaded."""
    def keys(groups: int, dtype: str, incarnation: int) -> list[bytes]:
        layout = small_layout(groups=groups, dtype=dtype)
        manager = KVCacheManager(
            layout, CacheConfig(block_size=4, device_blocks=64, hot_rows=8, hot_rows_max=8), num_host_blocks=32,
            max_model_len=32, max_seats=1, max_query_tokens=8, num_ranks=1, incarnation=incarnation)
        manager.open("r", list(range(32)), max_tokens=1)
        return page_keys(manager, "r")

    assert keys(2, "float32", 0) == keys(2, "float32", 1) and len(keys(2, "float32", 0)) == 8
    assert not set(keys(2, "float32", 0)) & (set(keys(1, "float32", 0)) | set(keys(2, "bfloat16", 0)))


# ------------------------------------------------------------------------------------------- further reports


def test_sglang_23239_a_region_that_grows_from_32_to_64_rows_grows_in_every_table() -> None:
    """Block table, row count and slot tags of every hot group agree in each command, and the new slots are used."""
    h = Harness(groups=3, device_blocks=600, host_blocks=80, max_model_len=200, hot_rows=32, hot_rows_max=64, chunk=8)
    req = h.add("a", [i % 97 for i in range(160)], 30)
    assert h.admit(req, Landing.HOST, 160) is not None
    h.dispatch([])
    h.retire([])
    h.finish_load("a")
    sizes = []
    for _ in range(14):
        h.step()
        for group, hot in enumerate(h.layout.hots):
            table = h.worker.tables[hot.group_id, req.seat]
            assert h.worker.hot_rows[req.seat, group] == len(table) * 4 and all(table)
            assert set(h.worker.tags[req.seat, group].values()) == set(h.worker.slots[req.seat, group])
        sizes.append(h.worker.hot_rows[req.seat, 0])
    assert sizes[0] == 32 and sizes[-1] == 64 and sorted(sizes) == sizes
    assert [len(blocks) for blocks in hot_region(h.manager, "a")] == [16, 16, 16]
    assert h.worker.highest_slot == 63
    assert all(len(h.worker.slots[req.seat, group]) == 64 for group in range(3))
    h.drain()
