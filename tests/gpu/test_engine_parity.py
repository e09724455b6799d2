"""The CPU's parity tests with engine and oracle on the GPU: every tier, eager and replayed, token for token in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.config import HiSparseConfig
from tests.engine import hand_driver, test_hf_parity, test_wide_rows
from tests.engine.hand_driver import HandDriver, engine_config
from tests.engine.test_hf_parity import (  # noqa: F401  # run here, with the fixtures of this module
    path,
    test_a_batch_of_unequal_lengths_equals_single_runs,
    test_a_replayed_last_token_writes_nothing_and_gives_the_same_logits,
    test_bfloat16_is_no_further_from_the_truth_than_the_oracle_in_bfloat16,
    test_chunks_of_one_step_may_come_in_any_order,
    test_hot_region_and_host_history,
    test_hot_regions_of_different_sizes,
    test_mirrored_decode_rows_replace_their_page,
    test_prefill_and_decode_in_one_step,
    test_prefill_over_host_history,
    test_resident_pages,
    test_short_contexts_select_everything_and_never_padding,
    test_without_hisparse_plain_tables_are_enough,
)
from tests.engine.test_wide_rows import oracle, test_the_error_of_a_row_format, wide_checkpoint  # noqa: F401
from tests.gpu.engine_world import modes, move_to_cuda

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=modes())
def on_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    move_to_cuda(monkeypatch, graphs=request.param, modules=(hand_driver, test_hf_parity, test_wide_rows))


@pytest.fixture
def driver(path: Path, on_cuda: None) -> Iterator[HandDriver]:  # noqa: F811
    with HandDriver(engine_config(path)) as driver:
        assert driver.executor.rank_engine.device.type == "cuda"
        yield driver


@pytest.fixture(params=["direct", "hashed"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, on_cuda: None) -> str:
    def with_table(checkpoint: Path, *, cache: dict[str, object] | None = None) -> HiSparseConfig:
        return engine_config(checkpoint, cache={**(cache or {}), "position_table": request.param})

    monkeypatch.setattr(test_hf_parity, "engine_config", with_table)
    return request.param


def test_both_tables_of_positions(path: Path, table: str) -> None:  # noqa: F811
    """Hot regions of unequal sizes, found through a table of positions or through a hash made by each resolve."""
    test_hot_regions_of_different_sizes(path)
