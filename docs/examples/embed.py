"""A decode loop around hisparse's parts, without Ray and without its engine: `python docs/examples/embed.py [cpu|cuda]`

Rows and selections are random. Wherever a selected row lies, resident, hot or on the host, it must be the row that was written.
"""

import sys

import torch

import hisparse.embedding as hs

TOP_K, CHUNK, PROMPT, OUTPUT = 32, 64, 448, 48


def main(device: str = "cpu") -> tuple[hs.ResolveStats, hs.CacheStats]:
    torch.manual_seed(0)
    shape = hs.ModelShape(model_type="mine", num_layers=4, num_heads=8, kv_lora_rank=48, rope_dim=16, index_head_dim=32,
                          top_k=TOP_K, max_positions=1024, vocab_size=1000,
                          index_groups=(hs.IndexGroup(leader=0, layers=(0, 1)), hs.IndexGroup(leader=2, layers=(2, 3))))
    config = hs.CacheConfig(block_size=16, device_blocks=144, host_pool_gib=0.002, hot_rows=64)
    setup = hs.CacheSetup(layout=hs.KVCacheLayout.build(shape, block_size=16), config=config, max_model_len=512,
                          max_seats=2, max_query_tokens=CHUNK)
    cache, rank, status = setup.manager(), setup.worker(device=device), hs.new_status(device)
    width = setup.layout.row.values
    written = torch.zeros(setup.max_seats, shape.num_layers, setup.max_model_len, width)  # what every row must be
    totals, step = hs.ResolveStats(), 0

    def run(*scheduled: tuple[str, int, int]) -> None:
        """One step of (request, first position, tokens): a chunk of one prompt, or a token of each request."""
        nonlocal totals, step
        step += 1
        rank.worker.start_step(cache.plan_step(step, scheduled))  # scheduler -> worker
        if scheduled:
            seats = torch.tensor([cache.seat(name) for name, _, tokens in scheduled for _ in range(tokens)])
            positions = torch.tensor([first + i for _, first, tokens in scheduled for i in range(tokens)])
            batch = hs.RowBatch.build(seats.tolist(), positions.tolist(), is_prefill=scheduled[0][2] > 1, device=device,
                                      status=status)
            for layer, handle in enumerate(rank.handles):
                rows = written[seats, layer, positions] = torch.randn(len(seats), width)  # your projections
                handle.append(rows.to(device), batch)
                if layer in (0, 2):  # your indexer; layers 1 and 3 follow
                    topk = (torch.randint(1 << 30, (len(seats), TOP_K)) % (positions[:, None] + 1)).int()
                found = handle.resolve(topk.to(device), batch)  # your attention reads found.rows[found.row_ids]
                expected = written[seats[:, None], layer, topk]
                assert torch.equal(found.gather().cpu(), expected), f"step {step}, layer {layer}: a row is not what was written"
        rank.worker.end_step()
        hs.check_status(status)  # waits for the device, as copying the sampled tokens would
        output = rank.worker.output()  # worker -> scheduler
        totals += output.stats
        cache.on_worker_output([output])
        cache.retire(step, {name: first + tokens for name, first, tokens in scheduled})

    for name, prompt in (("a", range(PROMPT)), ("b", range(1, PROMPT + 1))):
        cache.open(name, prompt, max_tokens=OUTPUT)
        while not cache.admit(name, cache.prefix(name), chunk_tokens=CHUNK):
            run()  # no room now: copies that complete make some
        for first in range(0, PROMPT, CHUNK):
            while not cache.allocate(name, CHUNK):
                run()
            run((name, first, CHUNK))
    for position in range(PROMPT, PROMPT + OUTPUT - 1):
        for name in ("a", "b"):
            cache.extend(name, [position])  # the token that was sampled
            while not cache.allocate(name, 1):
                run()
        run(("a", position, 1), ("b", position, 1))
    for name in ("a", "b"):
        cache.close(name)
    while cache.has_pending_work():
        run()
    stats = cache.stats()
    assert stats.device_blocks_free == stats.device_blocks_total and stats.host_blocks_free == stats.host_blocks_total
    cache.check()
    rank.worker.check()
    rank.worker.shutdown()
    return totals, stats


if __name__ == "__main__":
    rows, pages = main(*sys.argv[1:])
    print(f"selected rows: {rows.resident_rows:,} resident, {rows.hot_rows:,} hot, {rows.miss_rows:,} copied from the host, "
          f"{rows.prefill_host_rows:,} read there by prefill\npages: {rows.spilled_pages} spilled, {pages.pages_reused} reused")
