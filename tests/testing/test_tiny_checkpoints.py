"""The tiny checkpoints: what they are made of, and that making them again gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from hisparse.layout import ModelShape
from hisparse.testing.tiny_checkpoints import VARIANTS, _complete


def test_they_are_read_as_dsa_models_with_the_intended_index_groups(tiny_checkpoints) -> None:
    shapes = {name: ModelShape.from_hf_config(json.loads((path / "config.json").read_text()))
              for name, path in tiny_checkpoints.items()}
    assert shapes["glm5"].model_type == shapes["glm52"].model_type == "glm_moe_dsa"
    assert shapes["ds32"].model_type == "deepseek_v32"
    assert [group.layers for group in shapes["glm52"].index_groups] == [(0,), (1, 2), (3, 4), (5,)]
    for name in ("glm5", "ds32"):
        assert [group.layers for group in shapes[name].index_groups] == [(0,), (1,), (2,), (3,)]
    assert {shape.top_k for shape in shapes.values()} == {32}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_their_tensors_have_real_names(tiny_checkpoints, name: str) -> None:
    with safe_open(tiny_checkpoints[name] / "model.safetensors", framework="np") as weights:
        names = set(weights.keys())
    parts = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.indexer.wq_b", "mlp.experts.7.up_proj")
    assert {f"model.layers.1.{part}.weight" for part in parts} <= names
    assert ("model.layers.2.self_attn.indexer.wk.weight" in names) == (name != "glm52")


def test_making_them_again_gives_the_same_bytes_and_repairs_a_torn_cache(tiny_checkpoints_dir: Path,
                                                                         tiny_checkpoints) -> None:
    from hisparse.testing.tiny_checkpoints import tiny_checkpoints as make

    made = make(tiny_checkpoints_dir)
    for name, path in tiny_checkpoints.items():
        for file in ("model.safetensors", "tokenizer.json", "config.json"):
            assert (made[name] / file).read_bytes() == (path / file).read_bytes(), f"{name}/{file}"
    stamp = (made["glm5"] / "model.safetensors").stat().st_mtime_ns
    assert make(tiny_checkpoints_dir) == made
    assert (made["glm5"] / "model.safetensors").stat().st_mtime_ns == stamp, "made once"
    (made["ds32"] / "tokenizer.json").unlink()
    assert _complete(make(tiny_checkpoints_dir))


@pytest.fixture
def tiny_checkpoints_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"
