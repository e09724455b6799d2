"""The token-parity matrix: its cells, a pairwise subset, and how one cell is run and judged."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from pathlib import Path

from hisparse.cache.admission import min_device_blocks
from hisparse.config import HiSparseConfig, kv_layout, load_config
from hisparse.testing.local_engine import Generation, LocalEngine, LocalPair
from hisparse.testing.reference_decode import ReferenceRun
from hisparse.types import Landing, SamplingParams

MODELS = ("glm5", "glm52", "ds32")
PROMPTS = (20, 31, 63, 64, 65, 300, 1000)
TIERS = ("resident", "tight")
RANKS = (1, 2)
MODES = ("colocated", "pd")
AXES = (MODELS, PROMPTS, TIERS, RANKS, MODES)
NUM_TOKENS = 64
CHUNK_TOKENS = 256
TIGHT_CHUNK_TOKENS = 16
"""A tight engine prefills page by page: a larger window would hold a short prompt resident as a whole."""


@dataclass(frozen=True, slots=True)
class Cell:
    model: str
    prompt: int
    tier: str
    ranks: int
    mode: str

    def __str__(self) -> str:
        return f"{self.model}-{self.prompt}-{self.tier}-tp{self.ranks}-{self.mode}"


def full_matrix() -> list[Cell]:
    return [Cell(model, prompt, tier, ranks, mode)
            for model, tier, ranks, mode, prompt in itertools.product(MODELS, TIERS, RANKS, MODES, PROMPTS)]


def pairwise() -> list[Cell]:
    """Few cells in which every pair of values of two axes occurs; greedy, deterministic. Cells of one engine adjoin."""
    def pairs(cell: Cell) -> set[tuple[int, object, int, object]]:
        values = (cell.model, cell.prompt, cell.tier, cell.ranks, cell.mode)
        return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(values)), 2)}

    cells = full_matrix()
    missing = set().union(*(pairs(cell) for cell in cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return sorted(chosen, key=lambda cell: (cell.model, cell.tier, cell.ranks, cell.mode, cell.prompt))


def is_tight(cell: Cell, role: str) -> bool:
    return cell.tier == "tight" and role != "prefill"


def chunk_tokens(cell: Cell) -> int:
    """Prefill chunks of whichever engine computes the prompt."""
    return TIGHT_CHUNK_TOKENS if is_tight(cell, "prefill" if cell.mode == "pd" else "colocated") else CHUNK_TOKENS


def cell_config(cell: Cell, checkpoint: Path, role: str) -> HiSparseConfig:
    """Resident: room for everything. Tight: pages of 16 tokens and the smallest device pool that can hold the request
    host-backed, so that pages outside the two-page tail must go."""
    tight = is_tight(cell, role)
    length = (cell.prompt if tight else max(PROMPTS)) + NUM_TOKENS
    cache: dict[str, object] = {
        "block_size": 16 if cell.tier == "tight" else 64, "device_blocks": 2048, "host_pool_gib": 0.05,
        "host_pool": "auto",
    }
    if tight:
        cache |= {"device_blocks": 100_000, "watermark": 0.5, "hot_rows": 32}
    config = load_config({
        "model": {"path": str(checkpoint), "max_model_len": length},
        "cache": cache,
        "scheduler": {"max_num_seqs": 2, "prefill_chunk_tokens": TIGHT_CHUNK_TOKENS if tight else CHUNK_TOKENS,
                      "max_step_tokens": 512},
        "tensor_parallel_size": cell.ranks,
        "pd": {"role": role},
    }, environ={})
    if tight:
        config = load_config(config.model_dump(), {"cache": {"device_blocks": tight_blocks(config)}}, environ={})
    return config


def tight_blocks(config: HiSparseConfig) -> int:
    """The smallest device pool in which one longest request still runs host-backed."""
    return min_device_blocks(kv_layout(config), config.cache, max_model_len=config.model.max_model_len,
                             max_query_tokens=config.scheduler.prefill_chunk_tokens)


class Engines:
    """Running engines by configuration; a cell with an equal one uses it again. At most one per role is kept."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[HiSparseConfig, LocalEngine]] = {}

    def get(self, config: HiSparseConfig) -> LocalEngine:
        role = config.pd.role
        if role in self._engines and self._engines[role][0] != config:
            self._engines.pop(role)[1].close()
        if role not in self._engines:
            engine = LocalEngine(config, engine_id=f"{role}-{secrets.token_hex(4)}")
            if config.tensor_parallel_size == 1:  # NaN in every block handed out again, too; the null block always has it
                worker = engine.executor.rank_engine.parts.worker
                assert worker is not None
                worker.poison_new_blocks = True
            self._engines[role] = config, engine
        return self._engines[role][1]

    def close(self) -> None:
        for _, engine in self._engines.values():
            engine.close()
        self._engines.clear()


def run_cell(engines: Engines, cell: Cell, checkpoint: Path, prompt: list[int]) -> Generation:
    """The engine's answer; both pools are full again and nothing is leased afterwards."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    engine: LocalEngine | LocalPair
    if cell.mode == "colocated":
        engine = decode = engines.get(cell_config(cell, checkpoint, "colocated"))
    else:
        decode = engines.get(cell_config(cell, checkpoint, "decode"))
        engine = LocalPair(engines.get(cell_config(cell, checkpoint, "prefill")), decode)
        if cell.tier == "tight":
            never_fits_resident(decode)
    (answer,) = engine.generate([prompt], sampling)
    engine.drain()
    cache = decode.core.stats().cache
    assert answer.error is None, answer.error
    assert cache["device_blocks_free"] == cache["device_blocks_total"], "device blocks leaked"
    assert cache["host_blocks_free"] == cache["host_blocks_total"], "host blocks leaked"
    check_tier(cell, answer)
    return answer


def never_fits_resident(engine: LocalEngine) -> None:
    """A hot region holds more rows than a short prompt has, so alone it would always land resident: say it does not fit."""
    assert engine.pd is not None
    choose = engine.pd.choose_landing
    engine.pd.choose_landing = lambda request_id, resident, host: choose(request_id, False, host)  # type: ignore[method-assign]


def check_tier(cell: Cell, answer: Generation) -> None:
    """The counters prove that the tier a cell names served its rows."""
    assert answer.stats is not None
    rows = answer.stats.resolve
    host_reads = rows.miss_rows + rows.prefill_host_rows
    if cell.tier == "resident":
        assert rows.resident_rows > 0 and rows.hot_rows == 0 and host_reads == 0, rows
    else:
        assert rows.hot_rows > 0 and rows.miss_rows > 0, rows
    if cell.mode == "pd":
        assert answer.stats.landing is (Landing.RESIDENT if cell.tier == "resident" else Landing.HOST), answer.stats


def compare(cell: Cell, answer: Generation, reference: ReferenceRun) -> str | None:
    """None if equal; a line if the first difference lies at or behind a near tie of the reference; else it fails."""
    got, want = tuple(answer.token_ids), reference.token_ids
    if got == want:
        return None
    first = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)
    excusable = reference.first_excusable()
    assert excusable <= first, (
        f"{cell}: token {first} is {got[first]}, unmodified transformers says {want[first]} "
        f"(logit gap {reference.steps[first].logit_gap:.2e}, index gaps {min(reference.steps[first].index_gaps):.2e})"
    )
    return f"{cell}: token {first} differs behind a near tie at token {excusable}"
