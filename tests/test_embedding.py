"""The parts without Ray and without our engine: the example of docs/embedding.md, and the facade that it uses."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hisparse.embedding as hs
from hisparse.worker import SelectedRows

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "embed.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_setup(**changes: object) -> hs.CacheSetup:
    shape = hs.ModelShape(model_type="mine", num_layers=2, num_heads=2, kv_lora_rank=12, rope_dim=4, index_head_dim=8, top_k=4,
                          max_positions=64, vocab_size=32, index_groups=(hs.IndexGroup(leader=0, layers=(0, 1)),))
    config = hs.CacheConfig(block_size=4, device_blocks=64, hot_rows=8, host_pool_gib=0.001)
    values = {"layout": hs.KVCacheLayout.build(shape, block_size=4), "config": config, "max_model_len": 32, "max_seats": 2,
              "max_query_tokens": 8}
    return hs.CacheSetup(**(values | changes))  # type: ignore[arg-type]


# ---- the example
def test_the_example_reads_back_what_it_wrote_from_every_tier() -> None:
    rows, pages = load_example().main("cpu")
    assert rows.resident_rows and rows.hot_rows and rows.miss_rows and rows.prefill_host_rows
    assert rows.spilled_pages and rows.mirrored_rows, "nothing was written back"
    assert pages.hot_required and pages.pages_reused, "no request was pushed out of device memory"


def test_the_example_notices_a_row_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = sys.modules["hisparse.ops.reference.resolve"]
    monkeypatch.setattr(resolve, "replay", lambda *arguments: None)  # misses of leaders are not copied
    with pytest.raises(AssertionError, match="a row is not what was written"):
        load_example().main("cpu")


def test_the_example_needs_neither_ray_nor_our_engine() -> None:
    ours = [f"hisparse.{part}" for part in ("engine", "actors", "serve", "pd")]
    forbidden = ["ray", "nixl", "transformers", "fastapi", *ours]
    program = (f"import runpy, sys; sys.modules.update(dict.fromkeys({forbidden})); "
               f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')")
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert re.search(r"[1-9][\d,]* resident, [1-9][\d,]* hot, [1-9][\d,]* copied", result.stdout), result.stdout


def test_the_example_is_short_and_uses_the_facade_only() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 75, f"{len(lines)} lines: an example is read at a glance"
    assert {name for name in re.findall(r"\bhs\.(\w+)", EXAMPLE.read_text())} <= set(hs.__all__)
    assert re.findall(r"^\s*(?:from|import) (\S+)", EXAMPLE.read_text(), re.M) == ["sys", "torch", "hisparse.embedding"]


def guide_blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "docs" / "embedding.md").read_text(), re.S)


def test_the_guide_quotes_the_example() -> None:
    quoted = [line.strip() for block in guide_blocks("python") for line in block.splitlines()]
    example = [line.strip() for line in EXAMPLE.read_text().splitlines()]
    assert len(quoted) > 8
    for line in quoted:
        assert line in example, f"docs/embedding.md quotes a line that is not in the example: {line}"


def test_the_resolver_alone_runs_as_shown() -> None:
    (snippet,) = guide_blocks("python run")
    exec(compile(snippet, "embedding.md", "exec"), {})


# ---- the facade
def test_every_name_is_there_and_explained() -> None:
    guide = (ROOT / "docs" / "embedding.md").read_text()
    assert hs.__all__ == sorted(hs.__all__, key=lambda name: (name.islower(), name))
    for name in hs.__all__:
        assert getattr(hs, name) is not None
        assert f"`{name}" in guide, f"docs/embedding.md does not name {name}"
    with pytest.raises(AttributeError, match="no_such_name"):
        hs.no_such_name  # noqa: B018


def test_the_scheduler_half_needs_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
import pickle
from hisparse.embedding import CacheConfig, CacheSetup, IndexGroup, KVCacheLayout, ModelShape
shape = ModelShape(model_type="mine", num_layers=2, num_heads=2, kv_lora_rank=12, rope_dim=4, index_head_dim=8, top_k=4,
                   max_positions=64, vocab_size=32, index_groups=(IndexGroup(leader=0, layers=(0, 1)),))
setup = CacheSetup(layout=KVCacheLayout.build(shape, block_size=4), max_model_len=32, max_seats=2, max_query_tokens=8,
                   config=CacheConfig(block_size=4, device_blocks=64, hot_rows=8, host_pool_gib=0.001))
cache = pickle.loads(pickle.dumps(setup)).manager()
cache.open("a", range(8), max_tokens=4)
assert cache.admit("a", cache.prefix("a"), chunk_tokens=8).seat == 0 and cache.allocate("a", 8)
command = cache.plan_step(1, [("a", 0, 8)])
assert pickle.loads(pickle.dumps(command)) == command and len(command.new_device_blocks.ids) >= 4
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_both_halves_get_the_same_sizes() -> None:
    setup = pickle.loads(pickle.dumps(small_setup()))
    cache, rank = setup.manager(), setup.worker()
    try:
        stats = cache.stats()
        assert rank.host_pool is not None and rank.worker is not None
        assert stats.host_blocks_total == rank.host_pool.num_blocks - 1 == setup.num_host_blocks - 1
        assert stats.device_blocks_total == rank.cache.num_blocks - 1 == setup.config.device_blocks - 1
        assert rank.tables.max_seats == setup.max_seats and rank.worker.incarnation == setup.incarnation
    finally:
        rank.worker.shutdown()
    assert small_setup().incarnation != small_setup().incarnation, "two starts of the workers must be told apart"


def test_sizes_that_do_not_fit_are_refused_with_the_fix() -> None:
    setup = small_setup()
    with pytest.raises(hs.ConfigError, match=r"pages of 4 tokens, config\.block_size is 8; build the layout"):
        small_setup(config=setup.config.model_copy(update={"block_size": 8}))
    with pytest.raises(hs.ConfigError, match="raise host_pool_gib"):
        small_setup(max_model_len=1 << 16)
    with pytest.raises(hs.ConfigError, match="cannot hold one request"):
        small_setup(config=setup.config.model_copy(update={"device_blocks": 8})).manager()
    with pytest.raises(hs.ConfigError, match=r"2 ranks share a host pool: make it with HostPool\.shared"):
        dataclasses.replace(setup, num_ranks=2).worker()


def test_ranks_share_a_pool(tmp_path: Path) -> None:
    setup = small_setup(num_ranks=2)
    owner = hs.HostPool.shared(setup.layout, setup.num_host_blocks, tmp_path / "pool")
    ranks = [setup.worker(rank=rank, host_pool=hs.HostPool.attach(setup.layout, setup.num_host_blocks, tmp_path / "pool"))
             for rank in range(2)]
    assert [rank.is_writer for rank in ranks] == [True, False]
    for rank in ranks:
        assert rank.worker is not None
        rank.worker.shutdown()
    owner.close()
    owner.unlink()


# ---- batches, and rows for an attention of one's own
def test_a_decode_batch_is_so_many_rows_of_each_of_its_seats() -> None:
    assert hs.RowBatch.build([3, 3, -1, -1, 1, 1], [5, 6, 0, 0, 8, 9], rows_per_request=2).num_rows == 6
    for seats, rows, message in (
        ([3, -1, 1, 3, -1], 1, r"takes 1 row of a seat, got several requests of seats \[3\]; .* rows_per_request"),
        ([3, 3, 1, 1, 3, 3], 2, r"takes 2 rows of a seat, got several requests of seats \[3\]"),
        ([3, 1, 1, 3], 2, r"the 2 rows of a request must share a seat .*, got seats \[3, 1\]"),
        ([3, -1], 2, r"must share a seat .*, got seats \[3, -1\]"),
        ([3, 3, 1], 2, "3 rows are no multiple of rows_per_request = 2"),
        ([3], 0, "no multiple of rows_per_request = 0"),
    ):
        with pytest.raises(hs.InvariantError, match=message):
            hs.RowBatch.build(seats, range(len(seats)), rows_per_request=rows)


def test_a_batch_is_checked_in_time_that_grows_with_its_rows() -> None:
    """An engine builds one in each step."""
    compared = []

    class Seat(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return int(self) == other

    seats = [Seat(seat) for seat in range(500)]
    assert hs.RowBatch.build(seats, range(500)).num_rows == 500
    assert len(compared) < 10 * len(seats)


def test_gather_takes_each_entry_from_its_tier() -> None:
    nan = float("nan")
    device, host = torch.tensor([[nan, nan], [1.0, 2.0], [nan, nan]]), torch.tensor([[nan, nan], [3.0, 4.0]])
    row_ids, host_ids = torch.tensor([[1, -1, -1]], dtype=torch.int32), torch.tensor([[-1, 1, -1]], dtype=torch.int32)
    got = SelectedRows(rows=device, row_ids=row_ids, host_rows=host, host_ids=host_ids).gather()
    assert got.tolist() == [[[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]], "a row that nobody selected must not be read"
    packed = SelectedRows(rows=torch.tensor([[7, 8]], dtype=torch.uint8), row_ids=torch.tensor([[-1, 0]])).gather()
    assert packed.dtype == torch.uint8 and packed.tolist() == [[[0, 0], [7, 8]]]


def test_a_reported_error_is_raised_and_the_cpu_has_no_word() -> None:
    assert hs.new_status("cpu") is None
    hs.check_status(None)
    hs.check_status(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(hs.InvariantError, match="neither resident nor on the host.*seat 3, position 130"):
        hs.check_status(torch.tensor([1, 3, 130, 0], dtype=torch.int32))


# ---- what the guide promises of the calls
class Loop:
    """The smallest engine: rows are random, every row that a batch could select is compared."""

    def __init__(self, setup: hs.CacheSetup, host_pool: hs.HostPool | None = None,
                 store: hs.IndexerStore | None = None) -> None:
        self.setup, self.cache = setup, setup.manager(indexer_offload=store)
        self.rank = setup.worker(host_pool=host_pool)
        shape = setup.layout.shape
        self.rows: dict[str, torch.Tensor] = {}
        self._shape = (shape.num_layers, setup.max_model_len, setup.layout.row.values)
        self.step = 0

    def run(self, name: str | None = None, first: int = 0, tokens: int = 0, *, writes: bool = True,
            plain: bool = False) -> None:
        self.step += 1
        assert self.rank.worker is not None
        self.rank.worker.start_step(self.cache.plan_step(self.step, [(name, first, tokens)] if name is not None else []))
        if name is not None:
            truth = self.rows.setdefault(name, torch.zeros(self._shape))
            batch = hs.RowBatch.build([self.cache.seat(name)] * tokens, range(first, first + tokens), writes=writes,
                                      is_prefill=tokens > 1, plain_tables=plain)
            topk = torch.arange(self.setup.layout.shape.top_k).repeat(tokens, 1)
            seen = topk <= batch.positions[:, None]
            for layer, handle in enumerate(self.rank.handles):
                rows = torch.randn(tokens, self._shape[2])
                if writes:
                    truth[layer, first : first + tokens] = rows
                handle.append(rows, batch)
                assert torch.equal(handle.resolve(topk, batch).gather(), truth[layer, topk] * seen[..., None])
        self.rank.worker.end_step()
        self.cache.on_worker_output([self.rank.worker.output()])
        self.cache.retire(self.step, {name: first + tokens} if name is not None else {})

    def drain(self) -> None:
        while self.cache.has_pending_work():
            self.run()
        self.cache.check()


def test_a_full_hit_replays_its_last_token_and_writes_nothing() -> None:
    loop = Loop(small_setup())
    loop.cache.open("a", range(8), max_tokens=4)
    assert loop.cache.admit("a", loop.cache.prefix("a"), chunk_tokens=8) and loop.cache.allocate("a", 8)
    loop.run("a", 0, 8)
    loop.cache.close("a")
    loop.drain()
    loop.rows["b"] = loop.rows["a"]
    loop.cache.open("b", range(8), max_tokens=4)
    admission = loop.cache.admit("b", loop.cache.prefix("b"), chunk_tokens=1)
    assert admission is not None and admission.cached_tokens == 8
    assert loop.cache.allocate("b", 1)
    loop.run("b", 7, 1, writes=False)
    loop.cache.extend("b", [99])
    assert loop.cache.allocate("b", 1)
    loop.run("b", 8, 1)
    salted = hs.ExtraKeys(cache_salt="another tenant")
    loop.cache.open("c", range(8), max_tokens=4, extra_keys=salted)
    assert loop.cache.prefix("c").tokens == 0


def test_plain_tables_serve_a_context_that_is_resident() -> None:
    loop = Loop(small_setup())
    loop.cache.open("a", range(6), max_tokens=4)
    assert loop.cache.admit("a", loop.cache.prefix("a"), chunk_tokens=6) and loop.cache.allocate("a", 6)
    assert loop.cache.all_context_pages_resident(["a"])
    loop.run("a", 0, 6, plain=True)
    loop.cache.extend("a", [50])
    assert loop.cache.allocate("a", 1) and loop.cache.all_context_pages_resident(["a"])
    loop.run("a", 6, 1, plain=True)


class Shelf:
    """A store of indexer pages that has them at once; no test here looks at their bytes."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def hit(self, keys: Sequence[bytes], first_page: int) -> int:
        return sum(1 for _ in itertools.takewhile(self.keys.__contains__, keys[first_page:]))

    def plan_store(self, key: bytes, device_block: int) -> bool:
        self.keys.add(key)
        return False


@pytest.mark.parametrize("store", [None, Shelf()], ids=["no store", "store"])
def test_a_rank_that_was_replaced_serves_the_requests_again(tmp_path: Path, store: Shelf | None) -> None:
    setup = small_setup()
    pool = hs.HostPool.shared(setup.layout, setup.num_host_blocks, tmp_path / "pool")
    loop = Loop(setup, hs.HostPool.attach(setup.layout, setup.num_host_blocks, tmp_path / "pool"), store)
    loop.cache.open("a", range(8), max_tokens=4)
    assert loop.cache.admit("a", loop.cache.prefix("a"), chunk_tokens=8) and loop.cache.allocate("a", 8)
    loop.run("a", 0, 8)
    loop.drain()
    for key, block in loop.cache.take_sealed_indexer_pages() if store else ():
        assert store is not None and not store.plan_store(key, block)
        loop.cache.unpin_indexer([block])
    again = dataclasses.replace(setup, incarnation=setup.incarnation + 1)
    loop.cache.worker_lost(again.incarnation)
    loop.rank = again.worker(host_pool=hs.HostPool.attach(setup.layout, setup.num_host_blocks, tmp_path / "pool"))
    prefix = loop.cache.prefix("a")
    admission = loop.cache.admit("a", prefix, chunk_tokens=8)
    assert admission is not None
    if store is None:
        assert prefix.tokens == 0, "indexer pages were on the device and nowhere else"
        assert loop.cache.allocate("a", 8)
        loop.run("a", 0, 8)
    else:
        assert prefix.tokens == 8 and len(admission.indexer_keys) == 2
        assert loop.cache.finish_load("a", failed=False) == 8
        assert loop.cache.allocate("a", 1)
        loop.run("a", 7, 1, writes=False)  # its rows are on the host only, and still those that were written
    loop.cache.close("a")
    loop.drain()
    pool.close()
    pool.unlink()
