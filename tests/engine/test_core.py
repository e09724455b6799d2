"""The engine's scheduling over a real cache manager and fake ranks: progress, preemption, limits, no leak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hisparse.config import load_config
from hisparse.engine.core import EngineCore
from hisparse.errors import EngineDeadError, RequestError
from hisparse.types import FinishReason, SamplingParams, StepCommand
from tests.engine.fake_executor import VOCAB, FakeExecutor, expected_tokens

TINY = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 4, "num_attention_heads": 4, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "index_head_dim": 16, "index_topk": 16, "max_position_embeddings": 4096, "vocab_size": VOCAB,
    "indexer_types": ["full", "shared", "full", "shared"],
}


class Harness:
    """An engine and everything it said."""

    def __init__(self, core: EngineCore, executor: FakeExecutor) -> None:
        self.core, self.executor = core, executor
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    def add(self, name: str, prompt: list[int], count: int, **options: Any) -> None:
        self.tokens[name] = []
        self.core.add_request(name, prompt, SamplingParams(max_tokens=count, ignore_eos=True), **options)

    def step(self) -> None:
        for output in self.core.step():
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    def run(self, steps: int = 2000) -> None:
        for _ in range(steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"no progress: {self.core.stats()}")

    def check_empty(self) -> None:
        self.core.check()
        cache = self.core.stats().cache
        assert cache["device_blocks_free"] == cache["device_blocks_total"]
        assert cache["host_blocks_free"] == cache["host_blocks_total"]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def build(*, device_blocks: int = 400, host_pages: int = 200, copy_steps: int = 1, on_command: Any = None,
              max_model_len: int = 1024, **sections: Any) -> Harness:
        host_gib = (host_pages + 0.5) * 4 * 16 * 48 * 4 / (1 << 30)
        config = load_config({
            "model": {"path": str(tmp_path), "max_model_len": max_model_len},
            "cache": {"block_size": 16, "device_blocks": device_blocks, "host_pool_gib": host_gib, **sections.pop("cache", {})},
            "scheduler": {"max_num_seqs": 8, "prefill_chunk_tokens": 64, "max_step_tokens": 128,
                          **sections.pop("scheduler", {})},
            **sections,
        }, environ={})
        executor = FakeExecutor(7, copy_steps=copy_steps, block_size=16, on_command=on_command)
        return Harness(EngineCore(config, executor, engine_id="e", incarnation=7), executor)

    return build


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * 13 + seed * 101) % (VOCAB - 2) + 2 for i in range(length)]


@pytest.mark.parametrize("copy_steps", [0, 1, 7])
@pytest.mark.parametrize("device_blocks", [400, 120, 70])
def test_every_request_ends_with_its_own_tokens(make: Any, device_blocks: int, copy_steps: int) -> None:
    engine = make(device_blocks=device_blocks, copy_steps=copy_steps, max_model_len=320)
    prompts = {f"r{i}": prompt(20 + 37 * i, i) for i in range(7)}
    for name, ids in prompts.items():
        engine.add(name, ids, 40)
    engine.run()
    for name, ids in prompts.items():
        assert engine.tokens[name] == expected_tokens(ids, 40), name
        assert engine.ended[name] is FinishReason.LENGTH
    engine.check_empty()


def test_a_tight_pool_is_really_tight(make: Any) -> None:
    engine = make(device_blocks=90, max_model_len=320)
    for i in range(6):
        engine.add(f"r{i}", prompt(150, i), 100)
    engine.run(6000)
    stats = engine.core.stats()
    assert stats.cache["spills_completed"] > 0 and stats.cache["pages_reused"] > 0 and stats.preemptions > 0, stats
    for i in range(6):
        assert engine.tokens[f"r{i}"] == expected_tokens(prompt(150, i), 100)
    engine.check_empty()


def test_a_repeated_prompt_hits_its_prefix(make: Any) -> None:
    engine = make()
    ids = prompt(200)
    engine.add("a", ids, 8)
    engine.run()
    engine.add("b", ids, 8)
    engine.run()
    assert engine.tokens["a"] == engine.tokens["b"] == expected_tokens(ids, 8)
    assert engine.core.stats().cache["prefix_hit_tokens"] == 192
    engine.check_empty()


def test_an_aligned_full_hit_replays_the_last_token_and_writes_nothing(make: Any) -> None:
    engine = make()
    ids = prompt(192)
    engine.add("a", ids, 1)
    engine.run()
    before = len(engine.executor.commands)
    engine.add("b", ids, 5)
    engine.run()
    chunk = next(c for command in engine.executor.commands[before:] for c in command.chunks)
    assert (chunk.first_position, chunk.token_ids, chunk.writes) == (191, (ids[-1],), False)
    assert engine.tokens["b"] == expected_tokens(ids, 5)
    engine.check_empty()


def test_salts_do_not_share_a_prefix(make: Any) -> None:
    engine = make()
    engine.add("a", prompt(200), 4, cache_salt="tenant-1")
    engine.run()
    engine.add("b", prompt(200), 4, cache_salt="tenant-2")
    engine.run()
    assert engine.core.stats().cache["prefix_hit_tokens"] == 0


@pytest.mark.parametrize("after", range(0, 12))
def test_abort_at_any_step_leaks_nothing(make: Any, after: int) -> None:
    engine = make(device_blocks=90, max_model_len=320, copy_steps=3)
    for i in range(4):
        engine.add(f"r{i}", prompt(150, i), 60)
    for _ in range(after):
        engine.step()
    for i in (0, 2):
        engine.core.abort(f"r{i}")
        engine.core.abort(f"r{i}")
    engine.run(4000)
    for i in (1, 3):
        assert engine.tokens[f"r{i}"] == expected_tokens(prompt(150, i), 60)
    engine.check_empty()


def test_b26_a_head_that_does_not_fit_does_not_stop_a_loaded_request(make: Any) -> None:
    engine = make(device_blocks=120, max_model_len=512)
    engine.add("loaded", prompt(100, 1), 80)
    for _ in range(4):
        engine.step()
    engine.add("head", prompt(420, 2), 8)
    engine.add("small", prompt(20, 3), 8)
    engine.run(4000)
    for name, ids, count in (("loaded", prompt(100, 1), 80), ("head", prompt(420, 2), 8), ("small", prompt(20, 3), 8)):
        assert engine.tokens[name] == expected_tokens(ids, count)
    engine.check_empty()


def test_the_schedulers_process_needs_no_torch() -> None:
    program = ("import sys; sys.modules['torch'] = None; "
               "import hisparse.engine.core, hisparse.pd.scheduler, hisparse.actors.engine, hisparse.actors.executor")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_b08_host_pool_smaller_than_all_outputs_still_finishes(make: Any) -> None:
    engine = make(host_pages=22, max_model_len=320, device_blocks=200)
    for i in range(3):
        engine.add(f"r{i}", prompt(112, i), 64)
    engine.run(6000)
    for i in range(3):
        assert engine.tokens[f"r{i}"] == expected_tokens(prompt(112, i), 64)
    engine.check_empty()


def test_hisparse_off_sends_no_command_and_no_table_of_its_own(make: Any) -> None:
    seen: list[StepCommand] = []
    engine = make(cache={"enabled": False}, on_command=seen.append, device_blocks=400)
    engine.add("a", prompt(100), 20)
    engine.run()
    assert engine.tokens["a"] == expected_tokens(prompt(100), 20)
    assert all("hisparse" not in command.kv for command in seen)
    assert any(command.table_updates for command in seen)


@pytest.mark.parametrize(
    ("ids", "sampling", "status", "words"),
    [
        ([], SamplingParams(max_tokens=4), 400, "empty"),
        ([5], SamplingParams(max_tokens=0), 400, "max_tokens"),
        ([5], SamplingParams(max_tokens=-3), 400, "-3"),
        ([5] * 1020, SamplingParams(max_tokens=10), 413, "max_model_len 1024"),
        ([VOCAB], SamplingParams(max_tokens=4), 400, "vocabulary"),
        ([-1], SamplingParams(max_tokens=4), 400, "vocabulary"),
    ],
)
def test_bad_requests_are_refused_with_what_and_limit(make: Any, ids: list[int], sampling: SamplingParams, status: int,
                                                      words: str) -> None:
    engine = make()
    with pytest.raises(RequestError, match=words) as error:
        engine.core.add_request("x", ids, sampling)
    assert error.value.status == status
    assert not engine.core.has_work()
    engine.check_empty()


def test_a_full_queue_answers_429(make: Any) -> None:
    engine = make(scheduler={"max_waiting": 2})
    for i in range(2):
        engine.add(f"r{i}", prompt(20, i), 4)
    with pytest.raises(RequestError, match="max_waiting") as error:
        engine.core.add_request("x", prompt(20), SamplingParams(max_tokens=4))
    assert error.value.status == 429
    with pytest.raises(RequestError, match="distinct"):
        engine.core.add_request("r0", prompt(20), SamplingParams(max_tokens=4))


def test_a_failed_rank_ends_every_request_with_an_error(make: Any) -> None:
    def fail(command: StepCommand) -> None:
        if command.step == 3:
            raise RuntimeError("rank 0 is gone")

    engine = make(on_command=fail)
    engine.add("a", prompt(100), 20)
    engine.step()
    engine.step()
    with pytest.raises(EngineDeadError, match="rank 0 is gone"):
        engine.step()
    (output,) = engine.core.take_outputs()
    assert output.finish_reason is FinishReason.ERROR and "rank 0 is gone" in str(output.error)
    with pytest.raises(EngineDeadError):
        engine.core.add_request("b", prompt(5), SamplingParams())
