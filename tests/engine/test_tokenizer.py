"""A checkpoint's tokenizer: bytes of single tokens, and where its chat template comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hisparse.checkpoints import recall_checkpoint
from hisparse.engine.tokenizer import Tokenizer


@pytest.fixture
def recall() -> Tokenizer:
    return Tokenizer(recall_checkpoint())


@pytest.mark.parametrize("text", ["plain words", "naïve — 終わり 😀", "\x00\t\n\r\x7f\xa0\xad", "ÿĀ¡", "a<eos>b"])
def test_bytes_of_tokens_add_up_to_the_text(recall: Tokenizer, text: str) -> None:
    pieces = [recall.piece(token) for token in recall.encode(text)]
    assert b"".join(piece.encode() if isinstance(piece, str) else piece for piece in pieces) == text.encode()
    assert [piece for piece in pieces if isinstance(piece, str)] == ["<eos>"] * text.count("<eos>")


def test_bytes_of_every_token_are_what_it_decodes_to(recall: Tokenizer) -> None:
    """The tokenizers library decodes; it knows no bytes of half characters, which the test above covers."""
    whole = 0
    for token in range(1024):
        text = recall.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text:
            assert recall.piece(token) == (text if token < 3 else text.encode())
            whole += 1
        else:
            with pytest.raises(UnicodeDecodeError):
                recall.piece(token).decode()  # type: ignore[union-attr]
    assert whole > 800


def test_other_tokenizers_give_the_text_they_decode(tiny_checkpoints: dict[str, Path]) -> None:
    tokenizer = Tokenizer(tiny_checkpoints["glm5"])
    tokenizer._byte_level = False
    for token in tokenizer.encode("plain words"):
        assert tokenizer.piece(token) == tokenizer.decode([token]).encode()


@pytest.mark.parametrize(("settings", "jinja", "template"), [
    ({}, None, None), ({"chat_template": "one"}, None, "one"), ({"chat_template": "one"}, "file", "file"),
    ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, None, "d"),
    ({"chat_template": [{"name": "tool_use", "template": "t"}]}, None, None),
])
def test_where_the_template_comes_from(tmp_path: Path, settings: dict[str, Any], jinja: str | None,
                                       template: str | None) -> None:
    shutil.copy(recall_checkpoint() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        settings | {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "pad_token": None, "model_max_length": 5}))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.chat_template == template
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
