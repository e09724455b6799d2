"""What HiSparse costs while everything is resident: decode steps with mirroring, against the same engine with HiSparse off.

GLM-5.2's shapes with random bfloat16 weights (dense MLP of width 2,048, a few experts in the last layer), one captured graph
a batch size. A step is what a rank does: the worker's command (mirrors of all seats; with HiSparse off its tables stay), the
graph, the worker's output, the wait for the tokens. Both engines take turns, so that drift hits both. Exit code 1 with --check
if a bar is missed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from hisparse.bench import report
from hisparse.bench.catalogue import need_gpu
from hisparse.bench.progress import Progress
from hisparse.config import CacheConfig
from hisparse.engine.model_runner import ModelRunner
from hisparse.engine.models.experts import use_capturable_experts
from hisparse.engine.models.hf import DSAModel
from hisparse.engine.models.norms import use_fused_norms
from hisparse.layout import KVCacheLayout, ModelShape
from hisparse.types import MirrorSpan, ScheduledChunk, SparseKVOffloadCommand
from hisparse.worker import HostPool, WorkerParts, build_worker

CASES = ((1, 32_768, 0.01), (16, 8192, 0.01), (256, 1024, 0.03))
"""Batch, context (two engines must fit beside the weights), bar."""
ROUNDS, STEPS = 9, 10


def glm(layers: int) -> tuple[Any, ModelShape]:
    """The network on the GPU, and its shape: index groups as in GLM-5.2 (full, full, full, then one of four)."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    kinds = ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(layers)]
    config = GlmMoeDsaConfig(
        vocab_size=4096, hidden_size=6144, intermediate_size=2048, moe_intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=64, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=512, q_lora_rank=2048, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256,
        index_topk=2048, index_head_dim=128, index_n_heads=32, mlp_layer_types=["dense"] * (layers - 1) + ["sparse"],
        max_position_embeddings=200_000, indexer_types=kinds)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        network = GlmMoeDsaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    for layer in network.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.weights_proj.float()
    use_capturable_experts(network, torch.bfloat16)
    use_fused_norms(network)
    return network, ModelShape.from_hf_config({**config.to_dict(), "architectures": ["GlmMoeDsaForCausalLM"]})


@dataclass
class Engine:
    """One rank's parts and graph; every page of every seat is resident."""

    parts: WorkerParts
    runner: ModelRunner
    batch: int
    context: int
    steps: int = 0

    @classmethod
    def build(cls, network: Any, shape: ModelShape, batch: int, context: int, *, enabled: bool) -> Engine:
        layout = KVCacheLayout.build(shape, dtype="bfloat16")
        pages = context // layout.block_size
        blocks = batch * pages * (1 + layout.num_resident_groups) + 2
        config = CacheConfig(enabled=enabled, device_blocks=blocks)
        host_blocks = 2 * batch + 2
        pool = HostPool.private(layout, host_blocks) if enabled else None
        parts = build_worker(layout, config, num_device_blocks=blocks, num_host_blocks=host_blocks, max_seats=batch,
                             max_model_len=context, rank=0, num_ranks=1, incarnation=1, host_pool=pool, device="cuda",
                             poison=False)
        parts.cache.bytes.zero_()
        ids, at = torch.randperm(blocks - 1, device="cuda", dtype=torch.int32) + 1, 0
        for table in (parts.tables.indexer, *(parts.tables.resident(g) for g in range(layout.num_resident_groups))):
            table.copy_(ids[at : at + batch * pages].view(batch, pages))
            at += batch * pages
        model = DSAModel(network, shape, parts.handles, parts.indexer)
        runner = ModelRunner(model, max_seats=batch, max_model_len=context, has_host=enabled)
        assert runner._graphs is not None
        runner._graphs._sizes = (batch,)
        runner._graphs.capture_all()
        return cls(parts=parts, runner=runner, batch=batch, context=context)

    def step(self) -> float:
        """Seconds."""
        position = self.context - 60 + self.steps % 50
        chunks = [ScheduledChunk(request_id=str(i), seat=i, first_position=position, token_ids=(5,), sample=True,
                                 plain_tables=True) for i in range(self.batch)]
        page = position // 64
        command = SparseKVOffloadCommand(step=self.steps + 1, mirrors=tuple(
            MirrorSpan(seat=i, first_page=page, host_blocks=(1 + 2 * i,)) for i in range(self.batch)))
        self.steps += 1
        torch.cuda.synchronize()
        start = time.perf_counter()
        if self.parts.worker is not None:
            self.parts.worker.start_step(command)
        out = self.runner.run(chunks)
        if self.parts.worker is not None:
            self.parts.worker.end_step()
            self.parts.worker.output()
        out.take()
        return time.perf_counter() - start


def measure(layers: int, progress: Progress) -> list[report.Row]:
    progress.expect(len(CASES))
    network, shape = glm(layers)
    rows = []
    for batch, context, bar in CASES:
        engines = {enabled: Engine.build(network, shape, batch, context, enabled=enabled) for enabled in (False, True)}
        times: dict[bool, list[float]] = {False: [], True: []}
        for engine in engines.values():
            for _ in range(3):
                engine.step()
        for _ in range(ROUNDS):
            for enabled, engine in engines.items():
                times[enabled] += [engine.step() for _ in range(STEPS)]
        off, on = (statistics.median(times[enabled]) for enabled in (False, True))
        rows.append(report.Row(
            case=f"B={batch} context={context} layers={layers}: on over off", value=on / off - 1, unit="share", bar=bar,
            detail={"off_ms": off * 1e3, "on_ms": on * 1e3, "off_best_ms": min(times[False]) * 1e3,
                    "on_best_ms": min(times[True]) * 1e3}))
        progress.step(f"B={batch} context={context}: {off * 1e3:.2f} ms without, {on * 1e3:.2f} ms with mirrors")
        worker = engines[True].parts.worker
        assert worker is not None
        worker.shutdown()
        del engines, engine, worker
        torch.cuda.empty_cache()
    return rows


def run(*, layers: int = 78, progress: Progress | None = None) -> report.Result:
    """`layers`: of the network. Raises HiSparseError: no CUDA device."""
    need_gpu("step")
    return report.facts("step"), measure(layers, progress or Progress())
