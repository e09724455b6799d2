"""Text to token ids and back with a checkpoint's own `tokenizer.json`; needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from hisparse.errors import ConfigError


class Tokenizer:
    """A fast tokenizer and the ids that end a sequence.

    Attributes:
        eos_token_ids: from generation_config.json, else config.json.
        chat_template: Jinja source from chat_template.jinja or tokenizer_config.json; None = the checkpoint has none.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no tokenizer.json; save the checkpoint with a fast tokenizer")
        self._fast = FastTokenizer.from_file(str(file))
        self.eos_token_ids = _eos(path)
        settings = _read(path / "tokenizer_config.json")
        template = path / "chat_template.jinja"
        self.chat_template: str | None = template.read_text() if template.is_file() else settings.get("chat_template")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; incomplete UTF-8 becomes U+FFFD."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _eos(path: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _read(path / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
