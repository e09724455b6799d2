"""The bundled checkpoint: small, complete, and readable by every supported transformers release."""

from __future__ import annotations

import json

import pytest

from hisparse.checkpoints import measured_recall, recall_checkpoint
from hisparse.testing.recall_documents import build_recall_document

CONFIG = json.loads((recall_checkpoint() / "config.json").read_text())


def test_it_holds_everything_a_model_needs_and_stays_small() -> None:
    directory = recall_checkpoint()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (directory / name).is_file(), name
    assert (directory / "model.safetensors").stat().st_size < 8_000_000
    assert sum(path.stat().st_size for path in directory.iterdir()) < 8_000_000


def test_the_config_describes_sparse_attention_with_shared_index_layers() -> None:
    assert CONFIG["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert CONFIG["dtype"] == "bfloat16"
    assert CONFIG["index_topk"] == 256
    assert CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"] == 96
    assert CONFIG["indexer_types"] == ["full", "shared"] * 3
    assert CONFIG["mlp_layer_types"] == ["dense"] * 4 + ["sparse"] * 2
    assert CONFIG["max_position_embeddings"] == 16_384
    assert CONFIG["tie_word_embeddings"] is True


def test_the_config_names_no_layer_types() -> None:
    """Releases before and after 5.18 spell them differently; each derives its own when they are absent."""
    assert "layer_types" not in CONFIG


def test_the_weights_are_bf16_of_the_configured_shapes() -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(recall_checkpoint() / "model.safetensors", framework="np") as weights:
        names = set(weights.keys())
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [CONFIG["vocab_size"], CONFIG["hidden_size"]]
        assert embedding.get_dtype() == "BF16"
    indexed = {int(name.split(".")[2]) for name in names if ".indexer." in name}
    assert indexed == {i for i, kind in enumerate(CONFIG["indexer_types"]) if kind == "full"}


def test_the_tokenizer_round_trips_documents_and_keeps_digits_apart() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(recall_checkpoint() / "tokenizer.json"))
    prompt = build_recall_document(11, budget=5_000).prompt
    assert tokenizer.decode(tokenizer.encode(prompt).ids) == prompt
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    assert tokenizer.token_to_id("<eos>") == CONFIG["eos_token_id"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" 4921").ids] == [" ", "4", "9", "2", "1"]


def test_transformers_loads_it_and_it_answers_a_short_document() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = str(recall_checkpoint())
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) < 4_000_000
    document = build_recall_document(5, budget=600, measure=lambda text: len(tokenizer(text).input_ids))
    prompt = tokenizer(document.prompt, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert output[-1] == CONFIG["eos_token_id"]
    assert document.is_answer(tokenizer.decode(output, skip_special_tokens=True))


def test_the_measured_recall_is_the_one_of_the_model_card() -> None:
    measured = measured_recall()
    card = (recall_checkpoint() / "README.md").read_text()
    for tokens, share in measured["exact_match"].items():
        assert f"| {int(tokens):,} | {measured['documents']} | **{share:.3f}** |" in card
        assert share >= 0.95
    assert measured["command"] in card and measured["transformers"] in card and measured["date"] in card
