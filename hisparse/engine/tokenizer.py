"""Text to token ids and back with a checkpoint's own `tokenizer.json`; needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from hisparse.errors import ConfigError


class Tokenizer:
    """A fast tokenizer and the ids that end a sequence.

    Attributes:
        eos_token_ids: from generation_config.json, else config.json.
        chat_template: Jinja source from chat_template.jinja or tokenizer_config.json; None = the checkpoint has none.
        special_tokens: what templates may name, e.g. {"bos_token": "<s>"}, from tokenizer_config.json.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no tokenizer.json; save the checkpoint with a fast tokenizer")
        self._fast = FastTokenizer.from_file(str(file))
        self.eos_token_ids = _eos(path)
        settings = _read(path / "tokenizer_config.json")
        template = path / "chat_template.jinja"
        self.chat_template = template.read_text() if template.is_file() else _default_template(settings.get("chat_template"))
        self.special_tokens = {name: _content(token) for name, token in settings.items() if name.endswith("_token") and token}
        self._added = dict(self._fast.get_added_tokens_decoder())
        self._byte_level = "ByteLevel" in repr(self._fast.decoder)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; incomplete UTF-8 becomes U+FFFD."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> bytes | str:
        """What one token stands for: its bytes, also where they are a part of a character; or, of a special token, which
        has no text, its name.

        Example: of "é" in two tokens the first is b"\\xc3", for which `decode` can only say U+FFFD.
        """
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content) if added.special else str(added.content).encode()
        piece = self._fast.id_to_token(token_id) if self._byte_level else None
        if piece is None or any(char not in _byte_of() for char in piece):
            return self.decode([token_id], skip_special_tokens=False).encode()
        return bytes(_byte_of()[char] for char in piece)


@cache
def _byte_of() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable Latin-1 stands for itself, the other bytes are
    moved up to U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


def _default_template(value: Any) -> str | None:
    """Of one template, or of a list of named ones."""
    if isinstance(value, list):
        value = {item["name"]: item["template"] for item in value}.get("default")
    return None if value is None else str(value)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _eos(path: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _read(path / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
