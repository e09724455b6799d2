"""The seams of transformers: found on the installed release, and missed loudly when they are not there."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import Cache

from hisparse.config import ModelConfig, model_shape
from hisparse.engine.models import hf, rope, seams
from hisparse.engine.models.hf import HandleLayer, load_network
from hisparse.engine.models.indexer import PagedIndexer
from hisparse.engine.parallel import HeadParallel
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.worker import DeviceCache, IndexerPages, KVTables, RowBatch

VERSION = transformers.__version__.replace(".", r"\.")


@pytest.fixture
def copy(tiny_checkpoints, tmp_path: Path) -> Path:
    """A checkpoint that a test may break."""
    shutil.copytree(tiny_checkpoints["glm52"], tmp_path / "model")
    return tmp_path / "model"


def load(path: Path, **kwargs):
    options = {name: kwargs.pop(name) for name in ("dtype",) if name in kwargs}
    return load_network(ModelConfig(path=str(path), max_model_len=64, **options), **kwargs)


@pytest.mark.parametrize("name", ["glm5", "glm52", "ds32"])
def test_the_installed_release_has_every_seam(tiny_checkpoints, name: str) -> None:
    network, shape = load(tiny_checkpoints[name])
    seams.check_seams(network)
    assert [layer.indexer is not None for layer in seams.attention_layers(network)] == [
        i in {group.leader for group in shape.index_groups} for i in range(shape.num_layers)
    ]


def test_a_release_without_expand_kv_is_named(tiny_checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = load(tiny_checkpoints["glm5"])
    monkeypatch.delattr(type(network.model.layers[0].self_attn), "expand_kv")
    with pytest.raises(ConfigError, match=rf"transformers {VERSION} .*expand_kv does not exist.*>=5\.18"):
        seams.check_seams(network)


def test_a_release_whose_cache_has_no_indexer_is_named(tiny_checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Cache, "update_indexer")
    with pytest.raises(ConfigError, match=rf"transformers {VERSION} .*Cache\.update_indexer"):
        load(tiny_checkpoints["glm5"])


def test_another_signature_is_a_missing_seam(tiny_checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = load(tiny_checkpoints["ds32"])
    monkeypatch.setattr(type(network.model.layers[0].self_attn), "expand_kv", lambda self, latent: latent)
    with pytest.raises(ConfigError, match=r"layer 0: DeepseekV32Attention\.expand_kv takes .*expected 2"):
        seams.check_seams(network)


def test_attention_that_is_not_given_the_top_k_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention got no `indices`"):
        hf._attention(torch.nn.Identity(), torch.zeros(1), object.__new__(HandleLayer), None, None, 1.0)
    with pytest.raises(ConfigError, match=r"attention got Tensor as keys"):
        hf._attention(torch.nn.Identity(), torch.zeros(1), torch.zeros(1), None, None, 1.0, indices=torch.zeros(1))


def layer_of(tiny_checkpoints, handle=None) -> HandleLayer:
    network, _ = load(tiny_checkpoints["glm5"])
    return HandleLayer(handle, network.model.layers[0].self_attn, HeadParallel())


def test_expanded_keys_instead_of_latents_are_refused(tiny_checkpoints) -> None:
    """What releases before 5.18 pass: keys of every head."""
    layer = layer_of(tiny_checkpoints)
    layer.batch = RowBatch.build([0] * 3, range(3), is_prefill=True)
    with pytest.raises(ConfigError, match=rf"transformers {VERSION} .*expected latents \[B, 1, S, 64\]"):
        layer.update(torch.zeros(1, 4, 3, 48), torch.zeros(1, 4, 3, 32))


def test_the_cache_is_useless_outside_a_forward(tiny_checkpoints) -> None:
    layer = layer_of(tiny_checkpoints)
    with pytest.raises(InvariantError, match="outside"):
        layer.update(torch.zeros(1, 1, 3, 64), torch.zeros(1, 1, 3, 16))


def test_an_indexer_that_is_not_known_is_refused(tiny_checkpoints) -> None:
    """Which rope an indexer uses is written nowhere but in its class."""
    network, _ = load(tiny_checkpoints["ds32"])
    indexer = network.model.layers[0].self_attn.indexer
    PagedIndexer(indexer, None, 0, None)
    with pytest.raises(ConfigError, match="the indexer Linear has no wq_b"):
        PagedIndexer(torch.nn.Linear(1, 1), None, 0, None)
    indexer.__class__ = type("OtherIndexer", (type(indexer),), {"__module__": type(indexer).__module__})
    with pytest.raises(ConfigError, match="the indexer OtherIndexer has no known rope; known are Glm"):
        PagedIndexer(indexer, None, 0, None)


@pytest.mark.parametrize("name", ["glm52", "ds32"])
def test_the_fused_rope_has_the_models_bits_and_leaves_other_models_alone(tiny_checkpoints, name: str) -> None:
    network, _ = load(tiny_checkpoints[name])
    module = sys.modules[type(network.model.layers[0].self_attn).__module__]
    theirs = module.apply_rotary_pos_emb_interleave
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 5, heads, 48, generator=draw).transpose(1, 2)[..., 32:] for heads in (4, 1))
    cos, sin = network.model.rotary_emb(q, position_ids=torch.arange(10).view(2, 5))
    for got, want in zip(rope._rotate(q, k, cos, sin), theirs(q, k, cos, sin)):
        assert torch.equal(got, want)
    rope.use_fused_rope(network.model.layers[0].self_attn)
    assert network.model.layers[0].self_attn.forward.__func__.__globals__["apply_rotary_pos_emb_interleave"] is rope._rotate
    assert module.apply_rotary_pos_emb_interleave is theirs
    assert type(network.model.layers[1].self_attn).forward is type(network.model.layers[0].self_attn).forward
    with pytest.raises(ConfigError, match="Linear.forward does not call apply_rotary_pos_emb_interleave"):
        rope.use_fused_rope(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["glm52", "ds32"])
def test_the_paged_indexer_selects_what_the_models_own_does(tiny_checkpoints, name: str) -> None:
    """Same module, same inputs: the same set of positions, in ascending order, and never one beyond the context."""
    network, _ = load(tiny_checkpoints[name])
    layer, length = network.model.layers[0].self_attn, 90
    torch.manual_seed(3)
    hidden, resid = torch.randn(1, length, 128), torch.randn(1, length, 96)
    positions = torch.arange(length)[None]
    rope = network.model.rotary_emb(hidden, position_ids=positions)
    causal = positions[:, :, None] >= positions[:, None]
    want = layer.indexer(hidden, resid, rope, causal, positions)[0]
    layout = KVCacheLayout.build(model_shape(ModelConfig(path=str(tiny_checkpoints[name]))), block_size=16)
    cache = DeviceCache(layout, 20)
    tables = KVTables(layout, max_seats=3, max_model_len=length, hot_rows_max=(0,) * len(layout.hots))
    tables.indexer[2] = torch.randperm(18)[: tables.pages] + 1
    batch = RowBatch.build([2] * length, range(length), is_prefill=True)
    got = PagedIndexer(layer.indexer, IndexerPages(cache, tables), 0, lambda: batch)(hidden, resid, rope)[0]
    assert got.shape == (length, 32)
    for row in range(length):
        chosen = [p for p in want[row].tolist() if p <= row]
        assert got[row].tolist() == sorted(chosen) + [-1] * (32 - len(chosen)), f"row {row}"


def test_bfloat16_weights_load_in_the_dtype_that_is_asked_for(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    network, _ = load(copy)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    expected = weights["model.embed_tokens.weight"].bfloat16().float()
    assert torch.equal(network.model.embed_tokens.weight, expected)
    network, _ = load(copy, dtype="bfloat16")
    assert network.model.embed_tokens.weight.dtype == torch.bfloat16


def test_a_checkpoint_that_is_no_dsa_model_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"not a supported DSA checkpoint: model_type is 'llama'"):
        load(copy)


def test_missing_weights_are_refused_not_made_up(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.3.self_attn.indexer.wk.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights, e\.g\. model\.layers\.3\.self_attn\.indexer\.wk\.weight"):
        load(copy)


def test_an_unreadable_checkpoint_is_a_config_error(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="cannot load"):
        load(copy)


def test_heads_must_divide_by_the_ranks(tiny_checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 3 does not divide the model's 4 .*\[1, 2, 4\]"):
        load(tiny_checkpoints["glm5"], num_ranks=3)
