"""What is recorded is what the layers selected: by hand, and against the indexers of unmodified transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.config import load_config
from hisparse.engine.rank import make_recorder
from hisparse.errors import ConfigError
from hisparse.testing.local_engine import LocalEngine
from hisparse.trace.recorder import SelectionRecorder
from hisparse.trace.trace_file import Trace
from hisparse.types import SamplingParams

PROMPT, STEPS = 90, 24


def test_requests_steps_and_seats_by_hand() -> None:
    recorder = SelectionRecorder(max_requests=2, max_steps=2)
    topk = torch.tensor([[4, 0, -1], [7, 2, 9], [1, 0, -1], [5, 5, 5]], dtype=torch.int32)
    seats, positions = torch.tensor([3, 1, 0, -1]), torch.tensor([4, 8, 1, 0])
    for _ in range(3):  # a third request, a third step and a padding row are left out; 9 is beyond position 8
        recorder.begin_step({3: "a", 1: "b", 0: "c"})
        for layer in (0, 2):
            recorder.see(layer, topk, seats, positions)
        recorder.end_step()
    trace = recorder.trace("by hand")
    assert [series.name for series in trace.series] == ["request 0, layer 0", "request 0, layer 2", "request 1, layer 0",
                                                        "request 1, layer 2"]
    assert [step.tolist() for step in trace.series[0].steps] == [[4, 0]] * 2 and trace.series[0].lengths == (5, 5)
    assert [step.tolist() for step in trace.series[3].steps] == [[7, 2]] * 2 and trace.series[3].lengths == (9, 9)


def test_a_seat_that_changes_hands_is_told_apart(tmp_path: Path) -> None:
    recorder = SelectionRecorder(max_requests=1, max_steps=9)
    assert recorder.save(tmp_path / "t.npz", "nothing") is False and not list(tmp_path.iterdir())
    for request_id in ("a", "b"):
        recorder.begin_step({0: request_id})
        recorder.see(0, torch.tensor([[0]]), torch.tensor([0]), torch.tensor([0]))
        recorder.end_step()
    assert recorder.save(tmp_path / "t.npz", "one")
    (series,) = Trace.load(tmp_path / "t.npz").series
    assert len(series.steps) == 1


def settings(path: Path, folder: Path | None, **model: Any) -> Any:
    return load_config({"model": {"path": str(path), "max_model_len": 256} | model, "pd": {"role": "colocated"},
                        "cache": {"device_blocks": 400, "host_pool_gib": 0.02},
                        "trace": {"directory": None if folder is None else str(folder), "steps": STEPS}}, environ={})


@pytest.mark.parametrize("name", ["glm52", "ds32"])
def test_an_engine_records_what_transformers_selects(tiny_checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoints[name]
    engine = LocalEngine(settings(path, tmp_path))
    prompt = torch.randint(0, 512, (PROMPT,), generator=torch.Generator().manual_seed(7)).tolist()
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=STEPS + 4, ignore_eos=True))
    engine.close()
    (file,) = tmp_path.glob("selections-*.npz")
    recorded = {series.name: series for series in Trace.load(file).series}

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    selected: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        if getattr(block.self_attn, "indexer", None) is not None:
            block.self_attn.indexer.register_forward_hook(
                lambda module, args, out, layer=layer: selected.__setitem__(layer, out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(torch.tensor([prompt + answer.token_ids]))
    assert set(recorded) == {f"request 0, layer {layer}" for layer in selected} and len(selected) >= 4
    for layer, topk in selected.items():
        series = recorded[f"request 0, layer {layer}"]
        assert series.lengths == tuple(range(PROMPT + 1, PROMPT + 1 + STEPS))
        for step, length in zip(series.steps, series.lengths):
            want = [position for position in topk[0, length - 1].tolist() if position < length]
            assert sorted(step.tolist()) == sorted(want), (layer, length)


def test_recording_is_off_by_default_and_refused_where_it_cannot_be(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    assert load_config({"model": {"path": "recall"}}, environ={}).trace.directory is None
    path = tiny_checkpoints["glm52"]
    with pytest.raises(ConfigError, match="is no directory"):
        LocalEngine(settings(path, tmp_path / "none"))
    on_gpu = settings(path, tmp_path, device="cuda")
    with pytest.raises(ConfigError, match="set engine.cuda_graphs to false"):
        make_recorder(on_gpu, 0)
    assert make_recorder(on_gpu, 1) is None  # ranks select alike
    assert make_recorder(settings(path, tmp_path).for_role("prefill"), 0) is None
